"""Whether ``compression = "auto"`` is as fast as the best fixed compression on a link, and predicts
that.

    scripts/slow_links 4 200mbit python -m torchtitan_ext.benchmarks.selection \\
        --job.config_file train_configs/links.toml --narrowcast.reduce_scatter.enable \\
        --narrowcast.reduce_scatter.compression entropy

Every rank runs it, as ``torchtitan_ext.benchmarks.link``, whose stopwatch it uses. It trains the
job once with each compression, and with ``auto``, and measures whole steps and their parameter
gathers, with what narrowcast does between them. Beside them stands what ``auto`` predicts of each,
from its calibration and its samples: a step is predicted as the measured one of baseline FSDP2,
less what the gathers are predicted to save.
"""

import os
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from narrowcast.autotune.problem import Choice, Group
from narrowcast.util import aligned
from torchtitan_ext import compat
from torchtitan_ext.benchmarks.command_line import make_job_parser, write_json
from torchtitan_ext.benchmarks.link import measure

STEPS = 10
_FIXED_WARM_UP = 2
_UNCOUNTED = ("--narrowcast.volume.no-enable",)
_AUTO_WARM_UP = 10  # of which the last chooses
_COLD = 1  # step after the choice, in which caches fill
FIXED = ("none", "entropy", "exponent", "delta")
BASELINE, AUTO = "baseline FSDP2", "auto"
_SWITCH = "--narrowcast.all_gather.enable --narrowcast.all_gather.compression {}"


def predicted_gathers(groups: Sequence[Group], choice: Choice) -> dict[str, float]:
    """Seconds of a step's gathers by variant, as the controller predicts them."""
    seconds = {BASELINE: choice.plain_seconds, AUTO: choice.seconds}
    for compression in FIXED:
        seconds[compression] = sum(
            group.steady(
                {s.name: compression if compression in s.options else "none" for s in group.shards}
            )
            for group in groups
        )
    return seconds


def rows(
    measured: dict[str, list[Counter[str]]], predicted: dict[str, float]
) -> list[dict[str, Any]]:
    """A row for each variant: seconds of steps and gathers, their ratios, and predictions.

    Args:
        measured: seconds of ``step`` and ``all_gather`` of each step, by variant.
        predicted: seconds of the gathers of a step, by variant.
    """
    medians = {
        name: {what: statistics.median(step[what] for step in steps) for what in steps[0]}
        for name, steps in measured.items()
    }
    baseline = medians[BASELINE]
    made = []
    for name, steps in measured.items():
        expected_step = baseline["step"] - predicted[BASELINE] + predicted[name]
        row: dict[str, Any] = {"variant": name}
        for key, what in (("step", "step"), ("gathers", "all_gather")):
            row |= {
                f"{key}_s": medians[name][what],
                f"{key}_min_s": min(step[what] for step in steps),
                f"{key}_max_s": max(step[what] for step in steps),
                f"{key}_over_baseline": medians[name][what] / baseline[what],
            }
        row |= {
            "predicted_gathers_s": predicted[name],
            "predicted_step_s": expected_step,
            "predicted_step_over_measured": expected_step / medians[name]["step"],
        }
        made.append(row)
    return made


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    head = ["", "step s", "(min to max)", "/ baseline", "gathers s", "(min to max)", "/ baseline"]
    head += ["predicted", "step, predicted", "ratio"]
    lines = [head]
    for row in rows:
        line = [row["variant"]]
        for key in ("step", "gathers"):
            line += [
                f"{row[f'{key}_s']:.2f}",
                f"({row[f'{key}_min_s']:.2f} to {row[f'{key}_max_s']:.2f})",
                f"{row[f'{key}_over_baseline']:.2f}",
            ]
        line += [
            f"{row['predicted_gathers_s']:.2f}",
            f"{row['predicted_step_s']:.2f}",
            f"{row['predicted_step_over_measured']:.2f}",
        ]
        lines.append(line)
    return aligned(lines, words=1)


def run(flags: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """Train every variant on these flags of ``torchtitan_ext.train``.

    Returns:
        The rows of the table, and the number of parameters of the largest group.
    """
    measured: dict[str, list[Counter[str]]] = {}
    predicted: dict[str, float] = {}
    largest = 0
    variants = {BASELINE: "", **{t: _SWITCH.format(t) for t in FIXED}, AUTO: _SWITCH.format("auto")}
    variants[AUTO] += f" --narrowcast.all_gather.warmup_steps {_AUTO_WARM_UP}"

    def note_predictions(trainer: Any) -> None:
        selection = trainer.narrowed.selection
        if selection.choice is None:
            raise RuntimeError(
                '"auto" has sampled no shards in its warm-up: steps of this job are too short to '
                "encode a sample in 2 % of their time. Take a larger model or batch"
            )
        predicted.update(predicted_gathers(selection.problem, selection.choice))

    for name, switches in variants.items():
        if os.environ.get("RANK", "0") == "0":
            print(f"{name} ...", flush=True)
        skipped = _AUTO_WARM_UP + _COLD if name == AUTO else _FIXED_WARM_UP
        steps, largest = measure(
            [*flags, *switches.split(), *_UNCOUNTED, "--training.steps", str(skipped + STEPS)],
            note_predictions if name == AUTO else None,
        )
        measured[name] = steps[skipped:]
    return rows(measured, predicted), largest


def main() -> None:
    """Run on the flags of the command line. The first rank prints the table."""
    args, flags = make_job_parser("selection", __doc__).parse_known_args()
    compat.apply()
    measured, largest = run(flags)
    if dist.get_rank() == 0:
        print(
            f"\nSeconds, {dist.get_world_size()} ranks, the slowest of them; largest group: "
            f"{largest:,} parameters; medians of {STEPS} steps\n\n{table(measured)}"
        )
        job = {"ranks": dist.get_world_size(), "largest_group_parameters": largest}
        write_json(args.json, [{**row, **job, "steps": STEPS} for row in measured])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
