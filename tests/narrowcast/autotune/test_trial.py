"""Choices that made steps slower are undone on all ranks alike, and no bit of training differs."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

from narrowcast.autotune import trial
from narrowcast.autotune.step_watch import COLD_STEPS, WINDOW
from narrowcast.autotune.trial import Proposal
from tests.narrowcast.autotune.test_controller import SLOW, _compressions, _narrow, on_a_link
from tests.narrowcast.training import Setup, build, same_bits, state_of, train
from tests.wide import wide_but

WARMUP = 12
JUDGED = WARMUP + COLD_STEPS + WARMUP - 1  # the first step is not timed: it has no beginning


class Clock:
    """Steps take what a test says, and everything else no time at all."""

    def __init__(self, seconds_of_step: Any) -> None:
        self._seconds_of_step = seconds_of_step
        self._generator = np.random.default_rng(dist.get_rank())
        self._now = 0.0

    def __call__(self, _: Any = None) -> float:
        return self._now

    def step(self, *_: Any) -> None:
        jitter = float(np.exp(0.02 * self._generator.standard_normal()))
        self._now += self._seconds_of_step() * jitter


@contextmanager
def clocked(clock: Clock, optimizer: Any) -> Iterator[None]:
    hook = optimizer.register_step_pre_hook(clock.step)
    with patch.object(trial, "util", SimpleNamespace(now=clock)):
        yield
    hook.remove()


@contextmanager
def log_of_narrowcast() -> Iterator[list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("narrowcast")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)


def _train_clocked(
    loss: float, slow_rank: int | None, setup: Setup, folder: Path | None, faster_link_at: int = 0
) -> dict[str, Any]:
    """Trains plain and with ``auto``, whose steps take ``1 + loss`` times as long where anything is
    compressed (on one rank alone, or on all)."""
    model, optimizer = build(setup)
    losses = train(setup, model, optimizer)
    plain = state_of(model, optimizer)
    with on_a_link(SLOW), log_of_narrowcast() as log:
        model, optimizer, handle = _narrow(
            setup, warmup_steps=WARMUP, reselect_interval=20, report=folder
        )
        is_slow = slow_rank is None or dist.get_rank() == slow_rank

        def seconds_of_step() -> float:
            compressed = set(_compressions(handle).values()) != {"plain"}
            return 1 + loss if compressed and is_slow else 1.0

        steps: list[set[str]] = []

        def note(*_: Any) -> None:
            steps.append(set(_compressions(handle).values()))
            if len(steps) == faster_link_at:
                links = handle.selection._predictor.links
                for label, one in links.items():
                    links[label] = one.__class__(
                        **{**vars(one), "all_gather": one.all_gather.scaled(0.5)}
                    )

        optimizer.register_step_post_hook(note)
        with clocked(Clock(seconds_of_step), optimizer):
            equal = train(setup, model, optimizer) == losses
        equal = equal and same_bits(state_of(model, optimizer), plain)
        scalars, cached = handle.selection.scalars(), handle.cache_bytes
        handle.remove()
    return {"equal": equal, "steps": steps, "scalars": scalars, "cached": cached, "log": log}


def test_a_choice_that_makes_one_rank_a_tenth_slower_is_undone_on_all(ranks, tmp_path) -> None:
    setup = Setup(steps=JUDGED + 8)
    results = ranks(2).run(_train_clocked, 0.1, 1, setup, tmp_path)
    for one in results:
        assert one["equal"]
        assert one["steps"][WARMUP - 2] == {"plain"}
        assert one["steps"][WARMUP - 1] == one["steps"][JUDGED - 2] == {"delta"}
        assert all(step == {"plain"} for step in one["steps"][JUDGED - 1 :])
        assert one["scalars"]["narrowcast/selection/undone"] == 1
        assert one["scalars"]["narrowcast/selection/share/none"] == 1
        assert one["cached"] == 0
    log = "\n".join(results[0]["log"])
    assert f"gathers, after step {JUDGED}: the last choice is undone" in log
    assert "slower, p = " in log
    assert results[1]["log"] == []  # the first rank speaks for all
    report = json.loads((tmp_path / f"gathers-trial-step-{JUDGED:08}.json").read_text())
    assert report["undone"] is True
    assert 1.05 < report["seconds_after"] / report["seconds_before"] < 1.15
    assert report["steps_on_each_side"] == WARMUP - 1


def test_a_choice_that_makes_no_step_slower_is_kept(ranks, tmp_path) -> None:
    for one in ranks(2).run(_train_clocked, 0.0, None, Setup(steps=JUDGED + 2), tmp_path):
        assert one["equal"]
        assert all(step == {"delta"} for step in one["steps"][WARMUP - 1 :])
        assert one["scalars"]["narrowcast/selection/undone"] == 0
    assert (
        json.loads((tmp_path / f"gathers-trial-step-{JUDGED:08}.json").read_text())["undone"]
        is False
    )


@pytest.mark.parametrize("conditions_change", wide_but([False, True], True))
def test_what_was_undone_is_not_tried_again_until_conditions_change(
    ranks, conditions_change: bool
) -> None:
    """The choice that is due after step 32 waits until steps have been timed since the undone one,
    for which the link is twice as fast by then, or not."""
    next_choice = JUDGED + COLD_STEPS + WINDOW
    faster_link_at = JUDGED + 2 if conditions_change else 0
    setup = Setup(steps=next_choice + 1)
    first, second = ranks(2).run(_train_clocked, 0.1, None, setup, None, faster_link_at)
    assert first["equal"]
    assert second["equal"]
    assert first["steps"] == second["steps"]
    assert all(step == {"plain"} for step in first["steps"][JUDGED - 1 : next_choice - 1])
    assert first["steps"][-1] == ({"delta"} if conditions_change else {"plain"})
    assert first["scalars"]["narrowcast/selection/undone"] == 1
    kept = "compressions stay as they are: the choice is still the one that was undone"
    assert any(kept in line for line in first["log"]) != conditions_change


def test_a_proposal_is_the_same_as_long_as_neither_costs_nor_choice_differ_much() -> None:
    sizes = {"a": 100.0, "b": 10.0}
    undone = Proposal({"a": "delta", "b": "delta"}, sizes, (2.0, 1.0))
    assert undone.resembles(undone)
    assert Proposal({"a": "delta", "b": "none"}, sizes, (2.2, 0.9)).resembles(undone)
    assert not Proposal({"a": "entropy", "b": "delta"}, sizes, (2.0, 1.0)).resembles(undone)
    assert not Proposal({"a": "delta", "b": "delta"}, sizes, (3.0, 1.0)).resembles(undone)  # link
    assert not Proposal({"a": "delta", "b": "delta"}, sizes, (2.0, 0.5)).resembles(undone)  # coding
