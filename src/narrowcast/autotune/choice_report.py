"""A problem and a choice as text, as JSON and as shares for a dashboard."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from narrowcast.autotune import gradients
from narrowcast.autotune.gradients import Reduction
from narrowcast.autotune.problem import Choice, Group, Shard
from narrowcast.autotune.sample_stats import ALL, COMPRESSIONS, SampleStats
from narrowcast.util import aligned

_HEAD = ["shard", "kind", "compression", "values", "plain ms", "chosen ms", "gain ms", "cache MiB"]


def full_table(
    problem: Sequence[Group],
    choice: Choice,
    reductions: Sequence[Reduction],
    note: str,
    limit: int = sys.maxsize,
) -> str:
    """The choice of each shard and its reason, and below it the predicted costs of gradients.

    Args:
        note: stands below the shards.
        limit: most rows of either table.
    """
    text = table(problem, choice, limit=limit) + note
    if reductions:
        text += "\n\n" + gradients.table(reductions[:limit])
    return text


def table(groups: Sequence[Group], choice: Choice, limit: int = 20) -> str:
    """The shards that take longest, at most ``limit``, with choice and reason, and the totals."""
    shards = [(group, shard) for group in groups for shard in group.shards]
    shards.sort(key=lambda pair: (-pair[1].plain, pair[0].name, pair[1].name))
    rows, reasons = [_HEAD], ["reason"]
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


def _as_chosen(choice: Choice, group: Group, shard: Shard) -> tuple[str, float, int]:
    """A shard's compression or ``plain``, its seconds a step with a warm cache, and cache bytes."""
    if group.name not in choice.compressions:
        return "plain", shard.plain, 0
    name = choice.compressions[group.name][shard.name]
    return name, shard.options[name].steady, shard.options[name].cache_bytes


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
        text = f"All groups stay with baseline FSDP2, predicted at {before} ms of gathers a step."
        weights: Counter[str] = Counter()
        for group, shard in shards:
            weights[choice.reasons[group.name, shard.name]] += shard.plain
        if weights:
            text += f" The main reason: {weights.most_common(1)[0][0]}."
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
    """All shards with every term of every option, the choice, its reason, and the totals."""
    described = []
    for group in groups:
        entry = asdict(group) | {"narrowed": group.name in choice.compressions}
        for shard, of_shard in zip(group.shards, entry["shards"], strict=True):
            for name, option in shard.options.items():
                more = {"seconds": option.seconds, "gain": shard.gain(name)}
                of_shard["options"][name] |= more
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


def sample_rates(samples: Mapping[str, SampleStats]) -> dict[str, dict[str, float]]:
    """By parameter, how many of its values were sampled, and what share of them changed."""
    return {
        name: {"values": stats.changes.values, **stats.changes.rates()}
        for name, stats in samples.items()
        if name != ALL
    }


def unsampled_note(names: set[str], samples: Mapping[str, SampleStats]) -> str:
    """A sentence on the parameters that were not sampled; empty where all were."""
    unsampled = names - samples.keys()
    if not unsampled:
        return ""
    return (
        f"\n{len(unsampled)} of {len(names)} shards were not sampled yet: samples of the same type "
        "of shard, or else of all shards, stand for them."
    )


def compression_shares(problem: Sequence[Group], choice: Choice) -> dict[str, float]:
    """The share of all values that each compression was chosen for."""
    values = Counter(dict.fromkeys(COMPRESSIONS, 0))
    for group in problem:
        chosen = choice.compressions.get(group.name, {})
        for shard in group.shards:
            values[chosen.get(shard.name, "none")] += shard.values
    total = max(sum(values.values()), 1)
    return {compression: count / total for compression, count in values.items()}
