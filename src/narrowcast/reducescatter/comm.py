"""FSDP2's reduce-scatter, replaced: one object a parameter group, which moves the bytes.

    rank r's contribution      to its owners          at the owner
    +--------+                                        +--------+
    | row 0  |  encode  ->  payload  -> rank 0        | row 0  |  decoded over the rows that have
    | ...    |                                        | ...    |  been sent, then summed in the
    | row W-1|  encode  ->  payload  -> rank W - 1    | row W-1|  order of ranks
    +--------+                                        +--------+

Where a process group has several ranks on each of several nodes, the contributions of a node are
summed within it first, and the rows above are those of nodes (``two_levels``). Within one node the
backend reduces.

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
from narrowcast.reducescatter.two_levels import check_same_within, sum_within
from narrowcast.telemetry.ledger import Ledger
from narrowcast.telemetry.narrowed import ReductionTelemetry
from narrowcast.topology import FLAT, Topology, TwoLevels
from narrowcast.wire.coders import Coder
from narrowcast.wire.exchange import exchange


@dataclass
class NarrowReduceScatter(DefaultAllocMixin, ReduceScatter):
    """Reduce-scatters the gradients of one parameter group.

    Every contribution, or the sum of a node's contributions, arrives at its owner bitwise
    identical, and is summed there in the order of ranks or nodes, in the dtype that FSDP2 reduces
    in.

    Attributes:
        group: the parameter group.
        compression: ``None``: the gradients are reduced by ``plain``, and the backend sums them.
        telemetry: is called at each event that may be counted.
        job: the ranks that must learn of a failure here; ``None``: nobody.
        topology: where the ranks are. Reductions within a node are left to ``plain``.
        before: is called before each reduction.
        plain: the group's own reduce-scatter.
    """

    group: ParamGroup
    compression: Compression | None
    coder: Coder
    telemetry: ReductionTelemetry = field(default_factory=ReductionTelemetry)
    job: Job | None = None
    topology: Topology = FLAT
    before: Callable[[], None] | None = None
    plain: ReduceScatter | None = None

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
        """Reduces ``input_tensor`` (W * n,), which it may overwrite, into ``output_tensor`` (n,).

        Raises:
            NarrowcastError: on every rank of the job alike.
        """
        subject = f"reduce-scatter of {self.group.name}"
        with self.job.together(subject) if self.job is not None else nullcontext():
            if self.before is not None:
                self.before()
            if self.compression is None or self.topology.is_local(group):
                assert self.plain is not None
                return self.plain(output_tensor, input_tensor, group, op, async_op)
            factor, divisor = reduction(op, group)
            rows_WN = input_tensor.view(group.size(), -1)
            levels = self.topology.levels_of(group)
            with counted_by_caller():
                if levels is None:
                    self._exchange(rows_WN, group)
                    sum_in_order(output_tensor, rows_WN, factor, divisor)
                else:
                    sums_RN = self._sum_within(rows_WN, levels)
                    self._exchange(sums_RN, group)
                    sum_in_order(output_tensor, sums_RN, 1, divisor)
                    if factor != 1:
                        output_tensor.mul_(factor)
        return WorkThatFinishes(lambda: None) if async_op else None

    def _codec(self, rows_WN: Tensor) -> RowCodec:
        assert self.compression is not None
        return RowCodec(self.group.name, rows_WN.shape, rows_WN.dtype, self.compression, self.coder)

    def _sum_within(self, rows_WN: Tensor, levels: TwoLevels) -> Tensor:
        digest = self._codec(rows_WN).settings
        with errors.error_context(f"reduce-scatter of {self.group.name}: a rank"):
            check_same_within(digest, levels, rows_WN.device)
        return sum_within(rows_WN, levels)

    def _exchange(self, rows_WN: Tensor, process_group: dist.ProcessGroup) -> None:
        """Exchanges the rows for other ranks with what those send: afterwards ``rows_WN[s]`` is
        the contribution to this rank's gradients of rank s among those that exchange payloads.

        Args:
            process_group: the ranks that reduce together.
        """
        codec, group = self._codec(rows_WN), self.topology.payload_group(process_group)
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
        raise_alike(error, process_group, rows_WN.device)
        self.telemetry.on_reduced(
            process_group,
            self.topology.levels_of(process_group),
            row_bytes=rows_WN.shape[1] * rows_WN.element_size(),
            num_values=(group.size() - 1) * rows_WN.shape[1],
            payload_bytes=payload_bytes,
            zeros=zeros,
        )
