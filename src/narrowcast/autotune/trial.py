"""Puts the choices of a job on trial: what made steps slower is undone, and not tried again until
conditions change.

Ranks time their own steps, without what selection itself takes. When both sides of a choice are
complete, one small all-reduce finds the slowest rank's time of each step, and every rank comes to
the same verdict.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from narrowcast import util
from narrowcast.autotune.step_watch import Comparison, StepWatch, compare
from narrowcast.errors import Job

SAME = 0.25  # share by which costs, or choices, may differ and still count as the same

_watches: WeakKeyDictionary[Job, StepWatch] = WeakKeyDictionary()


@dataclass(frozen=True)
class Proposal:
    """A choice, and the conditions that it was made under.

    Attributes:
        compressions: by parameter, or by parameter group.
        sizes: of the same, in any unit.
        costs: predicted seconds of a step by baseline FSDP2 and as proposed. They follow from the
            measured costs of links and coding and from the sampled change rates.
    """

    compressions: Mapping[str, str]
    sizes: Mapping[str, float]
    costs: tuple[float, float]

    def resembles(self, other: "Proposal") -> bool:
        """Whether it is as good as the same: no cost is more than a quarter off, and no more than a
        quarter of the sizes has another compression."""
        differing = sum(
            size
            for name, size in self.sizes.items()
            if self.compressions.get(name) != other.compressions.get(name)
        )
        return differing <= SAME * sum(self.sizes.values()) and all(
            abs(own - before) <= SAME * before
            for own, before in zip(self.costs, other.costs, strict=True)
        )


class Trials:
    """Times the steps of one chooser, and compares them before and after each of its choices.

    Attributes:
        num_undone: choices that were undone.
        last: the last comparison; ``None`` before the first.

    Args:
        job: one of its choosers at a time has a choice on trial.
        device: of this rank. Steps are timed once it has done all that it was given.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self._group, self._device = job.group, device
        self._watch = _watches.setdefault(job, StepWatch())
        self._began: float | None = None
        self._chosen: Proposal | None = None
        self._undone: Proposal | None = None
        self.num_undone = 0
        self.last: Comparison | None = None

    @property
    def is_busy(self) -> bool:
        """Whether no choice may be made now, by anyone in the job. The same on every rank."""
        return self._watch.is_busy

    @property
    def is_due(self) -> bool:
        """Whether ``verdict`` may be asked for. The same on every rank."""
        return self._watch.due(self) is not None

    def end_step(self, is_wanted: bool) -> float | None:
        """Call it first after each step.

        Args:
            is_wanted: whether a choice is near; steps during a trial are always timed.

        Returns:
            The seconds that the step took on this rank; ``None`` where they are not known.
        """
        if not (is_wanted or self._watch.is_busy):
            self._began = None
            self._watch.pause(self)
            return None
        began, self._began = self._began, None
        if began is None:
            return None
        seconds = util.now(self._device) - began
        self._watch.record(self, seconds)
        return seconds

    def begin_step(self, is_wanted: bool) -> None:
        """Call it last after each step: what follows belongs to the next one."""
        if is_wanted or self._watch.is_busy:
            self._began = util.now(self._device)

    def start(self, proposal: Proposal | None) -> bool:
        """Puts a change of compressions on trial, if enough steps before it were timed; whether it
        does. Every rank must call this where one of them changes any, with ``None`` if it has no
        choice to make."""
        self._chosen = proposal
        return self._watch.start_trial(self)

    def verdict(self) -> Comparison:
        """Compares the steps before and after the choice on trial, and ends the trial. Every rank
        must call this when it ``is_due``."""
        due = self._watch.due(self)
        assert due is not None
        times_2N = torch.tensor(due, dtype=torch.float64, device=self._device)
        dist.all_reduce(times_2N, op=dist.ReduceOp.MAX, group=self._group)
        self.last = compare(*times_2N.tolist())
        self._watch.end_trial(self.last.is_slower)
        if self.last.is_slower:
            self.num_undone += 1
            self._undone = self._chosen or self._undone
        return self.last

    def was_undone(self, proposal: Proposal) -> bool:
        """Whether a proposal is as good as the same as the last one that was undone."""
        return self._undone is not None and proposal.resembles(self._undone)

    def remove(self) -> None:
        """Ends the timing of steps, and any trial of this chooser."""
        self._watch.leave(self)
