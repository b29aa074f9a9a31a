"""Which shard gets which compression, under a budget for caches.

A parameter group is gathered by plain FSDP2 as a whole, or it is narrowed, and each of its shards
has a compression. What each would cost is given, in seconds on the critical path of a step. There
are two ways to choose:

    exact   the least total of seconds within the budget: a knapsack with one choice a shard, and a
            cost for each group that is narrowed. SciPy's ``milp`` (HiGHS) solves it, to a millionth
            of what is saved, or as far as a thousand nodes of its search go. All ranks wait for it:
            after ten seconds it ends, and the paper's rule is taken.
    ratio   the rule of the CIERA paper (section 3.2): shards by gain over cache bytes, greatest
            first, as long as the budget lasts.

Where nothing is gained nothing is narrowed and no cache is taken. The same input gives the same
choice, but for that limit: one rank chooses for all.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from narrowcast.util import aligned

logger = logging.getLogger(__name__)

MARGIN = 0.05  # share of a plain time that must be saved: predictions are not exact

Strategy = Literal["exact", "ratio"]
Compressions = dict[str, dict[str, str]]  # by name of the group, by name of the shard

_ROUNDING = 1e-7  # the share of plain's time by which narrowing must gain, to gain at all
_SCALE = 1e6  # of costs and of the budget in the solver, whose tolerances are absolute: 1e-6
_SOLVER = {"mip_rel_gap": 1e-6, "node_limit": 1000, "time_limit": 10.0}


@dataclass(frozen=True)
class Option:
    """What one compression of a shard costs a step, in seconds on the critical path, and in memory.

    Attributes:
        link: for the bytes it sends in all gathers of a step (marginal; latency is the group's).
        fetching: of caches from host memory, and back to it.
        switching: of the cold cache it would start with, spread over the steps until the choice is
            looked at again; 0 for the compression in force.
        bits: a value, in the first gather of a step; explains the choice and has no part in it.
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
        """Seconds a step once its cache is warm."""
        return self.link + self.hashing + self.encoding + self.decoding + self.fetching

    @property
    def seconds(self) -> float:
        return self.steady + self.switching


@dataclass(frozen=True)
class Shard:
    """One parameter's shard on a rank.

    Attributes:
        name: of the parameter; unique within its group.
        kind: type of shard, as of ``changes.shard_type``.
        values: of one rank's shard.
        plain: seconds a step of plain FSDP2's gathers for its bytes.
        options: by compression. There is always ``none``, which keeps no cache: as the shard is
            sent raw within a narrowed group.
    """

    name: str
    kind: str
    values: int
    plain: float
    options: dict[str, Option]


@dataclass(frozen=True)
class Group:
    """A parameter group: gathered by plain FSDP2 as a whole, or narrowed.

    Attributes:
        plain_latency: seconds a step that plain's gathers of it cost beyond the bytes.
        overhead: seconds a step that narrowed gathers of it cost beyond its shards' options:
            latency, heads, handling.
        is_current: whether it is narrowed now: then it stays so as long as it gains anything.
    """

    name: str
    shards: tuple[Shard, ...]
    plain_latency: float
    overhead: float
    is_current: bool = False

    @property
    def plain(self) -> float:
        """Seconds a step of plain's gathers of it."""
        return self.plain_latency + sum(shard.plain for shard in self.shards)

    def steady(self, compressions: dict[str, str]) -> float:
        """Seconds a step of its narrowed gathers, by its shards' compressions, with warm caches."""
        return self.overhead + sum(s.options[compressions[s.name]].steady for s in self.shards)

    def gain(self, compressions: dict[str, str]) -> float:
        """Seconds a step that these compressions save, cold caches counted."""
        cold = sum(s.options[compressions[s.name]].switching for s in self.shards)
        return self.plain - self.steady(compressions) - cold


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        compressions: of narrowed groups alone.
        plain_seconds: predicted a step with all groups plain.
        seconds: predicted a step as chosen, with warm caches.
        cache_bytes: that the choice takes on a rank.
        budget_bytes: that it was given; ``None``: no limit.
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


def all_plain(choice: Choice, reason: str) -> Choice:
    """Plain FSDP2 for every group, in the place of a choice, for this reason."""
    return replace(
        choice,
        compressions={},
        seconds=choice.plain_seconds,
        cache_bytes=0,
        reasons=dict.fromkeys(choice.reasons, reason),
    )


def choose(
    groups: Sequence[Group],
    budget_bytes: int | None,
    strategy: Strategy = "exact",
    margin: float = 0.0,
) -> Choice:
    """A compression for every shard, or plain FSDP2 for its group.

    Args:
        budget_bytes: of caches on a rank, never exceeded; ``None``: no limit.
        margin: a group is narrowed only if that saves more than this share of its plain time, for
            predictions are not exact. One that is narrowed stays so if it saves anything.

    Raises:
        ValueError: the cache budget, the strategy or a group is not allowed.
    """
    _check(groups, budget_bytes, strategy)
    find = _by_ratio if strategy == "ratio" else _exactly
    wanted = find(groups, math.inf, margin)
    unlimited = compressions = _worthwhile(groups, wanted, margin)
    if budget_bytes is not None:
        paying = [group for group in groups if group.name in unlimited]
        compressions = _worthwhile(paying, find(paying, budget_bytes, margin), margin)
    reasons = {}
    for group in groups:
        taken, best = compressions.get(group.name), unlimited.get(group.name)
        for shard in group.shards:
            if taken:
                reason = _why_taken(shard, taken[shard.name], (best or taken)[shard.name])
            elif best:
                reason = _why_too_large(shard, best[shard.name])
            else:
                reason = _why_plain(group, shard, wanted[group.name], margin)
            reasons[group.name, shard.name] = reason
    plain_seconds = sum(group.plain for group in groups)
    totals = _totals(groups, compressions)
    most = _totals(groups, unlimited)
    return Choice(compressions, plain_seconds, *totals, budget_bytes, reasons, *most)


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
                raise ValueError(f"{shard.name} needs an option 'none' that keeps no cache")
            for name, option in shard.options.items():
                if not math.isfinite(option.seconds + option.bits):
                    raise ValueError(f"{shard.name}: {name} costs {option}: leave such options out")


def _worthwhile(groups: Sequence[Group], candidates: Compressions, margin: float) -> Compressions:
    gains = {g.name: g.gain(candidates[g.name]) for g in groups if g.name in candidates}
    least = {group.name: _least_gain(group, margin) for group in groups}
    return {name: candidates[name] for name, gain in gains.items() if gain > least[name]}


def _least_gain(group: Group, margin: float) -> float:
    return ((0 if group.is_current else margin) + _ROUNDING) * group.plain


def _totals(groups: Sequence[Group], compressions: Compressions) -> tuple[float, int]:
    """Predicted seconds a step of all groups, with warm caches, and the bytes of these."""
    seconds, cache_bytes = 0.0, 0
    for group in groups:
        of_group = compressions.get(group.name)
        seconds += group.plain if of_group is None else group.steady(of_group)
        for shard in group.shards if of_group else ():
            cache_bytes += shard.options[of_group[shard.name]].cache_bytes
    return seconds, cache_bytes


def _by_ratio(groups: Sequence[Group], limit: float, _margin: float) -> Compressions:
    """The paper's rule, with compressions for groups that do not pay too; see ``_worthwhile``."""
    compressions: Compressions = {group.name: {} for group in groups}
    ranked = []
    for group in groups:
        for shard in group.shards:
            of_shard = sorted(shard.options.items(), key=lambda item: _order(*item))
            free = next(name for name, option in of_shard if not option.cache_bytes)
            compressions[group.name][shard.name] = free
            for name, option in of_shard:
                gain = shard.plain - option.seconds
                if option.cache_bytes and gain > 0:
                    place = (-gain / option.cache_bytes, shard.name, group.name)
                    ranked.append((place, name, option.cache_bytes))
                    break
    left = limit
    for (_, shard_name, group_name), name, cache_bytes in sorted(ranked):
        if cache_bytes <= left:
            compressions[group_name][shard_name] = name
            left -= cache_bytes
    return compressions


def _order(name: str, option: Option) -> tuple[float, int, bool, str]:
    """The fastest first; of equals the smaller cache, then raw."""
    return option.seconds, option.cache_bytes, name != "none", name


def _exactly(groups: Sequence[Group], limit: float, margin: float) -> Compressions:
    """The least total of seconds within the limit; may hold groups that do not pay."""
    shards = [shard for group in groups for shard in group.shards]
    largest = sum(max(option.cache_bytes for option in s.options.values()) for s in shards)
    # A price for memory that counts as rounding, but favours the smaller of two equal caches.
    price = _ROUNDING * sum(group.plain for group in groups) / max(largest, 1)
    frontiers = {
        group.name: {shard.name: _frontier(shard, limit, price) for shard in group.shards}
        for group in groups
    }
    fastest = {
        group: {shard: frontier[-1] for shard, frontier in of_group.items()}
        for group, of_group in frontiers.items()
    }
    if _totals(groups, _worthwhile(groups, fastest, margin))[1] <= limit:
        return fastest
    return _solve(groups, frontiers, limit, margin, price)


def _frontier(shard: Shard, limit: float, price: float) -> list[str]:
    """Compressions from no cache to the largest that pays, each faster than those before."""
    by_cache = sorted(shard.options.items(), key=lambda x: (x[1].cache_bytes, *_order(*x)))
    costs: dict[str, float] = {}
    for name, option in by_cache:
        cost = option.seconds + price * option.cache_bytes
        if option.cache_bytes <= limit and cost < min(costs.values(), default=math.inf):
            costs[name] = cost
    return list(costs)


def _solve(
    groups: Sequence[Group],
    frontiers: dict[str, dict[str, list[str]]],
    limit: float,
    margin: float,
    price: float,
) -> Compressions:
    """The mixed-integer program. Its variables, 0 or 1, are whether a group is narrowed, at first
    without caches, and whether a shard has a certain cache; it has one at most, and only then."""
    variables = []  # cost, cache bytes, group, shard, compression
    entries = []  # value, row, column of: caches of a shard - its group <= 0
    rows = 0
    for group in groups:
        frees = {shard: frontier[0] for shard, frontier in frontiers[group.name].items()}
        narrowed = len(variables)
        loss = _least_gain(group, margin) - group.gain(frees)
        variables.append((loss, 0, group.name, "", ""))
        for shard in group.shards:
            free, *caching = frontiers[group.name][shard.name]
            for name in caching:
                option = shard.options[name]
                cost = option.seconds + price * option.cache_bytes - shard.options[free].seconds
                entries.append((1, rows, len(variables)))
                variables.append((cost, option.cache_bytes, group.name, shard.name, name))
            if caching:
                entries.append((-1, rows, narrowed))
                rows += 1
    costs, caches, *_ = zip(*variables, strict=True)
    values, *indices = zip(*entries, strict=True)
    one_each = csr_array((values, indices), shape=(rows, len(costs)))
    budget = csr_array(np.array([caches]) * (_SCALE / limit))  # caches that fit: it is not 0
    result = milp(
        np.array(costs) * (_SCALE / np.abs(costs).sum()),
        integrality=np.ones(len(costs)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, -np.inf, 0),
            LinearConstraint(budget, -np.inf, _SCALE),
        ],
        options=_SOLVER,
    )
    if result.x is None or "Time limit" in result.message:
        logger.warning(
            "narrowcast: the exact choice of compressions took too long (%s): the paper's "
            "rule, selection = 'ratio', is taken",
            result.message,
        )
        return _by_ratio(groups, limit, margin)
    chosen = [variable for variable, x in zip(variables, result.x, strict=True) if x > 0.5]
    compressions: Compressions = {
        group: {name: frontier[0] for name, frontier in frontiers[group].items()}
        for _, _, group, shard, _ in chosen
        if not shard
    }
    # Within its tolerance the solver may exceed the limit. Then what gains least gives way.
    left = limit
    for _, cache_bytes, group, shard, name in sorted(chosen):
        if shard and group in compressions and cache_bytes <= left:
            compressions[group][shard] = name
            left -= cache_bytes
    return compressions


