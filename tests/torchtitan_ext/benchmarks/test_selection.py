"""The selection benchmark measures every variant, and sets predictions beside what it measured."""

import math
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from narrowcast import all_gather
from narrowcast.autotune.problem import Choice, Group, Option, Shard
from narrowcast.autotune.sampling import Sampler
from tests.torchtitan_ext.tiny import write_toml
from torchtitan_ext import compat
from torchtitan_ext.benchmarks import selection
from torchtitan_ext.benchmarks.selection import (
    AUTO,
    BASELINE,
    predicted_gathers,
    rows,
    run,
    table,
)


def _run(toml: str) -> tuple[list[dict[str, Any]], int]:
    compat.apply()
    with (
        patch("torchtitan.trainer.time.sleep"),
        patch.object(all_gather, "Sampler", partial(Sampler, share=math.inf)),
        patch.object(sys, "argv", ["it"]),
        patch.multiple(selection, FIXED=("delta",), STEPS=1, _AUTO_WARM_UP=3, _COLD=1),
    ):
        return run(["--job.config_file", toml])


def test_every_variant_is_measured_and_predicted(ranks, folder: Path) -> None:
    toml = write_toml(folder, folder / "corpus", folder / "selection_benchmark")
    found, largest = ranks(2).run(_run, str(toml))[0]
    assert [row["variant"] for row in found] == [BASELINE, "delta", AUTO]
    assert largest > 10_000
    for row in found:
        assert 0 < row["gathers_s"] < row["step_s"]
        assert row["predicted_gathers_s"] > 0
    assert all(row["variant"] in table(found) for row in found)


def test_predictions_are_those_of_the_controllers_choice() -> None:
    raw, value = Option(link=4.0), Option(link=0.5, encoding=0.25, decoding=0.25, switching=9.0)
    coded = Shard("a", "other", 8, 3.0, {"none": raw, "delta": value})
    whole_numbers = Shard("b", "other", 8, 1.0, {"none": raw})
    group = Group("g", (coded, whole_numbers), plain_latency=1.0, overhead=2.0)
    choice = Choice({}, 5.0, 4.5, 0, None, {}, 5.0, 0)
    with patch.object(selection, "FIXED", ("none", "delta")):
        predicted = predicted_gathers([group], choice)
    assert predicted == {BASELINE: 5.0, AUTO: 4.5, "none": 10.0, "delta": 7.0}


def test_a_step_is_predicted_as_plains_less_what_gathers_save() -> None:
    def steps(*seconds: float) -> list[Counter[str]]:
        return [Counter(step=s, all_gather=s / 2) for s in seconds]

    measured = {BASELINE: steps(8, 10, 12), AUTO: steps(5, 4, 9)}
    baseline, auto = rows(measured, {BASELINE: 5.0, AUTO: 1.0})
    assert baseline["predicted_step_over_measured"] == 1
    assert auto["step_s"] == 5
    assert (auto["step_min_s"], auto["step_max_s"]) == (4, 9)
    assert auto["step_over_baseline"] == auto["gathers_over_baseline"] == 0.5
    assert auto["predicted_step_s"] == 6
    assert auto["predicted_step_over_measured"] == pytest.approx(1.2)
