"""How often exponents change from step to step, counted (CIERA, sections 2.2 to 2.5).

After each step of the optimizer every rank compares all of its own shards, as they would be
gathered, with their exponents of the step before, of which it caches a byte per value. Nothing is
sent: ``merged`` puts the counts of all ranks together.

Shards on more ranks are projected as in the paper, by dividing each shard further; shards on fewer
ranks are those of neighbouring ranks, joined.
"""

import statistics
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast import util
from narrowcast.allgather import codec
from narrowcast.fsdp2 import ParamGroup
from narrowcast.telemetry.changes import SHARD_TYPES, shard_type
from narrowcast.wire import floats
from narrowcast.wire.floats import FloatLayout

BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)  # each divides the next
FACTORS = (2, 4, 8)  # of larger world sizes to that of the job
INTERVALS = range(1, 11)  # steps from one check to the next
ALL = "all"  # in the place of a type of shard

_SAMPLE = 1 << 20  # values of a rank, for ``INTERVALS``
_REPEATS = 3


def any_of_each(flags_N: Tensor, size: int) -> Tensor:
    """Whether any of each ``size`` consecutive flags is set: bool of shape (ceil(N / size),)."""
    return pad(flags_N, (0, -flags_N.numel() % size)).view(-1, size).any(dim=1)


