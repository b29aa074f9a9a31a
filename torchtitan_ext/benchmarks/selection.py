"""Whether `compression = "auto"` is as fast as the best compression on a link, and knows it
beforehand.

    scripts/slow_links 4 200mbit python -m torchtitan_ext.benchmarks.selection \\
        --job.config_file train_configs/links.toml --narrowcast.reduce_scatter.enable

Every rank runs it, as `torchtitan_ext.benchmarks.link`, whose stopwatch it uses. It trains the job
once with each compression, and with "auto", and takes the time of whole steps and of their
parameter gathers, and what narrowcast does between them. What "auto" predicts of each, from its
calibration and what it watched, stands beside it: a step is predicted as plain's measured one, less
what the gathers are predicted to save.
"""

import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowcast.autotune.problem import Choice, Group
from narrowcast.util import write_text
from torchtitan_ext.benchmarks.link import measure

STEPS = 10
_FIXED_WARM_UP = 2
_AUTO_WARM_UP = 10  # of which the last chooses
_COLD = 1  # step after the choice, in which caches fill
FIXED = ("none", "entropy", "exponent", "delta")
PLAIN, AUTO = "plain FSDP2", "auto"
_SWITCH = "--narrowcast.all_gather.enable --narrowcast.all_gather.compression {}"


def predicted_gathers(groups: Sequence[Group], choice: Choice) -> dict[str, float]:
    """Seconds of a step's gathers by variant, as the controller predicts them."""
    seconds = {PLAIN: choice.plain_seconds, AUTO: choice.seconds}
    for compression in FIXED:
        seconds[compression] = sum(
            group.steady(
                {s.name: compression if compression in s.options else "none" for s in group.shards}
            )
            for group in groups
        )
    return seconds


def summary(
    measured: dict[str, list[Counter[str]]], predicted: dict[str, float]
) -> dict[str, dict[str, Any]]:
    """By variant: seconds of steps and gathers (median, least, most), ratios, predictions."""
    medians = {
        name: {what: statistics.median(step[what] for step in steps) for what in steps[0]}
        for name, steps in measured.items()
    }
    plain = medians[PLAIN]
    rows = {}
    for name, steps in measured.items():
        expected_step = plain["step"] - predicted[PLAIN] + predicted[name]
        rows[name] = {
            "step": medians[name]["step"],
            "step_range": [min(s["step"] for s in steps), max(s["step"] for s in steps)],
            "step_over_plain": medians[name]["step"] / plain["step"],
            "gathers": medians[name]["all_gather"],
            "gathers_range": [
                min(s["all_gather"] for s in steps),
                max(s["all_gather"] for s in steps),
            ],
            "gathers_over_plain": medians[name]["all_gather"] / plain["all_gather"],
            "predicted_step": expected_step,
            "predicted_step_over_measured": expected_step / medians[name]["step"],
            "predicted_gathers": predicted[name],
        }
    return rows


def table(rows: dict[str, dict[str, Any]]) -> str:
    head = f"{'':14}{'step s':>8}{'(min to max)':>17}{'/ plain':>9}{'gathers s':>11}"
    head += (
        f"{'(min to max)':>17}{'/ plain':>9}{'predicted':>11}{'step, predicted':>17}{'ratio':>7}"
    )
    lines = [head]
    for name, row in rows.items():
        step_range, gathers_range = (
            "({:.2f} to {:.2f})".format(*row[what]) for what in ("step_range", "gathers_range")
        )
        lines.append(
            f"{name:14}{row['step']:>8.2f}{step_range:>17}{row['step_over_plain']:>9.2f}"
            f"{row['gathers']:>11.2f}{gathers_range:>17}{row['gathers_over_plain']:>9.2f}"
            f"{row['predicted_gathers']:>11.2f}{row['predicted_step']:>17.2f}"
            f"{row['predicted_step_over_measured']:>7.2f}"
        )
    return "\n".join(lines)


def run(flags: list[str]) -> tuple[dict[str, dict[str, Any]], int]:
    """Trains every variant on these flags of `torchtitan_ext.train`; the rows of the table, and the
    parameters of the largest group."""
    measured: dict[str, list[Counter[str]]] = {}
    predicted: dict[str, float] = {}
    largest = 0
    variants = {PLAIN: "", **{t: _SWITCH.format(t) for t in FIXED}, AUTO: _SWITCH.format("auto")}
    variants[AUTO] += f" --narrowcast.all_gather.warmup_steps {_AUTO_WARM_UP}"

    def note_predictions(trainer: Any) -> None:
        selection = trainer.narrowed.selection
        if selection.choice is None:
            raise RuntimeError(
                '"auto" has seen nothing of the shards in its warm-up: steps of this job are too '
                "short to look at a piece in 2 % of them. Take a larger model or batch"
            )
        predicted.update(predicted_gathers(selection.problem, selection.choice))

    for name, switches in variants.items():
        if os.environ.get("RANK", "0") == "0":
            print(f"{name} ...", flush=True)
        skipped = _AUTO_WARM_UP + _COLD if name == AUTO else _FIXED_WARM_UP
        steps, largest = measure(
            [*flags, *switches.split(), "--training.steps", str(skipped + STEPS)],
            note_predictions if name == AUTO else None,
        )
        measured[name] = steps[skipped:]
    return summary(measured, predicted), largest


def main() -> None:
    """Runs on the flags in `sys.argv`; the first rank prints the table and writes it as JSON."""
    from torchtitan_ext import compat, cpu

    compat.apply()
    cpu.apply()
    import torch.distributed as dist

    rows, largest = run(sys.argv[1:])
    if dist.get_rank() == 0:
        print(
            f"\nSeconds, {dist.get_world_size()} ranks, the slowest of them; largest group: "
            f"{largest:,} parameters; medians of {STEPS} steps\n\n{table(rows)}"
        )
        output = Path("outputs") / "selection_benchmark.json"
        write_text(output, json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
