"""How a shard is cut into chunks: neighbouring values that are encoded together."""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowcast.allgather.codec import Scheme
from narrowcast.config import MAX_CHUNK_VALUES
from narrowcast.wire import floats
from narrowcast.wire.floats import FloatLayout

_BYTES = FloatLayout(torch.uint8, torch.uint8, 8, 0)  # of dtypes that only ever go raw


@dataclass(frozen=True)
class Chunk:
    """Neighbouring values of one dtype and one scheme: what is encoded together.

    Attributes:
        params: name of each parameter, and how many of its values are in this run.
        start, stop: in bytes, within the shard of the group.
    """

    scheme: Scheme
    layout: FloatLayout
    params: tuple[tuple[str, int], ...]
    start: int
    stop: int

    @property
    def num_values(self) -> int:
        return (self.stop - self.start) // self.layout.itemsize

    def bits(self, shard_bytes: Tensor) -> Tensor:
        """This run's values within a shard of uint8, as integers."""
        section = shard_bytes[self.start : self.stop]
        if section.storage_offset() % self.layout.itemsize:
            section = section.clone()
        return section.view(self.layout.bits)


def make_chunks(
    params: list[tuple[str, int, torch.dtype]], schemes: dict[str, Scheme]
) -> tuple[Chunk, ...]:
    """Cuts a shard into chunks. ``params``: name, number of elements and dtype, in memory order."""
    chunks: list[Chunk] = []
    start = 0
    for name, numel, dtype in params:
        layout, scheme, left = floats.LAYOUTS.get(dtype), schemes[name], numel
        if layout is None:
            layout, scheme, left = _BYTES, Scheme("none"), numel * dtype.itemsize
        limit = max(MAX_CHUNK_VALUES // scheme.block_size, 1) * scheme.block_size
        while left > 0:
            open_chunk = chunks[-1] if chunks else None
            if (
                open_chunk is None
                or (open_chunk.scheme, open_chunk.layout) != (scheme, layout)
                or open_chunk.num_values == limit
            ):
                chunks.append(Chunk(scheme, layout, (), start, start))
            taken = min(left, limit - chunks[-1].num_values)
            start += taken * layout.itemsize
            piece = ((name, taken),)
            chunks[-1] = replace(chunks[-1], params=chunks[-1].params + piece, stop=start)
            left -= taken
    return tuple(chunks)


def rechunk(
    old_chunks: tuple[Chunk, ...], cached: list[Tensor | None], chunks: tuple[Chunk, ...]
) -> list[Tensor | None]:
    """What is cached of one rank's shard, as ``chunks`` cut and compress it; ``None`` where that
    cannot be made of it. Exponents are made of values; hashes of nothing, and nothing of them, so
    that a run with hashes keeps them only as it is."""
    unchanged = dict(zip(old_chunks, cached, strict=True))
    pieces: dict[str, list[Tensor | None]] = defaultdict(list)
    for chunk, cached_chunk in zip(old_chunks, cached, strict=True):
        sizes = [size for _, size in chunk.params]
        known = cached_chunk is not None and not chunk.scheme.caches_hashes
        split = cached_chunk.split(sizes) if known else [None] * len(sizes)
        for (name, _), piece in zip(chunk.params, split, strict=True):
            pieces[name].append(piece)
    whole = {
        name: None if any(part is None for part in parts) else torch.cat(parts)
        for name, parts in pieces.items()
    }
    taken: Counter[str] = Counter()
    rechunk: list[Tensor | None] = []
    for chunk in chunks:
        parts = []
        for name, size in chunk.params:
            start = taken[name]
            taken[name] += size
            values = whole.get(name)
            parts.append(None if values is None else values[start : start + size])
        rechunk.append(unchanged[chunk] if chunk in unchanged else _cached_as(chunk, parts))
    return rechunk


def _cached_as(chunk: Chunk, parts: list[Tensor | None]) -> Tensor | None:
    if chunk.scheme.caches_hashes or chunk.scheme.compression not in ("delta", "exponent"):
        return None
    if chunk.scheme.compression == "exponent":
        parts = [
            floats.exponents(part, chunk.layout)
            if part is not None and part.dtype == chunk.layout.bits
            else part
            for part in parts
        ]
    cached_dtype = torch.uint8 if chunk.scheme.compression == "exponent" else chunk.layout.bits
    known = all(part is not None and part.dtype == cached_dtype for part in parts)
    return torch.cat(parts) if known and parts else None
