"""The selection benchmark measures every variant, and sets predictions beside what it measured."""

import math
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
from torchtitan_ext.benchmarks import link, selection
from torchtitan_ext.benchmarks.selection import AUTO, PLAIN, predicted_gathers, run, summary, table


def _run(toml: str) -> tuple[dict[str, dict[str, Any]], int]:
    from torchtitan_ext import compat, cpu

    compat.apply()
    cpu.apply()
    with (
        patch("torchtitan.trainer.time.sleep"),
        patch.object(all_gather, "Sampler", partial(Sampler, share=math.inf)),
        patch.object(link.sys, "argv", ["it"]),
        patch.multiple(selection, FIXED=("delta",), STEPS=1, _AUTO_WARM_UP=3, _COLD=1),
    ):
        return run(["--job.config_file", toml])


def test_every_variant_is_measured_and_predicted(ranks, folder: Path) -> None:
    toml = write_toml(folder, folder / "corpus", folder / "selection_benchmark")
    rows, largest = ranks(2).run(_run, str(toml))[0]
    assert list(rows) == [PLAIN, "delta", AUTO]
    assert largest > 10_000
    for row in rows.values():
        assert 0 < row["gathers"] < row["step"]
        assert row["predicted_gathers"] > 0
    assert all(name in table(rows) for name in rows)


def test_predictions_are_those_of_the_controllers_choice() -> None:
    raw, value = Option(link=4.0), Option(link=0.5, encoding=0.25, decoding=0.25, switching=9.0)
    coded = Shard("a", "other", 8, 3.0, {"none": raw, "delta": value})
    whole_numbers = Shard("b", "other", 8, 1.0, {"none": raw})
    group = Group("g", (coded, whole_numbers), plain_latency=1.0, overhead=2.0)
    choice = Choice({}, 5.0, 4.5, 0, None, {}, 5.0, 0)
    with patch.object(selection, "FIXED", ("none", "delta")):
        predicted = predicted_gathers([group], choice)
    assert predicted == {PLAIN: 5.0, AUTO: 4.5, "none": 10.0, "delta": 7.0}


def test_a_step_is_predicted_as_plains_less_what_gathers_save() -> None:
    def steps(*seconds: float) -> list[Counter[str]]:
        return [Counter(step=s, all_gather=s / 2) for s in seconds]

    rows = summary({PLAIN: steps(8, 10, 12), AUTO: steps(5, 4, 9)}, {PLAIN: 5.0, AUTO: 1.0})
    assert rows[PLAIN]["predicted_step_over_measured"] == 1
    assert rows[AUTO]["step"] == 5
    assert rows[AUTO]["step_range"] == [4, 9]
    assert rows[AUTO]["step_over_plain"] == rows[AUTO]["gathers_over_plain"] == 0.5
    assert rows[AUTO]["predicted_step"] == 6
    assert rows[AUTO]["predicted_step_over_measured"] == pytest.approx(1.2)
