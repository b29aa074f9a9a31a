"""A gather whose first round has been sent: what arrives is checked, decoded and cached.

No rank raises alone here: whatever is wrong with a payload, all ranks have received it.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast import errors
from narrowcast.allgather.shard_codec import Prepared, ShardCodec
from narrowcast.fsdp2 import ParamGroup
from narrowcast.telemetry.narrowed import GatherTelemetry
from narrowcast.wire import packet
from narrowcast.wire.exchange import start_round
from narrowcast.wire.packet import Header


@dataclass
class GatherState:
    """What the ranks of one process group know of each other's shards of one size.

    Attributes:
        padded_size: bytes that every rank sends in the first round of the next gather, as agreed.
        prepared: this rank's shard, if it was encoded ahead of its gather.
    """

    codec: ShardCodec
    padded_size: int
    prepared: Prepared | None = None

    @property
    def next_size(self) -> int:
        """Bytes of the payload that is prepared; without one, of the buffer agreed upon last."""
        return self.prepared.payload.numel() if self.prepared is not None else self.padded_size

    def reset(self) -> None:
        """Drops what is cached, but not ``padded_size``, on which the ranks have agreed."""
        self.codec.reset()
        self.prepared = None


@dataclass(frozen=True)
class Gather:
    """A gather that has started.

    Attributes:
        group: whose shards are gathered.
        process_group: the ranks that take part, W of them.
        prepared: this rank's shard.
        buffers: what arrives in the first round, uint8 of (W, padded size).
        telemetry: is called at each event that may be counted or timed.
    """

    group: ParamGroup
    process_group: dist.ProcessGroup
    state: GatherState
    prepared: Prepared
    buffers: Tensor
    telemetry: GatherTelemetry

    def finish(self, rows: Tensor) -> None:
        """Decodes what has arrived into ``rows``, uint8 of (W, bytes of a shard), and caches it.

        Raises:
            NarrowcastError: on every rank of the process group alike.
        """
        codec, prepared = self.state.codec, self.prepared
        ranks = dist.get_process_group_ranks(self.process_group)
        headers = self._read_headers(ranks)
        sent_bytes, bodies = self._bodies(headers)
        for r, (rank, header, body) in enumerate(zip(ranks, headers, bodies, strict=True)):
            own_shard = prepared.shard_bytes if r == codec.rank else None
            with self._error_context(rank), self.telemetry.coding():
                codec.decode(r, header, body, rows[r], own_shard)
        if codec.verifies:
            self._verify(ranks, headers, rows)
        codec.sequence += 1
        self.state.padded_size = codec.payload_bytes_if_unchanged(headers)
        self.telemetry.on_gathered(
            self.group,
            self.process_group,
            num_values=codec.num_values,
            sent_bytes=sent_bytes,
            changes=prepared.changes,
        )

    def _read_headers(self, ranks: list[int]) -> list[Header]:
        codec = self.state.codec
        on_host = self.buffers[:, : codec.header_size].cpu().numpy()  # of all ranks in one copy
        headers = []
        for rank, header_bytes, buffer in zip(ranks, on_host, self.buffers, strict=True):
            with self._error_context(rank):
                headers.append(codec.read_header(header_bytes.tobytes(), buffer))
        with self._error_context():
            packet.check_agreement(dict(zip(ranks, headers, strict=True)))
        return headers

    def _bodies(self, headers: list[Header]) -> tuple[int, list[Tensor]]:
        """The bodies of all payloads, after a second round if one did not fit into its buffer.

        Returns:
            Bytes that each rank has sent in all, and the bodies without their padding.
        """
        header_size, padded_size = self.state.codec.header_size, self.buffers.shape[1]
        sizes = [header.body_size for header in headers]
        sent_bytes, padded_bodies = padded_size, self.buffers[:, header_size:]
        if header_size + max(sizes) > padded_size:
            body = self.prepared.payload[header_size:]
            padded_bodies, _ = start_round(body, max(sizes), self.process_group, async_op=False)
            sent_bytes += max(sizes)
        return sent_bytes, [body[:size] for body, size in zip(padded_bodies, sizes, strict=True)]

    def _verify(self, ranks: list[int], headers: list[Header], rows: Tensor) -> None:
        """Compares checksums of all rows with those that the senders took before encoding."""
        differs = [
            packet.checksum(row) != header.shard_checksum
            for row, header in zip(rows, headers, strict=True)
        ]
        wrong = torch.tensor(differs, dtype=torch.int32, device=rows.device)
        dist.all_reduce(wrong, op=dist.ReduceOp.MAX, group=self.process_group)
        self.telemetry.on_small_all_reduce(4 * len(differs), self.process_group)
        wrong_ranks = [rank for rank, one in zip(ranks, wrong.tolist(), strict=True) if one]
        if wrong_ranks:
            with self._error_context(wrong_ranks[0]):
                raise errors.VerificationError(
                    "was not rebuilt as it was sent, on at least one rank: caches differ. Call "
                    "reset() of the handle on every rank, or restart from the last checkpoint"
                )

    def _error_context(self, rank: int | None = None) -> AbstractContextManager[None]:
        """Names in an error the gather, and the sender of the payload, that it is about."""
        subject = describe(self.group)
        if rank is not None:
            subject += f" the payload of rank {rank}"
        return errors.error_context(subject)


def describe(group: ParamGroup) -> str:
    """The gather of a parameter group, as messages of errors begin."""
    return f"all-gather of {group.name} ({group.names[0]} .. {group.names[-1]}):"
