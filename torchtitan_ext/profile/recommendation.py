"""The TOML lines that a job should have, by what was measured of it, and what they should save."""

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
    """The TOML that the job should have, and what it is expected to save.

    Args:
        switches: of the job; its other settings stay.
        problem, choice, reductions: of the controller that has watched the job.
    """
    shards = [(group, shard) for group in problem for shard in group.shards]
    chosen = {
        (group.name, shard.name): choice.compressions.get(group.name, {}).get(shard.name, "none")
        for group, shard in shards
    }
    values = max(sum(shard.values for _, shard in shards), 1)
    plain_bits = sum(s.values * s.options["none"].bits for _, s in shards) / values
    bits = sum(s.values * s.options[chosen[g.name, s.name]].bits for g, s in shards) / values
    saved = choice.plain_seconds - choice.seconds
    sections = {"all_gather": _all_gather_lines(switches.all_gather, choice)}
    gather_text = (
        "Parameters: on this link no compression of any shard pays. Leave all-gathers to plain "
        f"FSDP2: {_ms(choice.plain_seconds)} of gathers a step are predicted."
    )
    if choice.compressions:
        gather_text = (
            f"Parameters: {_ms(choice.plain_seconds)} of gathers a step, plain, become "
            f"{_ms(choice.seconds)} (predicted): {_ms(saved)} less, where a step takes "
            f"{_ms(step_seconds)} ({saved / step_seconds:.0%}), as far as computation does not "
            f"hide them. {bits:.1f} bits a parameter in the first gather of a step, "
            f"{plain_bits:.1f} plain; {choice.cache_bytes / 2**20:,.1f} MiB of caches on a rank."
        )
    if choice.unlimited_seconds < choice.seconds:
        gather_text += (
            f" With a larger cache_budget_gib: {_ms(choice.unlimited_seconds)}, and "
            f"{choice.unlimited_cache_bytes / 2**20:,.1f} MiB."
        )
    plain, coded = (sum(getattr(one, name) for one in reductions) for name in ("plain", "entropy"))
    gradient_text = "Gradients: none were looked at in so few steps, which gives no prediction."
    if reductions:
        enable = is_worthwhile(plain, coded)
        sections["reduce_scatter"] = _lines(switches.reduce_scatter, {"enable": enable})
        gradient_text = (
            f"Gradients: {_ms(plain)} of reduce-scatters a step, plain, would become {_ms(coded)} "
            f"coded (predicted), {'which pays' if enable else 'which does not pay'}."
        )
    toml = "\n\n".join(
        "\n".join([f"[narrowcast.{name}]", *lines]) for name, lines in sections.items()
    )
    return {
        "text": f"{gather_text}\n{gradient_text}",
        "toml": toml + "\n",
        "expected": {
            "gather_seconds_per_step": {"plain": choice.plain_seconds, "chosen": choice.seconds},
            "saved_seconds_per_step": saved,
            "saved_share_of_step": saved / step_seconds,
            "bits_per_parameter_first_gather": {"plain": plain_bits, "chosen": bits},
            "cache_bytes_per_rank": choice.cache_bytes,
            "reduce_scatter_seconds_per_step": {"plain": plain, "entropy": coded},
        },
    }


def _all_gather_lines(switches: AllGatherConfig, choice: Choice) -> list[str]:
    """`auto`, which goes on looking, with a budget that is enough for what it chose here."""
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
    kept = {
        field.name: getattr(switches, field.name)
        for field in dataclasses.fields(switches)
        if field.name not in (*new, "enable", "compression")
        and getattr(switches, field.name) != getattr(default, field.name)
    }
    return to_lines({**new, **kept})


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
