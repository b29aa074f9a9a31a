"""What there is to choose from, and a choice.

A parameter group is gathered by baseline FSDP2 as a whole, or it is narrowed, and then each of its
shards has a compression. What each would cost is given in seconds on the critical path of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Compressions = dict[str, dict[str, str]]  # by name of the group, by name of the shard

ROUNDING = 1e-7  # gains below this share of the baseline time count as rounding errors


@dataclass(frozen=True)
class Option:
    """Cost of one compression of a shard, in seconds a step on the critical path, and in memory.

    Attributes:
        link: for the bytes of all gathers of a step (marginal; latency is the group's).
        hashing: to find the changed blocks.
        encoding: at the sender, as far as it is on the critical path.
        decoding: at the receiver, of the shards of all ranks.
        fetching: of caches from host memory, and back to it.
        switching: of the cold cache that it would start with, spread over the steps until the next
            choice; 0 for the current compression.
        bits: of a value in the first gather of a step; explains the choice and has no part in it.
        cache_bytes: on a rank.
    """

    link: float
    hashing: float = 0.0
    encoding: float = 0.0
    decoding: float = 0.0
    fetching: float = 0.0
    switching: float = 0.0
    bits: float = 16.0
    cache_bytes: int = 0

    @property
    def steady(self) -> float:
        """Seconds a step with a warm cache."""
        return self.link + self.hashing + self.encoding + self.decoding + self.fetching

    @property
    def seconds(self) -> float:
        """Seconds a step with the cost of switching."""
        return self.steady + self.switching


@dataclass(frozen=True)
class Shard:
    """One parameter's shard on a rank.

    Attributes:
        name: of the parameter; unique within its group.
        kind: type of shard, as of ``changes.shard_type``.
        values: of one rank's shard.
        plain: seconds a step that the baseline's gathers take for its bytes.
        options: by compression. There is always ``none``, which needs no cache: the shard is sent
            uncompressed within a narrowed group.
    """

    name: str
    kind: str
    values: int
    plain: float
    options: dict[str, Option]

    def gain(self, compression: str) -> float:
        """Seconds a step that a compression saves, with the cost of switching, but for the share of
        the shard in the latency and overhead of its group."""
        return self.plain - self.options[compression].seconds


@dataclass(frozen=True)
class Group:
    """A parameter group: gathered by baseline FSDP2 as a whole, or narrowed.

    Attributes:
        plain_latency: seconds a step that the baseline's gathers of it cost beyond the bytes.
        overhead: seconds a step that narrowed gathers of it cost beyond its shards' options:
            latency, headers, handling.
        is_current: whether it is narrowed now: then it stays so as long as it gains anything.
    """

    name: str
    shards: tuple[Shard, ...]
    plain_latency: float
    overhead: float
    is_current: bool = False

    @property
    def plain(self) -> float:
        """Seconds a step of the baseline's gathers."""
        return self.plain_latency + sum(shard.plain for shard in self.shards)

    def steady(self, compressions: dict[str, str]) -> float:
        """Seconds a step of narrowed gathers with warm caches, by compressions of its shards."""
        return self.overhead + sum(s.options[compressions[s.name]].steady for s in self.shards)

    def gain(self, compressions: dict[str, str]) -> float:
        """Seconds a step that these compressions save, with the cost of switching."""
        cold = sum(s.options[compressions[s.name]].switching for s in self.shards)
        return self.plain - self.steady(compressions) - cold

    def least_gain(self, margin: float) -> float:
        """Seconds a step that narrowing must save more than: the share ``margin`` of the baseline's
        time, or next to nothing where the group is narrowed now."""
        return ((0 if self.is_current else margin) + ROUNDING) * self.plain


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        compressions: of narrowed groups only.
        plain_seconds: predicted a step with every group gathered by baseline FSDP2.
        seconds: predicted a step as chosen, with warm caches.
        cache_bytes: that the choice takes on a rank.
        budget_bytes: limit of ``cache_bytes``; ``None``: no limit.
        reasons: of each shard, by the names of its group and itself.
        unlimited_seconds, unlimited_cache_bytes: what the same strategy would choose without a
            budget.
    """

    compressions: Compressions
    plain_seconds: float
    seconds: float
    cache_bytes: int
    budget_bytes: int | None
    reasons: dict[tuple[str, str], str]
    unlimited_seconds: float
    unlimited_cache_bytes: int


def worthwhile(groups: Sequence[Group], candidates: Compressions, margin: float) -> Compressions:
    """The candidates whose groups gain more than they must."""
    return {
        group.name: candidates[group.name]
        for group in groups
        if group.name in candidates
        and group.gain(candidates[group.name]) > group.least_gain(margin)
    }


def totals(groups: Sequence[Group], compressions: Compressions) -> tuple[float, int]:
    """Predicted seconds a step of all groups, with warm caches, and the bytes of the caches."""
    seconds, cache_bytes = 0.0, 0
    for group in groups:
        chosen = compressions.get(group.name)
        seconds += group.plain if chosen is None else group.steady(chosen)
        for shard in group.shards if chosen else ():
            cache_bytes += shard.options[chosen[shard.name]].cache_bytes
    return seconds, cache_bytes
