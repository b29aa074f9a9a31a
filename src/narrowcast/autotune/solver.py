"""Which shard gets which compression, under a budget for caches.

There are two strategies:

    exact   the least total of seconds within the budget: a knapsack with one choice a shard, and a
            cost for each group that is narrowed, as an integer program (``program``). Its search is
            limited, since all ranks wait for it; where it takes too long, ``ratio`` is taken.
    ratio   the rule of the CIERA paper (section 3.2): shards by gain over cache bytes, greatest
            first, as long as the budget lasts.

Where nothing is gained nothing is narrowed and no cache is used. The same input gives the same
choice, except for that limit of time: one rank chooses for all.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from narrowcast.autotune import program
from narrowcast.autotune.problem import (
    ROUNDING,
    Choice,
    Compressions,
    Group,
    Option,
    Shard,
    totals,
    worthwhile,
)
from narrowcast.autotune.reasons import explain

logger = logging.getLogger(__name__)

MARGIN = 0.05  # share of a baseline time that must be saved, since predictions are not exact

Strategy = Literal["exact", "ratio"]


def choose(
    groups: Sequence[Group],
    budget_bytes: int | None,
    strategy: Strategy = "exact",
    margin: float = 0.0,
) -> Choice:
    """A compression for every shard, or baseline FSDP2 for its group.

    Args:
        budget_bytes: of caches on a rank, never exceeded; ``None``: no limit.
        margin: a group is narrowed only if that saves more than this share of its baseline time.
            One that is narrowed now stays so if it saves anything.

    Raises:
        ValueError: the cache budget, the strategy or a group is not allowed.
    """
    _check(groups, budget_bytes, strategy)
    find = _by_ratio if strategy == "ratio" else _exactly
    fastest = find(groups, math.inf, margin)
    unlimited = compressions = worthwhile(groups, fastest, margin)
    if budget_bytes is not None:
        narrowed = [group for group in groups if group.name in unlimited]
        compressions = worthwhile(narrowed, find(narrowed, budget_bytes, margin), margin)
    plain_seconds = sum(group.plain for group in groups)
    seconds, cache_bytes = totals(groups, compressions)
    unlimited_seconds, unlimited_cache_bytes = totals(groups, unlimited)
    return Choice(
        compressions=compressions,
        plain_seconds=plain_seconds,
        seconds=seconds,
        cache_bytes=cache_bytes,
        budget_bytes=budget_bytes,
        reasons=explain(groups, compressions, unlimited, fastest, margin),
        unlimited_seconds=unlimited_seconds,
        unlimited_cache_bytes=unlimited_cache_bytes,
    )


def _check(groups: Sequence[Group], budget_bytes: Any, strategy: Any) -> None:
    is_number = type(budget_bytes) in (int, float)
    if budget_bytes is not None and not (is_number and 0 <= budget_bytes < math.inf):
        raise ValueError(f"cache budget of {budget_bytes!r} bytes; allowed: 0 and more, or None")
    if strategy not in get_args(Strategy):
        allowed = ", ".join(map(repr, get_args(Strategy)))
        raise ValueError(f"selection strategy = {strategy!r}; allowed: {allowed}")
    for group in groups:
        if not math.isfinite(group.plain + group.overhead):
            raise ValueError(f"{group.name}: a time that is not finite: measure it again")
        for shard in group.shards:
            if "none" not in shard.options or shard.options["none"].cache_bytes:
                raise ValueError(f"{shard.name} needs an option 'none' without a cache")
            for name, option in shard.options.items():
                if not math.isfinite(option.seconds + option.bits):
                    raise ValueError(f"{shard.name}: {name} costs {option}: leave such options out")


def _by_ratio(groups: Sequence[Group], limit: float, _margin: float) -> Compressions:
    """The paper's rule; includes groups that are not worthwhile."""
    compressions: Compressions = {group.name: {} for group in groups}
    ranked = []
    for group in groups:
        for shard in group.shards:
            by_time = sorted(shard.options.items(), key=lambda item: _order(*item))
            uncached = next(name for name, option in by_time if not option.cache_bytes)
            compressions[group.name][shard.name] = uncached
            for name, option in by_time:
                gain = shard.gain(name)
                if option.cache_bytes and gain > 0:
                    rank = (-gain / option.cache_bytes, shard.name, group.name)
                    ranked.append((rank, name, option.cache_bytes))
                    break
    left = limit
    for (_, shard_name, group_name), name, cache_bytes in sorted(ranked):
        if cache_bytes <= left:
            compressions[group_name][shard_name] = name
            left -= cache_bytes
    return compressions


def _order(name: str, option: Option) -> tuple[float, int, bool, str]:
    """Sorts the fastest option first; of equals the smaller cache, then ``none``."""
    return option.seconds, option.cache_bytes, name != "none", name


def _exactly(groups: Sequence[Group], limit: float, margin: float) -> Compressions:
    """The least total of seconds within the limit; may include groups that are not worthwhile."""
    shards = [shard for group in groups for shard in group.shards]
    largest = sum(max(option.cache_bytes for option in s.options.values()) for s in shards)
    # A price for memory that counts as rounding, but favours the smaller of two equal caches.
    price = ROUNDING * sum(group.plain for group in groups) / max(largest, 1)
    frontiers = {
        group.name: {shard.name: _frontier(shard, limit, price) for shard in group.shards}
        for group in groups
    }
    fastest = {
        group: {shard: frontier[-1] for shard, frontier in of_group.items()}
        for group, of_group in frontiers.items()
    }
    if totals(groups, worthwhile(groups, fastest, margin))[1] <= limit:
        return fastest
    found = program.solve(program.formulate(groups, frontiers, margin, price), limit)
    if isinstance(found, str):
        logger.warning(
            "narrowcast: the exact choice of compressions took too long (%s): the paper's "
            "rule, selection = 'ratio', is taken instead",
            found,
        )
        return _by_ratio(groups, limit, margin)
    return found


def _frontier(shard: Shard, limit: float, price: float) -> list[str]:
    """Compressions from no cache to the largest that is worth its memory, each faster than those
    before."""
    by_cache = sorted(shard.options.items(), key=lambda x: (x[1].cache_bytes, *_order(*x)))
    costs: dict[str, float] = {}
    for name, option in by_cache:
        cost = option.seconds + price * option.cache_bytes
        if option.cache_bytes <= limit and cost < min(costs.values(), default=math.inf):
            costs[name] = cost
    return list(costs)