def part_size(num_values: int, factor: int) -> int:
    """Values on each rank where those of one rank are divided over ``factor`` ranks."""
    return max(-(-num_values // factor), 1)


def count(changed_N: Tensor, block_size: int) -> Tensor:
    """Counts what changed of a shard.

    Args:
        changed_N: whether the exponent of each value changed.

    Returns:
        Numbers of changed values, of changed blocks of ``block_size`` and of each of
        ``BLOCK_SIZES``, and of changed parts where the shard is divided over each of ``FACTORS``:
        int64 of shape (2 + len(BLOCK_SIZES) + len(FACTORS),).
    """
    flags = [changed_N, any_of_each(changed_N, block_size)]
    blocks, width = changed_N, 1
    for size in BLOCK_SIZES:
        blocks, width = any_of_each(blocks, size // width), size
        flags.append(blocks)
    flags += [any_of_each(changed_N, part_size(changed_N.numel(), factor)) for factor in FACTORS]
    return torch.stack([flag.sum() for flag in flags])


def sizes(num_values: int, block_size: int) -> list[int]:
    """The totals that the numbers of ``count`` are to be divided by."""
    lengths = [1, block_size, *BLOCK_SIZES]
    lengths += [part_size(num_values, factor) for factor in FACTORS]
    return [-(-num_values // length) for length in lengths]


@dataclass
class ShardRecord:
    """One rank's shard of one parameter, over the settled steps, which figure 2 alone extends.

    Attributes:
        ranks: over which the parameter is sharded.
        place: index of this rank among them.
        values: size of the padded shard.
        changed_steps: whether any exponent changed, for each step.
        counts: results of ``count``, summed over the steps.
    """

    name: str
    ranks: tuple[int, ...]
    place: int
    values: int
    changed_steps: list[bool] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def block_rate(self, block_size: int) -> float:
        """The share of all its blocks and steps that changed."""
        return self.counts[1] / (sizes(self.values, block_size)[1] * len(self.changed_steps))


@dataclass(frozen=True)
class Recorded:
    """The counts of one rank.

    Attributes:
        steps: by step and type of shard: values, and those whose exponent changed.
        shards: over the settled steps.
        intervals: by steps from one check to the next: compared values, and those whose exponent
            changed.
        sampled: share of all values that ``intervals`` are of.
    """

    steps: dict[int, dict[str, tuple[int, int]]]
    shards: list[ShardRecord]
    intervals: dict[int, tuple[int, int]]
    sampled: float
    block_size: int


class ChangeRecorder:
    """Counts what changes of the shards of parameter groups.

    Args:
        block_size: values per block, besides ``BLOCK_SIZES``.
        sample: most values of a rank that are cached for ``INTERVALS``, evenly spaced.
    """

    def __init__(
        self, groups: Sequence[ParamGroup], block_size: int, sample: int = _SAMPLE
    ) -> None:
        self._groups, self._block_size = groups, block_size
        self._steps: dict[int, dict[str, tuple[int, int]]] = {}
        self._shards: dict[tuple[int, int], ShardRecord] = {}
        for g, p, _ in _shards(groups):
            process_group = groups[g].process_group
            self._shards[g, p] = ShardRecord(
                groups[g].params[p].name,
                tuple(torch.distributed.get_process_group_ranks(process_group)),
                process_group.rank(),
                groups[g].numels[p],
            )
        total = sum(shard.values for shard in self._shards.values())
        # Odd, so that the sample of a matrix is not one of its columns.
        self._stride = 1 if total <= sample else -(-total // sample) | 1
        self._cached: dict[tuple[int, int], Tensor] = {}
        self._samples: deque[Tensor] = deque(maxlen=INTERVALS[-1])  # the latest first
        self._intervals: Counter[int] = Counter()
        self._compared: Counter[int] = Counter()
        self._total = total

    @torch.no_grad()
    def after_step(self, step: int, settled: bool) -> None:
        """Counts the changes of all shards. The first call only caches them.

        Args:
            settled: whether the step counts for all figures, not only for the rate by step.
        """
        counts, sample = [], []
        for g, p, layout in _shards(self._groups):
            exponents_N = _exponents(self._groups[g], p, layout)
            sample.append(exponents_N[:: self._stride].clone())
            if (g, p) in self._cached:
                counts.append(count(exponents_N != self._cached[g, p], self._block_size))
            self._cached[g, p] = exponents_N
        sample_S = torch.cat(sample) if sample else torch.empty(0, dtype=torch.uint8)
        if counts:
            self._add(step, torch.stack(counts).tolist(), settled)
        for interval, earlier_S in enumerate(self._samples, start=1) if settled else ():
            self._compared[interval] += sample_S.numel()
            self._intervals[interval] += int((sample_S != earlier_S).sum())
        self._samples.appendleft(sample_S)

    def recorded(self) -> Recorded:
        """The counts so far."""
        sample_size = self._samples[0].numel() if self._samples else 0
        return Recorded(
            steps=self._steps,
            shards=[shard for shard in self._shards.values() if shard.changed_steps],
            intervals={k: (n, self._intervals[k]) for k, n in self._compared.items()},
            sampled=sample_size / max(self._total, 1),
            block_size=self._block_size,
        )

    def _add(self, step: int, counts: list[list[int]], settled: bool) -> None:
        by_kind = self._steps.setdefault(step, {})
        for shard, of_shard in zip(self._shards.values(), counts, strict=True):
            kind = shard_type(shard.name)
            values, changed = by_kind.get(kind, (0, 0))
            by_kind[kind] = values + shard.values, changed + of_shard[0]
            if settled:
                shard.changed_steps.append(of_shard[0] > 0)
                before = shard.counts or [0] * len(of_shard)
                shard.counts = [a + b for a, b in zip(before, of_shard, strict=True)]


@torch.no_grad()
def check_seconds(groups: Sequence[ParamGroup], block_size: int) -> dict[str, float]:
    """Seconds that this rank takes to find the changed blocks of all its shards while it does
    nothing else: by comparing with cached exponents, and by the paper's 128-bit hashes. Medians of
    repeats."""
    checks = {
        "compare": codec.changed_blocks,
        "hash": lambda exponents_N, cached, size: (
            codec.block_hashes(exponents_N, size) != cached
        ).any(dim=1),
    }
    totals = {name: [0.0] * _REPEATS for name in checks}
    for g, p, layout in _shards(groups):
        group = groups[g]
        bits_N = group.piece(p, 0, group.numels[p]).view(layout.bits)
        exponents_N = floats.exponents(bits_N, layout)
        cached = {"compare": exponents_N, "hash": codec.block_hashes(exponents_N, block_size)}
        for name, check in checks.items():
            check(
                floats.exponents(bits_N, layout), cached[name], block_size
            )  # the first takes longer
            for i in range(_REPEATS):
                start = util.now(bits_N.device)
                check(floats.exponents(bits_N, layout), cached[name], block_size)
                totals[name][i] += util.now(bits_N.device) - start
    return {name: statistics.median(seconds) for name, seconds in totals.items()}


def merged(recorded: Sequence[Recorded]) -> dict[str, Any]:
    """The counts of all ranks as rates, for figures 2 to 5, as strict JSON. Where nothing was
    counted, a rate is ``None``."""
    shards = [shard for one in recorded for shard in one.shards]
    block_size = recorded[0].block_size
    kinds = [kind for kind in SHARD_TYPES if any(shard_type(s.name) == kind for s in shards)]
    by_kind = {kind: [s for s in shards if shard_type(s.name) == kind] for kind in kinds}
    by_kind = {ALL: shards, **by_kind}
    return {
        "exponent_change_by_step": _by_step(recorded),
        "shard_change_by_world_size": _by_world_size(shards, block_size),
        "block_change_by_block_size": {
            "block_sizes": list(BLOCK_SIZES),
            "rates": {
                kind: [_rate(some, 2 + i, block_size) for i in range(len(BLOCK_SIZES))]
                for kind, some in by_kind.items()
            },
        },
        "block_change_by_shard_type": {
            "block_size": block_size,
            "shards": {
                kind: _five_numbers([shard.block_rate(block_size) for shard in some])
                for kind, some in by_kind.items()
                if some
            },
        },
        "exponent_change_by_interval": {
            "sampled_share": sum(one.sampled for one in recorded) / len(recorded),
            "intervals": list(INTERVALS),
            "rates": [
                _share([one.intervals.get(interval, (0, 0)) for one in recorded])
                for interval in INTERVALS
            ],
        },
    }


def _by_step(recorded: Sequence[Recorded]) -> list[dict[str, Any]]:
    entries = []
    for step in recorded[0].steps:
        of_ranks = [one.steps.get(step, {}) for one in recorded]
        kinds = [kind for kind in SHARD_TYPES if any(kind in one for one in of_ranks)]
        rates = {kind: _share([one[kind] for one in of_ranks if kind in one]) for kind in kinds}
        everything = [counts for one in of_ranks for counts in one.values()]
        entries.append({"step": step, "rates": {ALL: _share(everything), **rates}})
    return entries


def _by_world_size(shards: Sequence[ShardRecord], block_size: int) -> list[dict[str, Any]]:
    """Rates of changed shards by the number of ranks that a parameter is sharded over."""
    if not shards:
        return []
    world_size = max(len(shard.ranks) for shard in shards)
    points = [
        {"world_size": world_size, "how": "measured", "rate": _shard_rate(shards)},
    ]
    fewer = 2
    while all(len(shard.ranks) % fewer == 0 for shard in shards):
        joined = _joined(shards, fewer)
        points.insert(0, {"world_size": world_size // fewer, "how": "joined", "rate": joined})
        fewer *= 2
    first = 2 + len(BLOCK_SIZES)
    for i, factor in enumerate(FACTORS):
        rate = _rate(shards, first + i, block_size)
        points.append({"world_size": factor * world_size, "how": "projected", "rate": rate})
    return points


def _shard_rate(shards: Sequence[ShardRecord]) -> float:
    changed = [flag for shard in shards for flag in shard.changed_steps]
    return sum(changed) / len(changed)


def _joined(shards: Sequence[ShardRecord], fewer: int) -> float:
    """The share of shards that changed, if each were that of ``fewer`` neighbouring ranks."""
    together: dict[tuple, list[bool]] = {}
    for shard in shards:
        place = shard.name, shard.ranks, shard.place // fewer
        flags = together.get(place, [False] * len(shard.changed_steps))
        together[place] = [a or b for a, b in zip(flags, shard.changed_steps, strict=True)]
    flags = [flag for of_shard in together.values() for flag in of_shard]
    return sum(flags) / len(flags)


def _rate(shards: Sequence[ShardRecord], index: int, block_size: int) -> float | None:
    return _share(
        [
            (sizes(s.values, block_size)[index] * len(s.changed_steps), s.counts[index])
            for s in shards
        ]
    )


def _share(counts: Sequence[tuple[int, int]]) -> float | None:
    """Changed over total, each summed; ``None`` if the total is 0."""
    total, changed = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    return changed / total if total else None


def _five_numbers(rates: list[float]) -> dict[str, float]:
    quartiles = [rates[0]] * 3
    if len(rates) > 1:
        quartiles = statistics.quantiles(rates, n=4, method="inclusive")
    names = ("least", "lower_quartile", "median", "upper_quartile", "most")
    numbers = (min(rates), *quartiles, max(rates))
    return {"shards": len(rates), **dict(zip(names, numbers, strict=True))}


def _shards(groups: Sequence[ParamGroup]) -> Iterator[tuple[int, int, FloatLayout]]:
    """Indices of group and parameter, and the layout, of every nonempty shard of floats."""
    for g, group in enumerate(groups):
        for p, (info, numel) in enumerate(zip(group.params, group.numels, strict=True)):
            if numel and info.dtype in floats.LAYOUTS:
                yield g, p, floats.LAYOUTS[info.dtype]


def _exponents(group: ParamGroup, index: int, layout: FloatLayout) -> Tensor:
    bits_N = group.piece(index, 0, group.numels[index]).view(layout.bits)
    return floats.exponents(bits_N, layout)
