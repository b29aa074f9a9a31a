"""The link benchmark times every collective of the real job, and compares like with like."""

import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.torchtitan_ext.tiny import write_toml
from torchtitan_ext import compat
from torchtitan_ext.benchmarks import link
from torchtitan_ext.benchmarks.link import KINDS, VARIANTS, Sent, bytes_of, measure, rows, table


def _measured(
    toml: str,
) -> tuple[dict[str, tuple[list[Counter[str]], int]], list[dict[str, Any]]]:
    compat.apply()
    flags = ["--job.config_file", toml, "--training.steps", "2"]
    with patch("torchtitan.trainer.time.sleep"), patch.object(sys, "argv", ["it"]):
        measured, sent = {}, {}
        for name, variant in VARIANTS.items():
            note = partial(sent.__setitem__, name)
            measured[name] = measure(
                [*flags, *variant.split()], lambda trainer, note=note: note(Sent.by(trainer))
            )
        return measured, bytes_of(sent)


def test_every_step_of_every_variant_is_timed(ranks, folder: Path) -> None:
    toml = write_toml(folder, folder / "corpus", folder / "links")
    measured = ranks(2).run(_measured, str(toml))
    assert measured[0] == measured[1]  # of the slowest rank, on both
    by_variant, (baseline, uncompressed, compressed) = measured[0]
    assert compressed["bitwise_equal"]
    assert uncompressed["bitwise_equal"]
    assert uncompressed["bits_per_parameter_into_node"] == pytest.approx(
        baseline["bits_per_parameter_into_node"], rel=0.02
    )
    assert compressed["bytes_into_node"] < 0.6 * uncompressed["bytes_into_node"]
    assert compressed["cache_bytes"] > baseline["cache_bytes"] == 0
    assert all(one["bytes_within_node"] == 0 for one in (baseline, uncompressed, compressed))
    for steps, largest in by_variant.values():
        assert len(steps) == 2
        assert all(step[kind] > 0 for step in steps for kind in KINDS)
        assert largest > 10_000


def test_a_collective_is_timed_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """From when all ranks have come to it; what goes on after its call has returned included."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

    def passes(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(link, "time", clock)
    monkeypatch.setattr(link.dist, "barrier", lambda: passes(100))
    work = SimpleNamespace(wait=lambda: passes(4))

    def start() -> SimpleNamespace:
        passes(2)
        return work

    watch = link.Stopwatch(started=0.0)
    assert watch.timed("all_gather", start)() is work
    watch.timed("all_gather", lambda: passes(8))()
    watch.end_step()
    assert watch.steps == [{"all_gather": 14, "step": 214}]


@pytest.mark.parametrize(
    "arguments", [("2", "1gbit"), ("x", "1gbit", "true"), ("300", "1gbit", "true")]
)
def test_slow_links_shows_its_usage_before_it_does_anything(arguments: tuple[str, ...]) -> None:
    script = Path(__file__).parents[3] / "scripts" / "slow_links"
    done = subprocess.run([script, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "scripts/slow_links RANKS RATE command" in done.stderr


def test_the_table_has_medians_spread_and_ratios_to_both_baselines() -> None:
    def steps(*seconds: float) -> list[Counter[str]]:
        return [Counter(all_gather=s, reduce_scatter=2 * s, step=5 * s) for s in seconds]

    seconds = dict(zip(VARIANTS, (steps(2, 4, 9), steps(2, 2, 2), steps(1, 1, 1)), strict=True))
    sent = {"bytes_into_node": 3 << 20, "bytes_within_node": 1 << 20, "cache_bytes": 7}
    sent |= {"bits_per_parameter_into_node": 4.5, "bitwise_equal": True}
    found = rows(seconds, [sent] * 3)
    lines = table(found).splitlines()[1:]
    assert {tuple(line.split()[-4:]) for line in lines} == {("3.00", "1.00", "4.50", "yes")}
    assert [line.split()[-10:-4] for line in lines] == [
        ["12.00", "(6.00", "to", "27.00)", "1.00", "2.00"],
        ["6.00", "(6.00", "to", "6.00)", "0.50", "1.00"],
        ["3.00", "(3.00", "to", "3.00)", "0.25", "0.50"],
    ]
    assert [row["name"] for row in found] == list(VARIANTS)
    assert [row["all_gather_seconds"] for row in found] == [4, 2, 1]
    assert [row["step_seconds"] for row in found] == [20, 10, 5]
    assert [row["over_baseline"] for row in found] == [1, 0.5, 0.25]
