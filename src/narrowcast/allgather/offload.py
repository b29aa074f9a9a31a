"""Caches in host memory, copied to the device ahead of their use, and back where they changed.

    gather of A starts      finish of A                             gather of B starts
    A is fetched, unless    B is fetched; rank after rank A is      B arrives, or has arrived
    it was predicted        decoded, copied back if changed, freed

So the device holds the caches of two groups at most, besides those whose gathers are pending; the
host holds all. All copies of a model are on one side stream, in the order in which they were asked
for: a buffer in host memory is never read before it is written nor overwritten before it is read,
and needs no event of its own. (One stream uses the link in one direction at a time.)

On a CPU device the caches are in host memory already, and nothing is copied. The streams have not
run on a GPU yet: the tests run them on an emulated device whose freed memory is reused at once.
"""

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, cuda


@dataclass(frozen=True)
class Arriving:
    """Tensors that are being copied to the device, until the event; ``None``: they are there."""

    tensors: list[Tensor | None]
    event: cuda.Event | None


@dataclass(frozen=True)
class HostCopies:
    """Copies between a device and host memory, while the device computes.

    Attributes:
        stream: for all copies, of pinned memory; ``None`` on devices other than CUDA, where each
            copy is complete when its call returns.
    """

    device: torch.device
    stream: cuda.Stream | None = None

    def to_host(self, tensor: Tensor, buffer: Tensor | None) -> Tensor:
        """Copies a tensor into a buffer of its shape in host memory; ``None``: into a new one."""
        if buffer is None:
            pinned = self.stream is not None
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        if self.stream is None:
            return buffer.copy_(tensor)
        self.stream.wait_stream(cuda.current_stream(self.device))  # which may still write it
        with cuda.stream(self.stream):
            buffer.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)  # its memory must last until it is copied
        return buffer

    def to_device(self, buffers: list[Tensor | None]) -> Arriving:
        """Starts copies to the device, which wait for earlier copies alone."""
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
                    tensor.record_stream(current)  # no later copy may reuse its memory before
        return arriving.tensors


def host_copies(device: torch.device, cache_device: str) -> HostCopies | None:
    """How caches are copied to ``cache_device`` and back; ``None`` where they need not move.

    Args:
        cache_device: ``device`` or ``cpu``.
    """
    if cache_device == "device" or device.type == "cpu":
        return None
    return HostCopies(device, cuda.Stream(device) if device.type == "cuda" else None)


class ShardCache:
    """The cache of a group's shards: a tensor for each rank and chunk, ``None`` while it is cold.

    ``cache[rank]`` is a list of tensors on the device or, with ``copies``, of buffers in host
    memory, which last until ``clear`` and are overwritten.
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
        """Starts to copy the rows of some ranks, or of all, to the device, ahead of ``take``.

        Does not raise where the device has no memory left: ``take`` will try again.
        """
        if self._copies is None:
            return
        with suppress(torch.OutOfMemoryError):
            for rank in range(len(self)) if ranks is None else ranks:
                if rank not in self._arriving:
                    self._arriving[rank] = self._copies.to_device(self._rows[rank])

    def take(self, rank: int) -> list[Tensor | None]:
        """The row of one rank on the device. A copy is freed when the caller drops it."""
        if self._copies is None:
            return self._rows[rank]
        arriving = self._arriving.pop(rank, None) or self._copies.to_device(self._rows[rank])
        return self._copies.arrived(arriving)

    def store(self, rank: int, chunk: int, tensor: Tensor) -> None:
        """Caches a tensor, in the place of one of the same shape if there is any."""
        row = self._rows[rank]
        if self._copies is not None:
            self._arriving.pop(rank, None)  # a copy that was fetched meanwhile is stale
            row[chunk] = self._copies.to_host(tensor, row[chunk])
        elif row[chunk] is None:
            row[chunk] = tensor
        else:
            row[chunk].copy_(tensor)  # in place, since fresh memory costs page faults

    def drop_fetched(self) -> None:
        """Frees what was fetched and not taken."""
        self._arriving.clear()

    def clear(self) -> None:
        """Drops all that is cached."""
        self.drop_fetched()
        self._rows = [[None] * len(row) for row in self._rows]


@dataclass
class Prefetcher:
    """Fetches the cache of each gather ahead, by predicting the order of gathers.

    The next gather is predicted to be the one that followed the last time that the same two gathers
    followed each other: two, since one does not distinguish forward from backward. A group that is
    gathered twice in a row is fetched when its gather starts.
    """

    _next: dict[tuple[ShardCache | None, ShardCache | None], ShardCache] = field(
        default_factory=dict
    )
    _last: tuple[ShardCache | None, ShardCache | None] = (None, None)
    _predicted: ShardCache | None = None

    def starts(self, cache: ShardCache) -> None:
        """A gather is about to start: its cache is fetched while the link is busy."""
        if self._predicted is not None and self._predicted is not cache:
            self._predicted.drop_fetched()
        self._predicted = None
        self._next[self._last] = cache
        self._last = (self._last[1], cache)
        cache.fetch()

    def finishes(self, cache: ShardCache) -> None:
        """A gather is about to be waited for. Only the last that started predicts the next one."""
        if self._last[1] is cache and self._last in self._next:
            self._predicted = self._next[self._last]
            self._predicted.fetch()

    def forget(self) -> None:
        """Forgets the order of gathers, which refers to caches that are replaced now."""
        if self._predicted is not None:
            self._predicted.drop_fetched()
        self._next.clear()
        self._last, self._predicted = (None, None), None
