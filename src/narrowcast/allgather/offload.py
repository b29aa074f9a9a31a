"""Caches in host memory: on the device ahead of their use, and out again where they changed.

    gather of A starts     finish of A                              gather of B starts
    A is fetched, unless   B is fetched; rank after rank A is       B is on its way, or there
    it was predicted        decoded, copied out if changed, freed

So the device holds the caches of two groups at most, and of those whose gathers are under way; the
host holds all. All copies of a model take one side stream, in the order in which they were asked
for: a buffer in host memory is never read before it was written nor overwritten before it was read,
and needs no event of its own. (One stream uses the link in one direction at a time.)

On a CPU device caches are in host memory anyhow, and nothing is copied. The streams have not run on
a GPU yet: the tests run them on a device that is emulated, with memory that is reused at once.
"""

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, cuda


@dataclass(frozen=True)
class Arriving:
    """Tensors on their way to the device. They are there once the event is; ``None``: already."""

    tensors: list[Tensor | None]
    event: cuda.Event | None


@dataclass(frozen=True)
class HostCopies:
    """Copies between a device and host memory, beside what the device computes.

    Attributes:
        stream: takes all copies, of pinned memory; ``None``, of devices other than CUDA: each copy
            is done before anything else.
    """

    device: torch.device
    stream: cuda.Stream | None = None

    def to_host(self, tensor: Tensor, buffer: Tensor | None) -> Tensor:
        """Copies ``tensor`` into ``buffer``, host memory of its shape; ``None``: into a new one."""
        if buffer is None:
            pinned = self.stream is not None
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        if self.stream is None:
            return buffer.copy_(tensor)
        self.stream.wait_stream(cuda.current_stream(self.device))  # which still writes the tensor
        with cuda.stream(self.stream):
            buffer.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)  # whoever frees it, its memory lasts until it is copied
        return buffer

    def to_device(self, buffers: list[Tensor | None]) -> Arriving:
        """Starts to copy to the device; it waits for nothing but the copies before it."""
        with cuda.stream(self.stream) if self.stream is not None else nullcontext():
            tensors = [None if buffer is None else self._copy(buffer) for buffer in buffers]
            event = self.stream.record_event() if self.stream is not None else None
        return Arriving(tensors, event)

    def _copy(self, buffer: Tensor) -> Tensor:
        tensor = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.device)
        return tensor.copy_(buffer, non_blocking=self.stream is not None)

    def arrived(self, arriving: Arriving) -> list[Tensor | None]:
        """The tensors, for the current stream to use."""
        if arriving.event is not None:
            current = cuda.current_stream(self.device)
            current.wait_event(arriving.event)
            for tensor in arriving.tensors:
                if tensor is not None:
                    tensor.record_stream(current)  # no later copy may take its memory before
        return arriving.tensors


def host_copies(device: torch.device, cache_device: str) -> HostCopies | None:
    """How caches get to ``cache_device`` and back; ``None`` where they need not move.

    Args:
        cache_device: ``device`` or ``cpu``.
    """
    if cache_device == "device" or device.type == "cpu":
        return None
    return HostCopies(device, cuda.Stream(device) if device.type == "cuda" else None)


class ShardCache:
    """What is cached of a group's shards: for each rank and each run a tensor; ``None`` when cold.

    ``cached[rank]`` is what stays: tensors on the device or, with ``copies``, buffers in host
    memory, which last until ``clear`` and are written over.
    """

    def __init__(self, num_ranks: int, num_chunks: int, copies: HostCopies | None = None) -> None:
        self._rows: list[list[Tensor | None]] = [[None] * num_chunks for _ in range(num_ranks)]
        self._copies = copies
        self._arriving: dict[int, Arriving] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rank: int) -> list[Tensor | None]:
        return self._rows[rank]

    @property
    def nbytes(self) -> int:
        tensors = [tensor for row in self._rows for tensor in row if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def fetch(self, ranks: Iterable[int] | None = None) -> None:
        """Starts to bring the rows of some ranks, or of all, to the device, ahead of ``take``.

        It never raises for want of memory, where a rank that raises alone would leave the others
        waiting: ``take`` will ask again.
        """
        if self._copies is None:
            return
        with suppress(torch.OutOfMemoryError):
            for rank in range(len(self)) if ranks is None else ranks:
                if rank not in self._arriving:
                    self._arriving[rank] = self._copies.to_device(self._rows[rank])

    def take(self, rank: int) -> list[Tensor | None]:
        """One row on the device, whose memory is the caller's to free."""
        if self._copies is None:
            return self._rows[rank]
        arriving = self._arriving.pop(rank, None) or self._copies.to_device(self._rows[rank])
        return self._copies.arrived(arriving)

    def store(self, rank: int, chunk: int, tensor: Tensor) -> None:
        """Keeps a tensor, in the place of one of the same shape if there is any."""
        row = self._rows[rank]
        if self._copies is not None:
            self._arriving.pop(rank, None)  # what was fetched meanwhile is out of date
            row[chunk] = self._copies.to_host(tensor, row[chunk])
        elif row[chunk] is None:
            row[chunk] = tensor
        else:
            row[chunk].copy_(tensor)  # in place: fresh memory would cost page faults

    def leave(self) -> None:
        """Frees what was fetched and not taken."""
        self._arriving.clear()

    def clear(self) -> None:
        """Drops all that is cached."""
        self.leave()
        self._rows = [[None] * len(row) for row in self._rows]


@dataclass
class Prefetcher:
    """Fetches for each gather, and then for the one that came next the last time that the same two
    gathers came one after the other, which tells forward from backward. A group that is gathered
    twice in a row is fetched when its gather starts.
    """

    _next: dict[tuple[ShardCache | None, ShardCache | None], ShardCache] = field(
        default_factory=dict
    )
    _last: tuple[ShardCache | None, ShardCache | None] = (None, None)
    _predicted: ShardCache | None = None

    def starts(self, cached: ShardCache) -> None:
        """A gather is about to start: the link gives the time to fetch what it will need."""
        if self._predicted is not None and self._predicted is not cached:
            self._predicted.leave()
        self._predicted = None
        self._next[self._last] = cached
        self._last = (self._last[1], cached)
        cached.fetch()

    def finishes(self, cached: ShardCache) -> None:
        """A gather is about to be waited for. Only the last that started predicts the next one."""
        if self._last[1] is cached and self._last in self._next:
            self._predicted = self._next[self._last]
            self._predicted.fetch()

    def forget(self) -> None:
        """For groups whose ``ShardCache`` are replaced: what was learned holds on to the old
        ones."""
        if self._predicted is not None:
            self._predicted.leave()
        self._next.clear()
        self._last, self._predicted = (None, None), None