def _why_taken(shard: Shard, taken: str, unlimited: str) -> str:
    option = shard.options[taken]
    warm_name, warm = min(shard.options.items(), key=lambda item: (item[1].steady, item[0]))
    what = f"{option.bits:.1f} bits a value in place of {shard.options['none'].bits:g}"
    if shard.options[unlimited].cache_bytes > option.cache_bytes:
        why = f"{unlimited}'s cache does not fit the budget"
    elif warm.steady < option.steady and warm.seconds >= option.seconds:
        why = f"a change to {warm_name} would not pay for itself"
    elif taken != "none":
        return what
    elif len(shard.options) == 1:
        return "it can only go raw"
    else:
        return "coding costs more than it saves"
    return why if taken == "none" else f"{what}; {why}"


def _why_too_large(shard: Shard, unlimited: str) -> str:
    if shard.options[unlimited].cache_bytes:
        return f"{unlimited}'s cache does not fit the budget"
    return "its group pays only with caches, which do not fit the budget"


def _why_plain(group: Group, shard: Shard, wanted: dict[str, str], margin: float) -> str:
    warm = {s.name: min(s.options, key=lambda t: s.options[t].steady) for s in group.shards}
    warm_gain = group.plain - group.steady(warm)
    if shard.options[warm[shard.name]].steady >= (1 - _ROUNDING) * shard.plain:
        return "no compression pays on this link"
    if warm_gain > max(group.gain(warm), _least_gain(group, margin)):
        return "a change of its group would not pay for itself"
    if group.gain(wanted) > _least_gain(group, 0):
        return f"its group would save no more than the margin of {margin:.1%}"
    return "its group as a whole gains nothing"


