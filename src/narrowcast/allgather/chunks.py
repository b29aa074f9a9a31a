"""How a shard is cut into chunks: neighbouring values that are encoded together."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowcast.allgather.codec import Scheme
from narrowcast.config import MAX_CHUNK_VALUES
from narrowcast.wire import floats
from narrowcast.wire.floats import FloatLayout

_BYTES = FloatLayout(torch.uint8, torch.uint8, 8, 0)  # for dtypes that are never compressed


@dataclass(frozen=True)
class Chunk:
    """Neighbouring values of one dtype and one scheme, which are encoded together.

    Attributes:
        params: the name of each parameter, and how many of its values are in this chunk.
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
        """This chunk's values of a shard, uint8, as integers of ``layout.bits``."""
        section = shard_bytes[self.start : self.stop]
        if section.storage_offset() % self.layout.itemsize:
            section = section.clone()
        return section.view(self.layout.bits)


def make_chunks(
    params: Sequence[tuple[str, int, torch.dtype]], schemes: dict[str, Scheme]
) -> tuple[Chunk, ...]:
    """Cuts a shard into chunks of at most ``MAX_CHUNK_VALUES`` values.

    Args:
        params: name, number of elements and dtype of each parameter, in memory order.
        schemes: by parameter name.
    """
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
            params_of_chunk = (*chunks[-1].params, (name, taken))
            chunks[-1] = replace(chunks[-1], params=params_of_chunk, stop=start)
            left -= taken
    return tuple(chunks)


def rechunk(
    old_chunks: tuple[Chunk, ...], cached: list[Tensor | None], chunks: tuple[Chunk, ...]
) -> list[Tensor | None]:
    """Converts what is cached of one rank's shard to other chunks, and to their schemes.

    Exponents are taken from values. Hashes are converted from nothing and to nothing, so a chunk
    keeps its hashes only if it stays as it is.

    Args:
        old_chunks, cached: the chunks before, and what is cached of each.
        chunks: the chunks from now on.

    Returns:
        What is cached of each of ``chunks``; ``None`` where that cannot be made of ``cached``.
    """
    unchanged = dict(zip(old_chunks, cached, strict=True))
    parts_of: dict[str, list[Tensor | None]] = defaultdict(list)
    for chunk, cached_chunk in zip(old_chunks, cached, strict=True):
        sizes = [size for _, size in chunk.params]
        known = cached_chunk is not None and not chunk.scheme.caches_hashes
        split = cached_chunk.split(sizes) if known else [None] * len(sizes)
        for (name, _), part in zip(chunk.params, split, strict=True):
            parts_of[name].append(part)
    whole = {
        name: None if any(part is None for part in parts) else torch.cat(parts)
        for name, parts in parts_of.items()
    }
    taken: Counter[str] = Counter()
    converted: list[Tensor | None] = []
    for chunk in chunks:
        parts = []
        for name, size in chunk.params:
            start = taken[name]
            taken[name] += size
            values = whole.get(name)
            parts.append(None if values is None else values[start : start + size])
        converted.append(unchanged[chunk] if chunk in unchanged else _cached_as(chunk, parts))
    return converted


def _cached_as(chunk: Chunk, parts: list[Tensor | None]) -> Tensor | None:
    """What a chunk caches, made of values or exponents of its parameters, if they suffice."""
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
