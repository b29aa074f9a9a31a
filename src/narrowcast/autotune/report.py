"""What the controller reports: a log, files in a folder, and scalars for a dashboard."""

import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowcast.autotune import gradients, solver
from narrowcast.autotune.gradients import Reduction
from narrowcast.autotune.sampling import ALL, COMPRESSIONS, SampleStats
from narrowcast.autotune.solver import Choice, Group
from narrowcast.autotune.step_watch import Comparison
from narrowcast.util import write_text

logger = logging.getLogger(__name__)


class ReportWriter:
    """Logs, and writes files of one cluster of ranks that hold the same parameters.

    Args:
        folder: for the files; ``None``: nothing is written.
        leader: of the cluster; files of all but the cluster of rank 0 have it in their names.
    """

    def __init__(self, folder: Path | None, leader: int) -> None:
        self._folder = folder
        self._suffix = f"-rank-{leader}" if leader else ""

    def log(self, text: str) -> None:
        logger.info("narrowcast: %s", text)

    def save_json(self, name: str, content: dict[str, Any]) -> None:
        self._write(name, ".json", json.dumps(content, indent=1, allow_nan=False) + "\n")

    def save_text(self, name: str, text: str) -> None:
        self._write(name, ".txt", text + "\n")

    def trial(self, step: int, comparison: Comparison) -> None:
        """Reports how the trial of a choice has ended after ``step``."""
        verdict = "the last choice is kept"
        if comparison.is_slower:
            verdict = (
                "the last choice is undone, and not tried again until predicted costs or the "
                "choice change by more than a quarter"
            )
        self.log(f"after step {step}: {verdict}: {comparison}")
        content = {
            "step": step,
            "undone": comparison.is_slower,
            "seconds_before": comparison.before,
            "seconds_after": comparison.after,
            "steps_on_each_side": comparison.steps,
            "p_value": comparison.p_value,
        }
        self.save_json(f"trial-step-{step:08}", content)

    def _write(self, name: str, extension: str, text: str) -> None:
        """A report is not worth a training run: a file that cannot be written only gives a warning,
        once."""
        if self._folder is None:
            return
        try:
            write_text(self._folder / f"{name}{self._suffix}{extension}", text)
        except OSError as error:
            logger.warning(
                "narrowcast: the report is not written: %s. Give a folder that can be written",
                error,
            )
            self._folder = None


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


def choice_table(
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
    text = solver.table(problem, choice, limit=limit) + note
    if reductions:
        text += "\n\n" + gradients.table(reductions[:limit])
    return text


def compression_shares(problem: Sequence[Group], choice: Choice) -> dict[str, float]:
    """The share of all values that each compression was chosen for."""
    values = Counter(dict.fromkeys(COMPRESSIONS, 0))
    for group in problem:
        chosen = choice.compressions.get(group.name, {})
        for shard in group.shards:
            values[chosen.get(shard.name, "none")] += shard.values
    total = max(sum(values.values()), 1)
    return {compression: count / total for compression, count in values.items()}