def _as_chosen(choice: Choice, group: Group, shard: Shard) -> tuple[str, float, int]:
    """A shard's compression or ``plain``, its seconds a step with a warm cache, and cache bytes."""
    if group.name not in choice.compressions:
        return "plain", shard.plain, 0
    name = choice.compressions[group.name][shard.name]
    return name, shard.options[name].steady, shard.options[name].cache_bytes


def table(groups: Sequence[Group], choice: Choice, limit: int = 20) -> str:
    """The shards that take longest, at most ``limit``, with choice and reason, and the totals."""
    shards = [(group, shard) for group in groups for shard in group.shards]
    shards.sort(key=lambda pair: (-pair[1].plain, pair[0].name, pair[1].name))
    head = [
        "shard",
        "kind",
        "compression",
        "values",
        "plain ms",
        "chosen ms",
        "gain ms",
        "cache MiB",
    ]
    rows, reasons = [head], ["reason"]
    for group, shard in shards[:limit]:
        compression, seconds, cache_bytes = _as_chosen(choice, group, shard)
        times = [_ms(shard.plain), _ms(seconds), _ms(shard.plain - seconds)]
        numbers = [f"{shard.values:,}", *times, _mib(cache_bytes)]
        rows.append([shard.name, shard.kind, compression, *numbers])
        reasons.append(choice.reasons[group.name, shard.name])
    lines = aligned(rows, words=3).splitlines()
    text = [f"{line}  {reason}" for line, reason in zip(lines, reasons, strict=True)]
    if len(shards) > limit:
        text.append(f"and {len(shards) - limit:,} more, which take less; the saved file has all")
    return "\n".join([*text, "", _summary(shards, choice)])


