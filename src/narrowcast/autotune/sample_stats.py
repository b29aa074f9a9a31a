"""What is known of shards from samples: changes, and what each compression of them costs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
import torch.distributed as dist

from narrowcast.telemetry.changes import Changes
from narrowcast.util import Summable

COMPRESSIONS = ("delta", "exponent", "entropy", "none")
ALL = ""  # in the place of a parameter's name: the long chunks of all parameters


@dataclass(frozen=True)
class Cost(Summable):
    """What one compression takes for the sampled chunks of a shard, summed: in the first gather
    after a step of the optimizer, and in a later one. Bytes, and seconds of one rank for one rank's
    shard."""

    first_bytes: float = 0.0
    later_bytes: float = 0.0
    first_hashing: float = 0.0
    later_hashing: float = 0.0
    first_encoding: float = 0.0
    later_encoding: float = 0.0
    first_decoding: float = 0.0
    later_decoding: float = 0.0

    def scaled(self, factor: float) -> "Cost":
        return Cost(*(getattr(self, f.name) * factor for f in fields(self)))


@dataclass(frozen=True)
class SampleStats:
    """Sums over sampled chunks of a shard; ``changes.values`` is how many values they have.

    Attributes:
        costs: in the order of ``COMPRESSIONS``.
    """

    changes: Changes = field(default_factory=Changes)
    costs: tuple[Cost, ...] = (Cost(),) * len(COMPRESSIONS)

    def __add__(self, other: "SampleStats") -> "SampleStats":
        costs = tuple(a + b for a, b in zip(self.costs, other.costs, strict=True))
        return SampleStats(self.changes + other.changes, costs)

    def per_value(self, compression: str) -> Cost:
        """The mean cost of a value."""
        return self.costs[COMPRESSIONS.index(compression)].scaled(1 / max(self.changes.values, 1))

    def with_times_of(self, other: "SampleStats") -> "SampleStats":
        """The same changes and bytes, with another's seconds for each value."""
        share = self.changes.values / max(other.changes.values, 1)
        costs = tuple(
            replace(timed.scaled(share), first_bytes=own.first_bytes, later_bytes=own.later_bytes)
            for own, timed in zip(self.costs, other.costs, strict=True)
        )
        return SampleStats(self.changes, costs)

    def to_numbers(self) -> list[float]:
        """All numbers, for a collective; ``NUM_NUMBERS`` of them."""
        parts = (self.changes, *self.costs)
        return [float(getattr(part, f.name)) for part in parts for f in fields(part)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> "SampleStats":
        """Inverse of ``to_numbers``."""
        counts, width = len(fields(Changes)), len(fields(Cost))
        rest = numbers[counts:]
        costs = [Cost(*rest[i : i + width]) for i in range(0, len(rest), width)]
        return cls(Changes(*map(round, numbers[:counts])), tuple(costs))


NUM_NUMBERS = len(SampleStats().to_numbers())


def sum_over_ranks(
    samples: dict[str, SampleStats],
    names: Sequence[str],
    device: torch.device,
    job: dist.ProcessGroup | None = None,
) -> dict[str, SampleStats]:
    """The samples of all ranks together, by parameter. Every rank must call this.

    Args:
        names: of the parameters, in one order on every rank.
        device: of the tensor that is reduced.
        job: the ranks; ``None``: all.
    """
    rows = [samples.get(name, SampleStats()).to_numbers() for name in names]
    sums = torch.tensor(rows, dtype=torch.float64, device=device).view(-1, NUM_NUMBERS)
    dist.all_reduce(sums, group=job)
    return {
        name: SampleStats.from_numbers(row) for name, row in zip(names, sums.tolist(), strict=True)
    }


class SampleHistory:
    """The samples of all ranks over the sampling windows of a run.

    Attributes:
        samples: by parameter, of the last window in which it was sampled; of ``ALL``, of the last
            two windows, since the times of few chunks are noisy.
    """

    def __init__(self) -> None:
        self.samples: dict[str, SampleStats] = {}
        self._last_of_all = SampleStats()

    def add(self, window: dict[str, SampleStats]) -> None:
        """Takes the samples of one window, by parameter and of ``ALL``."""
        before, self._last_of_all = self._last_of_all, window[ALL]
        self.samples |= {name: stats for name, stats in window.items() if stats.changes.values}
        self.samples[ALL] = before + self._last_of_all

    @property
    def has_any(self) -> bool:
        """Whether anything was sampled so far."""
        return any(stats.changes.values for stats in self.samples.values())
