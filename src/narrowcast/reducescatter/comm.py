"""FSDP2's reduce-scatter, replaced: one object a parameter group, which moves the bytes.

    rank r's contribution      to its owners          at the owner
    +--------+                                        +--------+
    | row 0  |  encode  ->  payload  -> rank 0        | row 0  |  decoded over the rows that have
    | ...    |                                        | ...    |  been sent, then summed in the
    | row W-1|  encode  ->  payload  -> rank W - 1    | row W-1|  order of ranks
    +--------+                                        +--------+

A receiver alone sees a payload that is damaged, hence ranks agree at the end of each call whether
to continue.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from narrowcast import errors
from narrowcast.attribution import counted_by_caller
from narrowcast.errors import Job, raise_alike
from narrowcast.fsdp2 import (
    DefaultAllocMixin,
    ParamGroup,
    ReduceScatter,
    WorkThatFinishes,
)
from narrowcast.reducescatter.codec import Compression
from narrowcast.reducescatter.reduce_op import reduction
from narrowcast.reducescatter.row_codec import RowCodec, sum_in_order
from narrowcast.telemetry.ledger import Ledger
from narrowcast.telemetry.narrowed import ReductionTelemetry
from narrowcast.wire.coders import Coder
from narrowcast.wire.exchange import exchange


@dataclass
class NarrowReduceScatter(DefaultAllocMixin, ReduceScatter):
    """Reduce-scatters the gradients of one parameter group.

    Every contribution arrives at its owner bitwise identical, and is summed there in the order of
    the ranks, in the dtype that FSDP2 reduces in.

    Attributes:
        group: the parameter group.
        telemetry: is called at each event that may be counted.
        job: the ranks that must learn of a failure here; ``None``: nobody.
        before: is called before each reduction.
    """

    group: ParamGroup
    compression: Compression
    coder: Coder
    telemetry: ReductionTelemetry = field(default_factory=ReductionTelemetry)
    job: Job | None = None
    before: Callable[[], None] | None = None

    @property
    def ledger(self) -> Ledger | None:
        """The ledger that counts the group, if any does."""
        return self.telemetry.ledger

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces ``input_tensor`` (W * n,), which it overwrites, into ``output_tensor`` (n,).

        Raises:
            NarrowcastError: on every rank of the job alike.
        """
        subject = f"reduce-scatter of {self.group.name}"
        with self.job.together(subject) if self.job is not None else nullcontext():
            if self.before is not None:
                self.before()
            factor, divisor = reduction(op, group)
            rows_WN = input_tensor.view(group.size(), -1)
            with counted_by_caller():
                self._exchange(rows_WN, group)
            sum_in_order(output_tensor, rows_WN, factor, divisor)
        return WorkThatFinishes(lambda: None) if async_op else None

    def _exchange(self, rows_WN: Tensor, group: dist.ProcessGroup) -> None:
        """Exchanges the rows for other ranks with what those send: afterwards ``rows_WN[s]`` is
        the contribution of rank s to this rank's gradients."""
        codec = RowCodec(
            self.group.name, rows_WN.shape, rows_WN.dtype, self.compression, self.coder
        )
        zeros = 0 if self.telemetry.wants_zeros else None
        error: errors.NarrowcastError | None = None
        payload_bytes = 0

        def payload_for(receiver: int) -> Tensor:
            nonlocal payload_bytes, zeros
            row_N = rows_WN[receiver]
            payload = codec.encode(row_N)
            payload_bytes += payload.numel()
            if zeros is not None:
                zeros += row_N.numel() - int(row_N.count_nonzero())
            return payload

        ranks = dist.get_process_group_ranks(group)
        for sender, payload in exchange(payload_for, group):
            route = f"from rank {ranks[sender]} to rank {ranks[group.rank()]}"
            try:
                with errors.error_context(
                    f"reduce-scatter of {self.group.name}: the payload {route}"
                ):
                    codec.decode_into(rows_WN[sender], payload)
            except errors.NarrowcastError as wrong:
                error = error or wrong
            del payload  # or it would live until the next one arrives
        raise_alike(error, group, rows_WN.device)
        self.telemetry.on_reduced(
            group,
            num_values=(group.size() - 1) * rows_WN.shape[1],
            itemsize=rows_WN.element_size(),
            payload_bytes=payload_bytes,
            zeros=zeros,
        )