def _summary(shards: list[tuple[Group, Shard]], choice: Choice) -> str:
    before = _ms(choice.plain_seconds)
    if choice.compressions:
        budget = choice.budget_bytes
        granted = "without a limit" if budget is None else f"of a budget of {_mib(budget)} MiB"
        text = (
            f"Predicted gathers of a step: {before} ms plain, {_ms(choice.seconds)} ms as chosen. "
            f"Caches take {_mib(choice.cache_bytes)} MiB, {granted}."
        )
    else:
        text = f"Everything stays plain: {before} ms of gathers a step are predicted."
        weights: Counter[str] = Counter()
        for group, shard in shards:
            weights[choice.reasons[group.name, shard.name]] += shard.plain
        if weights:
            text += f" Why, for most of it: {weights.most_common(1)[0][0]}."
    limited = (choice.seconds, choice.cache_bytes)
    unlimited = (choice.unlimited_seconds, choice.unlimited_cache_bytes)
    if limited != unlimited:
        text += f" Without a budget: {_ms(unlimited[0])} ms, with {_mib(unlimited[1])} MiB."
    return text


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def as_json(groups: Sequence[Group], choice: Choice) -> dict[str, Any]:
    """All shards with every option's terms, the choice, its reason, and the totals, for JSON."""
    described = []
    for group in groups:
        entry = asdict(group) | {"narrowed": group.name in choice.compressions}
        for shard, of_shard in zip(group.shards, entry["shards"], strict=True):
            for name, option in shard.options.items():
                gain = shard.plain - option.seconds
                of_shard["options"][name] |= {"seconds": option.seconds, "gain": gain}
            compression, seconds, cache_bytes = _as_chosen(choice, group, shard)
            of_shard |= {
                "compression": compression,
                "seconds": seconds,
                "gain": shard.plain - seconds,
                "cache_bytes": cache_bytes,
                "reason": choice.reasons[group.name, shard.name],
            }
        described.append(entry)
    totals = {k: v for k, v in asdict(choice).items() if k not in ("compressions", "reasons")}
    return {**totals, "groups": described}
