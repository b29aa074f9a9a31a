"""Gradients are compressed where that is worthwhile on the link: alike on all ranks, and at two
ranks no bit differs."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from narrowcast import NarrowedGradients, narrow_all_gather, narrow_reduce_scatter
from narrowcast.autotune import calibration, gradients
from narrowcast.autotune.curves import Curve
from narrowcast.autotune.gradient_controller import choose
from narrowcast.autotune.gradients import Reduction
from narrowcast.autotune.links import Links
from narrowcast.autotune.step_watch import COLD_STEPS
from tests.narrowcast.autotune.test_controller import FAST, SLOW, on_a_link
from tests.narrowcast.autotune.test_trial import (
    JUDGED,
    WARMUP,
    Clock,
    clocked,
    log_of_narrowcast,
)
from tests.narrowcast.training import Setup, build, same_bits, state_of, train
from tests.wide import wide_but


@contextmanager
def on_this_link(seconds_per_byte: float) -> Iterator[None]:
    """As ``on_a_link``; coding a chunk of gradients takes next to no time."""
    ticks = itertools.count()
    clock = SimpleNamespace(now=lambda _: next(ticks) * 1e-9)
    with on_a_link(seconds_per_byte), patch.object(gradients, "util", clock):
        yield


def _compressions(handle: NarrowedGradients) -> set[str]:
    return {comm.compression or "plain" for comm in handle._comms}


def _train_auto(
    seconds_per_byte: float, setup: Setup, loss: float, folder: Path | None, settings: dict
) -> dict[str, Any]:
    """Trains plain and with ``auto``, whose steps take ``1 + loss`` times as long where gradients
    are compressed."""
    model, optimizer = build(setup)
    losses = train(setup, model, optimizer)
    plain = state_of(model, optimizer)
    with on_this_link(seconds_per_byte), log_of_narrowcast() as log:
        model, optimizer = build(setup)
        handle = narrow_reduce_scatter(model, optimizer, report=folder, **settings)
        steps: list[set[str]] = []
        optimizer.register_step_post_hook(lambda *_: steps.append(_compressions(handle)))
        clock = Clock(lambda: 1.0 if _compressions(handle) == {"plain"} else 1 + loss)
        with clocked(clock, optimizer):
            equal = train(setup, model, optimizer) == losses
        equal = equal and same_bits(state_of(model, optimizer), plain)
        scalars, ratio = handle.selection.scalars(), handle.ledger.last.scalars()
        handle.remove()
    return {"steps": steps, "equal": equal, "scalars": scalars, "log": log, "volume": ratio}


def test_on_a_slow_link_gradients_are_compressed_after_the_warm_up(ranks, tmp_path) -> None:
    settings = {"warmup_steps": 4, "reselect_interval": 0}
    results = ranks(2).run(_train_auto, SLOW, Setup(steps=7), 0.0, tmp_path, settings)
    for one in results:
        assert one["equal"]
        assert all(step == {"plain"} for step in one["steps"][:3])
        assert all(step == {"entropy"} for step in one["steps"][3:])
        assert one["volume"]["narrowcast/ratio/reduce_scatter"] < 0.9
        assert one["scalars"]["narrowcast/selection/gradients/share/entropy"] == 1
        predicted = one["scalars"]["narrowcast/selection/gradients/predicted_seconds"]
        assert predicted < one["scalars"]["narrowcast/selection/gradients/plain_seconds"]
    log = "\n".join(results[0]["log"])
    assert "gradients, after step 4: 3 of 3 parameter groups are reduced with entropy" in log
    assert results[1]["log"] == []
    report = json.loads((tmp_path / "gradients-choice-step-00000004.json").read_text())
    assert report["compressions"] == dict.fromkeys(("0", "1", "(root)"), "entropy")
    assert {one["label"] for one in report["reductions"]} == {"0", "1", "(root)"}


def test_on_a_fast_link_plain_is_left_in_place_and_that_is_said_once(ranks) -> None:
    settings = {"warmup_steps": 4, "reselect_interval": 2}
    results = ranks(2).run(_train_auto, FAST, Setup(steps=9), 0.0, None, settings)
    for one in results:
        assert one["equal"]
        assert all(step == {"plain"} for step in one["steps"])
        assert one["volume"]["narrowcast/ratio/reduce_scatter"] == 1
    said = [line for line in results[0]["log"] if "reduce-scatter is left in place" in line]
    assert len(said) == 1
    assert "after step 4" in said[0]


def test_compressed_gradients_that_make_steps_slower_are_undone(ranks, tmp_path) -> None:
    settings = {"warmup_steps": WARMUP, "reselect_interval": 20}
    setup = Setup(steps=JUDGED + 2)
    for one in ranks(2).run(_train_auto, SLOW, setup, 0.1, tmp_path, settings):
        assert one["equal"]
        assert one["steps"][WARMUP - 1] == one["steps"][JUDGED - 2] == {"entropy"}
        assert one["steps"][-1] == {"plain"}
        assert one["scalars"]["narrowcast/selection/gradients/undone"] == 1
    report = json.loads((tmp_path / f"gradients-trial-step-{JUDGED:08}.json").read_text())
    assert report["undone"] is True


def _both_auto(gradients_first: bool, losses: dict[str, float]) -> dict[str, Any]:
    """The steps at which gathers, and gradients, were compressed, and what was undone."""
    setup = Setup(steps=JUDGED + 60)
    with on_this_link(SLOW):
        model, optimizer = build(setup)
        settings = {"warmup_steps": WARMUP, "reselect_interval": 0}

        def narrow(name: str) -> Any:
            call = narrow_reduce_scatter if name == "gradients" else narrow_all_gather
            return call(model, optimizer, **settings)

        names = ["gathers", "gradients"][:: -1 if gradients_first else 1]
        handles = {name: narrow(name) for name in names}

        def compressed() -> list[str]:
            gathers = any(comm.schemes is not None for comm in handles["gathers"]._comms)
            gradients = _compressions(handles["gradients"]) != {"plain"}
            return ["gathers"] * gathers + ["gradients"] * gradients

        steps: list[list[str]] = []
        optimizer.register_step_post_hook(lambda *_: steps.append(compressed()))
        clock = Clock(lambda: 1 + sum(losses[name] for name in compressed()))
        with clocked(clock, optimizer):
            train(setup, model, optimizer)
        for name in reversed(names):
            handles[name].remove()
    return {name: [step for step, found in enumerate(steps, 1) if name in found] for name in losses}


# Each of the two is once the slow one, and is once narrowed first.
@pytest.mark.parametrize(
    "case",
    wide_but(
        ["slow gathers", "slow gathers last", "slow gradients", "slow gradients last"],
        "slow gradients",
    ),
)
def test_gathers_and_gradients_are_not_on_trial_at_the_same_time(ranks, case: str) -> None:
    """So what one of them costs does not undo the other."""
    slow = case.split()[1]
    gradients_first = (slow == "gradients") != case.endswith("last")
    losses = {"gathers": 0.0, "gradients": 0.0, slow: 0.15}
    first, second = list(losses)[:: -1 if gradients_first else 1]
    kept = "gradients" if slow == "gathers" else "gathers"
    one, other = ranks(2).run(_both_auto, gradients_first, losses)
    assert one == other
    assert one[first][0] == WARMUP
    assert one[second][0] >= WARMUP + COLD_STEPS + WARMUP - 1
    assert one[kept][-1] == JUDGED + 60
    assert len(one[slow]) == one[slow][-1] - one[slow][0] + 1 <= 30  # undone


def _links_measured(second_job: bool) -> list[int]:
    """How often links had been measured after each of the calls."""
    counts = []
    model, optimizer = build(Setup())
    curve = Curve(0.0, 1e-9, 0.0, (1,), (1e-9,))
    link = Links(tuple(range(dist.get_world_size())), *[curve] * 3, 0.0, 0.0, 0.0)
    job = dist.new_group(list(range(dist.get_world_size())), group_desc=str(second_job))
    with patch.object(calibration, "measure_links", return_value=link) as measure:
        for narrow in (narrow_all_gather, narrow_reduce_scatter):
            if second_job:
                job = dist.new_group(list(range(dist.get_world_size())), group_desc=narrow.__name__)
            narrow(model, optimizer, compression="auto", force=True, process_group=job)
            counts.append(measure.call_count)
    return counts


@pytest.mark.parametrize("second_job", [False, True])
def test_links_of_a_job_are_measured_once(ranks, second_job: bool) -> None:
    assert ranks(2).run(_links_measured, second_job) == [[1, 1 + second_job]] * 2


def _refused() -> str:
    model, _ = build(Setup())
    try:
        narrow_reduce_scatter(model)
    except ValueError as error:
        return str(error)
    return ""


def test_auto_is_the_default_and_needs_an_optimizer(ranks) -> None:
    for message in ranks(2).run(_refused):
        assert 'compression = "auto" without an optimizer' in message
        assert "give narrow_reduce_scatter the optimizer" in message


def test_the_current_compression_stays_unless_the_other_is_faster_by_a_margin() -> None:
    def one(label: str, plain: float, entropy: float) -> Reduction:
        return Reduction(label, plain, plain, entropy, 12.0)

    costs = [one("gains", 1.0, 0.9), one("even", 1.0, 0.98), one("loses", 1.0, 1.2)]
    plain = dict.fromkeys(("gains", "even", "loses", "not reduced"), "plain")
    assert choose(costs, plain) == plain | {"gains": "entropy"}
    coded = dict.fromkeys(plain, "entropy")
    assert choose(costs, coded) == coded | {"loses": "plain"}
    even = [one("even", 1.0, 1.02)]
    assert choose(even, {"even": "entropy"}) == {"even": "entropy"}
    assert choose(even, {"even": "plain"}) == {"even": "plain"}
