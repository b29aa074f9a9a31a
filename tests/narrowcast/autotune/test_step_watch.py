"""Choices that make steps slower are found, and those that do not are left alone.

``python -m tests.narrowcast.autotune.test_step_watch`` prints the rates for all kinds of noise.
"""

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest

from narrowcast.autotune.step_watch import (
    COLD_STEPS,
    LEAST,
    WINDOW,
    StepWatch,
    compare,
)

Noise = Callable[[np.random.Generator, int], np.ndarray]


def jitter(scatter: float, correlation: float = 0.0) -> Noise:
    """Log-normal, with this standard deviation and autocorrelation of the logarithm."""

    def draw(generator: np.random.Generator, n: int) -> np.ndarray:
        shock_N = generator.standard_normal(n)
        level_N = shock_N.copy()
        for i in range(1, n):
            level_N[i] = correlation * level_N[i - 1]
            level_N[i] += math.sqrt(1 - correlation**2) * shock_N[i]
        return np.exp(scatter * level_N)

    return draw


def outliers(scatter: float, share: float) -> Noise:
    """Jitter, of which a share of the steps takes several times as long (validation)."""

    def draw(generator: np.random.Generator, n: int) -> np.ndarray:
        late_N = (generator.random(n) < share) * (1 + generator.exponential(3, n))
        return jitter(scatter)(generator, n) * (1 + late_N)

    return draw


def checkpoints(scatter: float, interval: int) -> Noise:
    """Jitter, and a checkpoint every so many steps."""

    def draw(generator: np.random.Generator, n: int) -> np.ndarray:
        is_late_N = (np.arange(n) + generator.integers(interval)) % interval == 0
        return jitter(scatter)(generator, n) * (1 + 4 * is_late_N)

    return draw


def drifting(scatter: float, share: float) -> Noise:
    """Jitter, while steps get slower by this share over the trial."""

    def draw(generator: np.random.Generator, n: int) -> np.ndarray:
        return jitter(scatter)(generator, n) * (1 + share * np.arange(n) / n)

    return draw


def heavy_tail(scatter: float) -> Noise:
    """Steps are late by the absolute values of Student's t with two degrees of freedom."""
    return lambda generator, n: 1 + scatter * np.abs(generator.standard_t(2, n))


def two_speeds(scatter: float, gap: float, persistence: float) -> Noise:
    """Jitter about one of two levels, kept from step to step with this probability."""

    def draw(generator: np.random.Generator, n: int) -> np.ndarray:
        flips_N = generator.random(n) > persistence
        is_slow_N = (np.cumsum(flips_N) + generator.integers(2)) % 2
        return jitter(scatter)(generator, n) * (1 + gap * is_slow_N)

    return draw


PROMISED: dict[str, Noise] = {
    "jitter 2 %": jitter(0.02),
    "jitter 5 %": jitter(0.05),
    "jitter 10 %": jitter(0.1),
    "jitter 30 %": jitter(0.3),
    "autocorrelated 0.5, 5 %": jitter(0.05, 0.5),
    "autocorrelated 0.5, 10 %": jitter(0.1, 0.5),
    "autocorrelated 0.8, 5 %": jitter(0.05, 0.8),
    "autocorrelated 0.8, 10 %": jitter(0.1, 0.8),
    "outliers 10 %": outliers(0.03, 0.1),
    "outliers 20 %": outliers(0.1, 0.2),
    "checkpoint every 10": checkpoints(0.05, 10),
    "drift 2 %": drifting(0.02, 0.02),
    "drift 4 %": drifting(0.05, 0.04),
    "drift -10 %": drifting(0.05, -0.1),
    "heavy tail": heavy_tail(0.1),
}
BEYOND: dict[str, Noise] = {
    "autocorrelated 0.9, 10 %": jitter(0.1, 0.9),
    "drift 10 %": drifting(0.02, 0.1),
    "two speeds, 10 steps each": two_speeds(0.02, 0.1, 0.9),
    "two speeds, 30 steps each": two_speeds(0.02, 0.2, 0.97),
}


def share_undone(noise: Noise, loss: float, trials: int, window: int = WINDOW) -> float:
    """Of seeded trials, in which steps after the choice take ``1 + loss`` times as long."""
    generator = np.random.default_rng(0)
    undone = 0
    for _ in range(trials):
        before_N, _, after_N = np.split(
            noise(generator, 2 * window + COLD_STEPS), [window, window + COLD_STEPS]
        )
        undone += compare(list(before_N), list((1 + loss) * after_N)).is_slower
    return undone / trials


@pytest.mark.parametrize("window", [LEAST, WINDOW])
@pytest.mark.parametrize("noise", [n for n in PROMISED if "0.8" not in n])
def test_at_most_one_choice_in_twenty_is_undone_where_nothing_changed(
    noise: str, window: int
) -> None:
    assert share_undone(PROMISED[noise], 0.0, 500, window) <= 1 / 20


@pytest.mark.parametrize("noise", [n for n in PROMISED if "0.8" in n])
def test_correlated_steps_need_the_whole_window(noise: str) -> None:
    assert share_undone(PROMISED[noise], 0.0, 1000) <= 1 / 20


