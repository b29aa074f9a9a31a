"""Reduce operations as a process group's own backend performs them."""

import torch.distributed as dist


def reduction(
    op: dist.ReduceOp | dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> tuple[float, int]:
    """The factor of each contribution and the divisor of their sum by which the process group's
    own backend performs a reduce operation.

    Raises:
        ValueError: FSDP2 uses no such operation.
    """
    if op == dist.ReduceOp.SUM:
        return 1, 1
    if op == dist.ReduceOp.AVG:
        # NCCL multiplies floats before it sums (ncclAvg is a PreMulSum); gloo divides the sum.
        is_nccl = dist.get_backend(group) == dist.Backend.NCCL
        return (1 / group.size(), 1) if is_nccl else (1, group.size())
    if op == dist.ReduceOp.PREMUL_SUM:
        return op.factor, 1  # ``factor`` is not documented
    raise ValueError(f"reduce operation {op}; allowed: SUM, AVG, PREMUL_SUM")
