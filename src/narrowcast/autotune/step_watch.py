"""Whether a choice of compressions made training steps slower, by the times of the steps.

    ... | WINDOW steps before | choice | COLD_STEPS, not counted | as many steps after | verdict

Step times have outliers (checkpoints, validation), jitter with a heavy tail, and neighbours that
resemble each other. So medians are compared, and whether they differ by more than noise is tested
on ranks, by a t-test with a standard error that is widened for first-order autocorrelation. For
independent times that is the Wilcoxon rank-sum test (Conover and Iman, "Rank transformations as a
bridge between parametric and nonparametric statistics", The American Statistician 35, 1981).

Measured on seeded series (``tests/narrowcast/autotune/test_step_watch.py``): of A/A trials, where
nothing changed, at most 1 in 20 is found slower where jitter is independent, or resembles its
neighbours (an autocorrelation of up to 0.8), has outliers or a heavy tail, or drifts by up to 4 %
over the trial. A loss of 10 % is found in at least 95 of 100 trials where single steps scatter by
5 % (standard deviation, independent), in nearly nine of ten where they also have an autocorrelation
of 0.5, and in about three of four where they scatter by 10 %. What no test of two windows can tell
from a loss: a machine that changes its speed for dozens of steps just then (a neighbour's job).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import stdtr
from scipy.stats import rankdata

WINDOW = 25  # steps on each side of a choice, at most
LEAST = 10  # steps on each side without which there is no trial
COLD_STEPS = 3  # after a change of compressions: caches fill, memory is allocated
TOLERATED = 0.05  # loss of the median that is never undone
_SIGNIFICANCE = 0.01  # below the 1/20 that is promised, for noise that is not as the test assumes
_MOST_CORRELATED = 0.95


@dataclass(frozen=True)
class Comparison:
    """Step times before and after a choice.

    Attributes:
        before, after: medians, in seconds.
        steps: on each side.
        p_value: of the hypothesis that steps did not get slower.
    """

    before: float
    after: float
    steps: int
    p_value: float

    @property
    def loss(self) -> float:
        """What steps got slower by, as a share of the time before; negative where they got
        faster."""
        return self.after / self.before - 1

    @property
    def is_slower(self) -> bool:
        """Whether steps got slower by more than is tolerated, and by more than noise."""
        return self.loss > TOLERATED and self.p_value < _SIGNIFICANCE

    def __str__(self) -> str:
        verb = "slower" if self.loss > 0 else "faster"
        return (
            f"the median step took {1e3 * self.before:.1f} ms before and {1e3 * self.after:.1f} ms "
            f"after it ({self.steps} steps each): {abs(self.loss):.1%} {verb}, "
            f"p = {self.p_value:.2g}"
        )


def compare(before: Sequence[float], after: Sequence[float]) -> Comparison:
    """Compares step times, in seconds and in the order of the steps; as many of either."""
    n = len(before)
    assert n == len(after) > 3
    rank_2N = rankdata([*before, *after]).reshape(2, n)
    mean_2 = rank_2N.mean(axis=1)
    residual_2N = rank_2N - mean_2[:, None]
    squares = float((residual_2N**2).sum())
    difference = mean_2[1] - mean_2[0]
    p_value = float(difference <= 0)  # where each side holds one value alone
    if squares > 0:
        products = float((residual_2N[:, 1:] * residual_2N[:, :-1]).sum())
        correlation = _corrected_correlation(products / squares, n)
        widening = (1 + correlation) / (1 - correlation)
        error = np.sqrt(squares / (2 * n - 2) * (2 / n) * widening)
        p_value = float(stdtr(2 * n - 2, -difference / error))
    return Comparison(float(np.median(before)), float(np.median(after)), n, p_value)


def _corrected_correlation(estimate: float, n: int) -> float:
    """The autocorrelation at lag 1, without the bias of its estimate from ``n`` values (Kendall,
    "Note on bias in the estimation of autocorrelation", Biometrika 41, 1954)."""
    return float(np.clip((n * estimate + 1) / (n - 3), 0.0, _MOST_CORRELATED))


@dataclass
class _Trial:
    """A choice on trial; or, without times before it, the steps that follow an undone one."""

    owner: object
    before: list[float]
    cold_steps: int = COLD_STEPS
    after: list[float] = field(default_factory=list)
    idle_steps: int = 0  # of other owners, since this one last recorded a step

    def record(self, owner: object, seconds: float) -> None:
        if owner is not self.owner:
            self.idle_steps += 1
            return
        self.idle_steps = 0
        if self.cold_steps:
            self.cold_steps -= 1
        else:
            self.after.append(seconds)

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for a verdict: its owner has gone, or it is no choice and has
        ended."""
        has_ended = not self.before and not self.cold_steps
        return has_ended or self.idle_steps > COLD_STEPS + WINDOW


class StepWatch:
    """The step times of a job, of which one choice at a time is on trial.

    Whoever chooses in the job is an owner: all-gathers and gradients may both be chosen. A change
    by one ends what is known of step times for all. All that it reports depends on the number of
    steps alone, and not on their times, so it is the same on every rank.
    """

    def __init__(self) -> None:
        self._times: dict[object, deque[float]] = {}
        self._trial: _Trial | None = None

    @property
    def is_busy(self) -> bool:
        """Whether no other choice may be made now: one is on trial, or was just undone and the
        steps since then are too few to compare with."""
        return self._trial is not None

    def record(self, owner: object, seconds: float) -> None:
        """Adds the time of a step, as this owner measured it."""
        self._times.setdefault(owner, deque(maxlen=WINDOW)).append(seconds)
        if self._trial is not None:
            was_cold = self._trial.cold_steps > 0
            self._trial.record(owner, seconds)
            if was_cold and not self._trial.cold_steps and self._trial.before:
                self._times.clear()  # the next choice is not to be compared with cold steps
            if self._trial.is_over:
                self._trial = None

    def pause(self, owner: object) -> None:
        """Forgets this owner's times: the next one will not be of the step that follows."""
        self._times.pop(owner, None)

    def start_trial(self, owner: object) -> bool:
        """Notes that this owner has changed compressions, and puts that on trial if enough steps
        are known from before.

        Returns:
            Whether it does.
        """
        before = self._times.get(owner, ())
        is_known = len(before) >= LEAST and not self.is_busy
        if is_known:
            self._trial = _Trial(owner, list(before))
        self._times.clear()
        return is_known

    def due(self, owner: object) -> tuple[list[float], list[float]] | None:
        """The times before and after this owner's choice on trial, once there are as many."""
        trial = self._trial
        if trial is None or trial.owner is not owner or not trial.before:
            return None
        return (trial.before, trial.after) if len(trial.after) == len(trial.before) else None

    def end_trial(self, is_undone: bool) -> None:
        """Ends the trial. Where the choice is undone, what is known of step times ends too."""
        assert self._trial is not None
        owner, self._trial = self._trial.owner, None
        if is_undone:
            self._times.clear()
            self._trial = _Trial(owner, [], cold_steps=COLD_STEPS + WINDOW)

    def leave(self, owner: object) -> None:
        """Forgets an owner that makes no more choices."""
        self.pause(owner)
        if self._trial is not None and self._trial.owner is owner:
            self._trial = None
