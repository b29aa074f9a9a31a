"""The FSDP2 seam: one reduce-scatter object a parameter group.

    rank r's contribution      to its owners          at the owner
    +--------+                                        +--------+
    | row 0  |  encode  ->  payload  -> rank 0        | row 0  |  decoded over the rows that have
    | ...    |                                        | ...    |  been sent, then summed in the
    | row W-1|  encode  ->  payload  -> rank W - 1    | row W-1|  order of ranks
    +--------+                                        +--------+

Nothing is kept from call to call, so no rank can come out of step. A receiver alone sees a payload
that is damaged, hence ranks agree at the end of each call on whether to go on.
"""

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from narrowcast import errors
from narrowcast.attribution import CALLER, counted_as
from narrowcast.config import MAX_CHUNK_VALUES
from narrowcast.errors import Job, raise_alike
from narrowcast.fsdp2 import (
    DefaultAllocMixin,
    ParamGroup,
    ReduceScatter,
    WorkThatFinishes,
)
from narrowcast.reducescatter import codec
from narrowcast.reducescatter.codec import Compression
from narrowcast.reducescatter.reduce_op import reduction
from narrowcast.telemetry.ledger import Ledger, all_reduce_bytes
from narrowcast.wire import packet
from narrowcast.wire.coders import Coder
from narrowcast.wire.exchange import exchange


@dataclass
class NarrowReduceScatter(DefaultAllocMixin, ReduceScatter):
    """Reduce-scatters the gradients of one parameter group.

    Every contribution arrives at its owner to the last bit, and is summed there in the order of
    the ranks, in the dtype that FSDP2 reduces in.

    Attributes:
        group: the parameter group.
        ledger: where bytes are counted, if anywhere.
        job: the ranks that must learn of a failure here; ``None``: nobody.
        before: is called before each reduction.
    """

    group: ParamGroup
    compression: Compression
    coder: Coder
    ledger: Ledger | None = None
    job: Job | None = None
    before: Callable[[], None] | None = None

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
            if self.ledger is not None:
                self.ledger.show_gradients(self.group, rows_WN)
            with counted_as(CALLER):
                self._exchange(rows_WN, group)
            _sum_in_order(output_tensor, rows_WN, factor, divisor)
        return WorkThatFinishes(lambda: None) if async_op else None

    def _exchange(self, rows_WN: Tensor, group: dist.ProcessGroup) -> None:
        """Swaps the rows for other ranks with what those send: ``rows_WN[s]`` is rank s's share."""
        settings = self._settings(rows_WN)
        error: errors.NarrowcastError | None = None
        sent_bytes = num_zeros = 0

        def payload_for(receiver: int) -> Tensor:
            nonlocal sent_bytes, num_zeros
            row_N = rows_WN[receiver]
            payload = self._encode(row_N, settings)
            sent_bytes += payload.numel()
            if self.ledger is not None:
                num_zeros += row_N.numel() - int(row_N.count_nonzero())
            return payload

        ranks = dist.get_process_group_ranks(group)
        for sender, payload in exchange(payload_for, group):
            route = f"from rank {ranks[sender]} to rank {ranks[group.rank()]}"
            try:
                with errors.error_context(
                    f"reduce-scatter of {self.group.name}: the payload {route}"
                ):
                    self._decode(rows_WN[sender], payload, settings)
            except errors.NarrowcastError as wrong:
                error = error or wrong
            del payload  # or it would live until the next one comes
        raise_alike(error, group, rows_WN.device)
        if self.ledger is not None:
            others = group.size() - 1
            small_bytes = 8 * others + all_reduce_bytes(4, group.size())
            num_values = others * rows_WN.shape[1]
            plain_bytes = num_values * rows_WN.element_size()
            self.ledger.add("reduce_scatter", sent_bytes + small_bytes, plain_bytes)
            self.ledger.record_reduction(num_values, sent_bytes, num_values, num_zeros)

    def _settings(self, rows_WN: Tensor) -> int:
        """A digest of all that the ranks must agree on."""
        text = repr((self.group.name, rows_WN.shape, rows_WN.dtype, self.compression))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def _encode(self, row_N: Tensor, settings: int) -> Tensor:
        """What a rank cannot encode it tells the one that waits for it."""
        chunks = row_N.split(MAX_CHUNK_VALUES)
        try:
            return packet.pack(
                [codec.encode(chunk, self.compression, self.coder) for chunk in chunks],
                coder=self.coder,
                settings=settings,
                sequence=0,
                shard_checksum=0,
                device=row_N.device,
            )
        except Exception as error:
            return packet.pack_failure(
                error, num_chunks=len(chunks), settings=settings, sequence=0, device=row_N.device
            )

    def _decode(self, row_N: Tensor, payload: Tensor, settings: int) -> None:
        """Checks a payload, and decodes it into ``row_N``."""
        header, body = packet.unpack(payload)
        if header.settings != settings:
            raise errors.SettingsError(
                "holds other gradients than are due here, by their number, dtype or compression: "
                "give every rank the same model, mesh, compression and reduce dtype, and let the "
                "same parameters have gradients on all"
            )
        coder = (self.coder.wire_id, self.coder.wire_version)
        if header.status == packet.Status.OK and header.coder != coder:
            raise errors.SettingsError(
                f"is coded by (id, version) {header.coder}, this rank's coder is {coder}: install "
                "the same releases on every rank"
            )
        encoded_chunks = packet.unpack_body(header, body)
        for chunk, encoded in zip(row_N.split(MAX_CHUNK_VALUES), encoded_chunks, strict=True):
            codec.decode_into(chunk, encoded, self.coder)


def _sum_in_order(output_N: Tensor, rows_WN: Tensor, factor: float, divisor: int) -> None:
    """``factor`` times each row, summed from the first to the last, over ``divisor``."""
    size = MAX_CHUNK_VALUES  # in stretches that stay in a CPU's cache
    for output, rows in zip(output_N.split(size), rows_WN.split(size, dim=1), strict=True):
        if factor != 1:
            rows.mul_(factor)
        output.copy_(rows[0])
        for row in rows[1:]:
            output.add_(row)
        if divisor != 1:
            output.div_(divisor)