@pytest.mark.parametrize(
    ("noise", "least"),
    [
        ("jitter 2 %", 1.0),
        ("jitter 5 %", 0.95),
        ("jitter 10 %", 0.7),
        ("autocorrelated 0.5, 5 %", 0.8),
        ("outliers 10 %", 0.95),
        ("checkpoint every 10", 0.95),
        ("drift 2 %", 1.0),
        ("heavy tail", 0.8),
    ],
)
def test_a_loss_of_a_tenth_is_found(noise: str, least: float) -> None:
    assert share_undone(PROMISED[noise], 0.1, 300) >= least


def test_a_small_loss_is_tolerated_and_a_gain_is_no_loss() -> None:
    assert share_undone(jitter(0.01), 0.03, 100) == 0
    assert share_undone(jitter(0.01), -0.2, 100) == 0


def test_steps_without_any_noise_are_compared() -> None:
    assert not compare([1.0] * 10, [1.0] * 10).is_slower
    assert compare([1.0] * 10, [1.1] * 10).is_slower
    assert not compare([1.0] * 10, [0.9] * 10).is_slower
    assert "10.0% slower" in str(compare([1.0] * 10, [1.1] * 10))


def _watch_after(steps: int, owner: str = "a") -> StepWatch:
    watch = StepWatch()
    for _ in range(steps):
        watch.record(owner, 1.0)
    return watch


def test_a_verdict_is_due_within_thirty_steps_of_the_choice() -> None:
    watch = _watch_after(40)
    assert watch.start_trial("a")
    steps = 0
    while watch.due("a") is None:
        watch.record("a", 5.0 if steps < COLD_STEPS else 2.0)
        steps += 1
    assert steps == COLD_STEPS + WINDOW <= 30
    before, after = watch.due("a")
    assert before == [1.0] * WINDOW
    assert after == [2.0] * WINDOW  # cold steps are not among them


def test_too_few_steps_before_a_choice_are_no_trial() -> None:
    assert not _watch_after(LEAST - 1).start_trial("a")
    watch = _watch_after(LEAST)
    assert watch.start_trial("a")
    for _ in range(COLD_STEPS + LEAST):
        assert watch.due("a") is None
        watch.record("a", 1.0)
    assert watch.due("a") is not None  # as many steps on both sides


def test_a_change_ends_what_is_known_of_step_times_for_all() -> None:
    watch = _watch_after(40)
    watch.record("b", 1.0)
    assert watch.start_trial("a")
    watch.end_trial(is_undone=False)
    assert not watch.start_trial("b")


def test_one_choice_at_a_time_is_on_trial() -> None:
    watch = _watch_after(40)
    for _ in range(40):
        watch.record("b", 1.0)
    assert not watch.is_busy
    watch.start_trial("a")
    assert watch.is_busy
    for _ in range(20):
        watch.record("a", 1.0)
        watch.record("b", 1.0)
    assert watch.due("b") is None
    assert not watch.start_trial("b")
    assert watch.is_busy
    watch.leave("a")
    assert not watch.is_busy


def test_a_trial_ends_when_its_owner_is_no_longer_there() -> None:
    """A model was built anew, and its old handle not removed."""
    watch = _watch_after(40)
    assert watch.start_trial("a")
    for _ in range(COLD_STEPS + WINDOW + 1):
        assert watch.is_busy
        watch.record("b", 1.0)
    assert not watch.is_busy
    assert watch.start_trial("b")


def test_cold_steps_are_not_what_the_next_choice_is_compared_with() -> None:
    watch = _watch_after(40)
    watch.start_trial("a")
    for _ in range(COLD_STEPS):
        watch.record("b", 5.0)
        watch.record("a", 5.0)
    for _ in range(WINDOW):
        watch.record("b", 1.0)
        watch.record("a", 1.0)
    watch.end_trial(is_undone=False)
    assert watch.start_trial("b")
    for _ in range(COLD_STEPS + WINDOW):
        watch.record("b", 1.0)
    before, _ = watch.due("b")
    assert set(before) == {1.0}


def test_after_an_undone_choice_the_next_one_has_steps_to_be_compared_with() -> None:
    watch = _watch_after(40)
    watch.start_trial("a")
    watch.end_trial(is_undone=True)
    steps = 0
    while watch.is_busy:
        watch.record("a", 1.0)
        steps += 1
    assert steps == COLD_STEPS + WINDOW
    assert watch.start_trial("a")


def test_a_pause_forgets_the_steps_before_it() -> None:
    watch = _watch_after(40)
    watch.pause("a")
    assert not watch.start_trial("a")


def main(trials: int) -> None:
    print(f"{'share of choices undone, ' + str(trials) + ' trials':40} A/A   10 % slower")
    for name, noise in (PROMISED | BEYOND).items():
        rates = [share_undone(noise, loss, trials) for loss in (0.0, 0.1)]
        beyond = "  (beyond what is promised)" if name in BEYOND else ""
        print(f"{name:40}{rates[0]:6.1%}{rates[1]:10.1%}{beyond}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
