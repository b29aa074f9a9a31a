"""Why a shard has the compression that was chosen for it, in a few words."""

from collections.abc import Sequence

from narrowcast.autotune.problem import ROUNDING, Compressions, Group, Shard


def explain(
    groups: Sequence[Group],
    chosen: Compressions,
    unlimited: Compressions,
    fastest: Compressions,
    margin: float,
) -> dict[tuple[str, str], str]:
    """The reason of each shard, by the names of its group and itself.

    Args:
        chosen: compressions of narrowed groups.
        unlimited: the same without a budget.
        fastest: of all groups, without a budget, before groups that are not worthwhile are left
            out.
        margin: share of a group's baseline time that narrowing it must save.
    """
    reasons = {}
    for group in groups:
        taken, wanted = chosen.get(group.name), unlimited.get(group.name)
        for shard in group.shards:
            if taken:
                reason = _why_taken(shard, taken[shard.name], (wanted or taken)[shard.name])
            elif wanted:
                reason = _why_over_budget(shard, wanted[shard.name])
            else:
                reason = _why_plain(group, shard, fastest[group.name], margin)
            reasons[group.name, shard.name] = reason
    return reasons


def _why_taken(shard: Shard, taken: str, unlimited: str) -> str:
    """Of a shard in a narrowed group."""
    option = shard.options[taken]
    warm_name, warm = min(shard.options.items(), key=lambda item: (item[1].steady, item[0]))
    size = f"{option.bits:.1f} bits per value instead of {shard.options['none'].bits:g}"
    if shard.options[unlimited].cache_bytes > option.cache_bytes:
        why = f"the cache of {unlimited} does not fit the budget"
    elif warm.steady < option.steady and warm.seconds >= option.seconds:
        why = f"switching to {warm_name} would cost more than it saves"
    elif taken != "none":
        return size
    elif len(shard.options) == 1:
        return "it cannot be compressed"
    else:
        return "coding costs more than it saves"
    return why if taken == "none" else f"{size}; {why}"


def _why_over_budget(shard: Shard, unlimited: str) -> str:
    """Of a shard in a group that would be narrowed without a budget."""
    if shard.options[unlimited].cache_bytes:
        return f"the cache of {unlimited} does not fit the budget"
    return "its group is worthwhile only with caches, which do not fit the budget"


def _why_plain(group: Group, shard: Shard, fastest: dict[str, str], margin: float) -> str:
    """Of a shard in a group that would not be narrowed without a budget either."""
    warm = {s.name: min(s.options, key=lambda t: s.options[t].steady) for s in group.shards}
    warm_gain = group.plain - group.steady(warm)
    if shard.options[warm[shard.name]].steady >= (1 - ROUNDING) * shard.plain:
        return "no compression is worthwhile on this link"
    if warm_gain > max(group.gain(warm), group.least_gain(margin)):
        return "switching its group would cost more than it saves"
    if group.gain(fastest) > group.least_gain(0):
        return f"narrowing its group would save no more than the margin of {margin:.1%}"
    return "narrowing its group as a whole saves nothing"
