"""How a shard is cut into runs: neighbouring values that are encoded together."""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowcast.allgather.codec import Scheme
from narrowcast.config import MAX_RUN_VALUES
from narrowcast.wire import floats
from narrowcast.wire.floats import FloatLayout

_BYTES = FloatLayout(torch.uint8, torch.uint8, 8, 0)  # of dtypes that only ever go raw


@dataclass(frozen=True)
class Run:
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


def make_runs(
    params: list[tuple[str, int, torch.dtype]], schemes: dict[str, Scheme]
) -> tuple[Run, ...]:
    """Cuts a shard into runs. ``params``: name, number of elements and dtype, in memory order."""
    runs: list[Run] = []
    start = 0
    for name, numel, dtype in params:
        layout, scheme, left = floats.LAYOUTS.get(dtype), schemes[name], numel
        if layout is None:
            layout, scheme, left = _BYTES, Scheme("raw"), numel * dtype.itemsize
        limit = max(MAX_RUN_VALUES // scheme.block_size, 1) * scheme.block_size
        while left > 0:
            open_run = runs[-1] if runs else None
            if (
                open_run is None
                or (open_run.scheme, open_run.layout) != (scheme, layout)
                or open_run.num_values == limit
            ):
                runs.append(Run(scheme, layout, (), start, start))
            taken = min(left, limit - runs[-1].num_values)
            start += taken * layout.itemsize
            piece = ((name, taken),)
            runs[-1] = replace(runs[-1], params=runs[-1].params + piece, stop=start)
            left -= taken
    return tuple(runs)


def recut(
    old_runs: tuple[Run, ...], kept: list[Tensor | None], runs: tuple[Run, ...]
) -> list[Tensor | None]:
    """What is kept of one rank's shard, as ``runs`` cut and treat it; ``None`` where that cannot be
    made of it. Exponents are made of values; hashes of nothing, and nothing of them, so that a run
    with hashes keeps them only as it is."""
    unchanged = dict(zip(old_runs, kept, strict=True))
    pieces: dict[str, list[Tensor | None]] = defaultdict(list)
    for run, kept_of_run in zip(old_runs, kept, strict=True):
        sizes = [size for _, size in run.params]
        known = kept_of_run is not None and not run.scheme.keeps_hashes
        split = kept_of_run.split(sizes) if known else [None] * len(sizes)
        for (name, _), piece in zip(run.params, split, strict=True):
            pieces[name].append(piece)
    whole = {
        name: None if any(part is None for part in parts) else torch.cat(parts)
        for name, parts in pieces.items()
    }
    taken: Counter[str] = Counter()
    recut: list[Tensor | None] = []
    for run in runs:
        parts = []
        for name, size in run.params:
            start = taken[name]
            taken[name] += size
            values = whole.get(name)
            parts.append(None if values is None else values[start : start + size])
        recut.append(unchanged[run] if run in unchanged else _kept_as(run, parts))
    return recut


def _kept_as(run: Run, parts: list[Tensor | None]) -> Tensor | None:
    if run.scheme.keeps_hashes or run.scheme.treatment not in ("value", "exponent"):
        return None
    if run.scheme.treatment == "exponent":
        parts = [
            floats.exponents(part, run.layout)
            if part is not None and part.dtype == run.layout.bits
            else part
            for part in parts
        ]
    kept_dtype = torch.uint8 if run.scheme.treatment == "exponent" else run.layout.bits
    known = all(part is not None and part.dtype == kept_dtype for part in parts)
    return torch.cat(parts) if known and parts else None
