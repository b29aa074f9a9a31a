"""The TOML lines that a job should have, by what was measured, and what they should save."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from narrowcast.autotune.gradients import Reduction, is_worthwhile
from narrowcast.autotune.problem import Choice, Group
from narrowcast.config import AllGatherConfig, NarrowcastConfig
from torchtitan_ext.toml.writer import to_lines


def recommend(
    switches: NarrowcastConfig,
    problem: Sequence[Group],
    choice: Choice,
    reductions: Sequence[Reduction],
    step_seconds: float,
) -> dict[str, Any]:
    """The TOML lines that a job should have, and what they are expected to save.

    Args:
        switches: of the job, whose other settings stay.
        problem, choice, reductions: of the controller that has sampled the job.
        step_seconds: that a step takes.
    """
    baseline, compressed = (
        sum(getattr(one, name) for one in reductions) for name in ("plain", "entropy")
    )
    bits = _bits(problem, choice)
    saved = choice.plain_seconds - choice.seconds
    sections = {"all_gather": _all_gather_lines(switches.all_gather, choice)}
    gradients = "Gradients: none were sampled in so few steps, which gives no prediction."
    if reductions:
        enable = is_worthwhile(baseline, compressed)
        sections["reduce_scatter"] = _lines(switches.reduce_scatter, {"enable": enable})
        gradients = (
            f"Gradients: {_ms(baseline)} of reduce-scatters a step by baseline FSDP2 would become "
            f"{_ms(compressed)} compressed (predicted), which is {'' if enable else 'not '}"
            "worthwhile."
        )
    toml = "\n\n".join(
        "\n".join([f"[narrowcast.{name}]", *lines]) for name, lines in sections.items()
    )
    return {
        "text": f"{_gather_text(choice, bits, step_seconds)}\n{gradients}",
        "toml": toml + "\n",
        "expected": {
            "gather_seconds_per_step": {"plain": choice.plain_seconds, "chosen": choice.seconds},
            "saved_seconds_per_step": saved,
            "saved_share_of_step": saved / step_seconds,
            "bits_per_parameter_first_gather": bits,
            "cache_bytes_per_rank": choice.cache_bytes,
            "reduce_scatter_seconds_per_step": {"plain": baseline, "entropy": compressed},
        },
    }


def _bits(problem: Sequence[Group], choice: Choice) -> dict[str, float]:
    """Bits a parameter in the first gather of a step, of baseline FSDP2 and as chosen."""
    values = plain = chosen = 0.0
    for group in problem:
        compressions = choice.compressions.get(group.name, {})
        for shard in group.shards:
            values += shard.values
            plain += shard.values * shard.options["none"].bits
            chosen += shard.values * shard.options[compressions.get(shard.name, "none")].bits
    return {"plain": plain / max(values, 1), "chosen": chosen / max(values, 1)}


def _gather_text(choice: Choice, bits: dict[str, float], step_seconds: float) -> str:
    saved = choice.plain_seconds - choice.seconds
    text = (
        "Parameters: on this link no compression of any shard is worthwhile. Leave all-gathers to "
        f"baseline FSDP2: {_ms(choice.plain_seconds)} of gathers a step are predicted."
    )
    if choice.compressions:
        text = (
            f"Parameters: {_ms(choice.plain_seconds)} of gathers a step by baseline FSDP2 become "
            f"{_ms(choice.seconds)} (predicted): {_ms(saved)} less, where a step takes "
            f"{_ms(step_seconds)} ({saved / step_seconds:.0%}), as far as computation does not "
            f"hide them. {bits['chosen']:.1f} bits a parameter in the first gather of a step, "
            f"{bits['plain']:.1f} by the baseline; {choice.cache_bytes / 2**20:,.1f} MiB of caches "
            "on a rank."
        )
    if choice.unlimited_seconds < choice.seconds:
        text += (
            f" With a larger cache_budget_gib: {_ms(choice.unlimited_seconds)}, and "
            f"{choice.unlimited_cache_bytes / 2**20:,.1f} MiB."
        )
    return text


def _all_gather_lines(switches: AllGatherConfig, choice: Choice) -> list[str]:
    """``auto``, which goes on sampling, with a budget that is enough for what it chose here."""
    if not choice.compressions:
        return ["enable = false"]
    new = {"enable": True, "compression": "auto"}
    if choice.cache_bytes:
        budget = math.ceil(choice.cache_bytes / 2**30 * 10) / 10
        new["cache_budget_gib"] = min(budget, switches.cache_budget_gib)
    return _lines(switches, new)


def _lines(switches: Any, new: dict[str, Any]) -> list[str]:
    """Lines of TOML with new settings, and those that the job has changed from their defaults."""
    default = type(switches)()
    changed = {
        field.name: getattr(switches, field.name)
        for field in dataclasses.fields(switches)
        if field.name not in (*new, "enable", "compression")
        and getattr(switches, field.name) != getattr(default, field.name)
    }
    return to_lines({**new, **changed})


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
