"""Chooses which parameter groups' gradients are reduced by narrowcast's compressed exchange.

step 1 .. warmup_steps      baseline FSDP2's own reduce-scatter; gradients are sampled
step warmup_steps           the first choice: compression where it is predicted to be worthwhile
every reselect_interval     another choice, from samples of the ``warmup_steps`` before it

A choice that made steps slower is undone, and it waits while another of the job is on trial
(``trial``).
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from narrowcast.autotune import calibration
from narrowcast.autotune.consensus import Consensus
from narrowcast.autotune.gathers import PLAIN, group_labels
from narrowcast.autotune.gradients import GradientSampler, Reduction, cost_table, is_worthwhile
from narrowcast.autotune.report import ReportWriter
from narrowcast.autotune.schedule import Schedule
from narrowcast.autotune.step_barrier import StepBarrier
from narrowcast.autotune.trial import Proposal, Trials
from narrowcast.errors import Job
from narrowcast.reducescatter.comm import NarrowReduceScatter
from narrowcast.wire.coders import Coder

_SAMPLING_SHARE = 0.005  # of a step's time; with what is not counted it stays below 1 %
_LOGGED_GROUPS = 20  # rows of a table in the log


class GradientController:
    """Owns the compressions of a model's ``comms``. Every rank of the job makes one alike, and all
    ranks take their steps together.

    Attributes:
        step: steps of the optimizer so far; the owner may set it where training was resumed.
        reductions: predicted costs of each parameter group's gradients; empty before the first
            choice.

    Args:
        comms: of all parameter groups, reduced by baseline FSDP2 at first.
        report: folder for what was measured and chosen; ``None``: nothing is written.
        job: the ranks that choose together.

    Raises:
        SettingsError: the ranks were given different settings.
    """

    def __init__(
        self,
        comms: Sequence[NarrowReduceScatter],
        coder: Coder,
        warmup_steps: int,
        reselect_interval: int,
        report: Path | None,
        job: Job,
    ) -> None:
        labels = group_labels([comm.group for comm in comms])
        self._comms = dict(zip(labels, comms, strict=True))
        groups = {label: comm.group for label, comm in self._comms.items()}
        topology = comms[0].topology
        self._sampler = GradientSampler(groups, coder, job.group, topology)
        self._schedule = Schedule(warmup_steps, reselect_interval)
        self._barrier = StepBarrier(job, list(groups.values()), self._schedule)
        self._consensus = Consensus.form(
            job.group,
            comms[0].group.device,
            {label: group.names for label, group in groups.items()},
            (warmup_steps, reselect_interval),
        )
        self._links = self._consensus.slowest_links(
            calibration.calibrate(list(groups.values()), {}, job, topology=topology).links,
            groups,
            lambda links: links.reduce_scatter.seconds(1 << 20),
        )
        self._trials = Trials(job, comms[0].group.device)
        self._previous = self._compressions()
        self._report = ReportWriter(report, self._consensus.leader)
        self._was_reported = False
        self.step = 0
        self.reductions: list[Reduction] = []
        self._sampler.subscribe()
        self._barrier.watch_gathers()

    def after_step(self) -> None:
        """Samples, and chooses when it is time. Every rank must call this after each step."""
        self.step += 1
        self._schedule.advance()
        samples = self._schedule.samples
        step_seconds = self._trials.end_step(samples)
        if samples:
            self._sampler.allow(self._room(step_seconds))
        elif self._schedule.steps_to_choice is None:
            self._sampler.unsubscribe()
        chooses_now = self._schedule.chooses and not self._trials.is_busy
        if self._trials.is_due or chooses_now:
            self._barrier.wait()
        if self._trials.is_due:
            self._judge()
        if self._schedule.chooses:
            if self._trials.is_busy:
                self._schedule.postpone()
            else:
                self._reconsider()
        self._trials.begin_step(samples)

    def remove(self) -> None:
        """Ends the observation of gradients, gathers and step times. Compressions stay as they
        are."""
        self._sampler.unsubscribe()
        self._barrier.remove()
        self._trials.remove()

    def scalars(self) -> dict[str, float]:
        """Scalars for a dashboard; the same on all ranks that hold the same parameters."""
        if not self.reductions:
            return {}
        plain = sum(one.plain for one in self.reductions)
        chosen = self._compressions()
        compressed = sum(self._size(label) for label, name in chosen.items() if name != PLAIN)
        scalars = {
            "share/entropy": compressed / sum(map(self._size, chosen)),
            "plain_seconds": plain,
            "predicted_seconds": _seconds(self.reductions, chosen),
            "undone": float(self._trials.num_undone),
        }
        return {f"narrowcast/selection/gradients/{name}": v for name, v in scalars.items()}

    def _room(self, step_seconds: float | None) -> float:
        """Chunks that may be sampled of a step, by the time that this rank took for the others."""
        if step_seconds is None or not self._sampler.num_sampled:
            return 0.0
        chunk_seconds = self._sampler.seconds / self._sampler.num_sampled
        return _SAMPLING_SHARE * step_seconds / max(chunk_seconds, 1e-9)

    def _size(self, label: str) -> int:
        """Values of a shard of a parameter group."""
        return sum(self._comms[label].group.numels)

    def _compressions(self) -> dict[str, str]:
        """The current compression of each parameter group; ``PLAIN`` where the baseline reduces."""
        return {label: comm.compression or PLAIN for label, comm in self._comms.items()}

    def _reconsider(self) -> None:
        """Chooses from the samples so far, applies the choice and reports it."""
        predicted = self._sampler.predict(
            self._consensus.labels,
            self._links,
            self._schedule.steps_since_choice,
            self._consensus.device,
        )
        self._schedule.restart_window()
        current = self._compressions()
        self.reductions, chosen = self._consensus.from_leader(
            lambda: (predicted, choose(predicted, current))
        )
        costs = (sum(one.plain for one in predicted), _seconds(predicted, chosen))
        proposal = Proposal(chosen, {label: self._size(label) for label in chosen}, costs)
        changed = {
            label: (current[label], after)
            for label, after in chosen.items()
            if current[label] != after
        }
        self._previous = current
        if changed and self._trials.was_undone(proposal):
            changed = {}
            if self._consensus.is_leader:
                self._report.log_kept("gradients", self.step)
        else:
            self._apply(chosen)
        if self._consensus.is_leader:
            self._report_choice(changed)
        if self._consensus.largest(len(changed)):
            self._trials.start(proposal)

    def _apply(self, compressions: dict[str, str]) -> None:
        for label, compression in compressions.items():
            assert compression in (PLAIN, "entropy")
            self._comms[label].compression = "entropy" if compression == "entropy" else None

    def _judge(self) -> None:
        """Ends the trial of the current choice, and undoes it where it made steps slower."""
        comparison = self._trials.verdict()
        if comparison.is_slower:
            self._apply(self._previous)
        if self._consensus.is_leader:
            self._report.trial("gradients", self.step, comparison)

    def _report_choice(self, changed: dict[str, tuple[str, str]]) -> None:
        compressions = self._compressions()
        if not self._was_reported:
            self._was_reported = True
            compressed = sum(name != PLAIN for name in compressions.values())
            verdict = (
                f"{compressed} of {len(compressions)} parameter groups are reduced with entropy "
                "coding, and the others by baseline FSDP2's own reduce-scatter"
                if compressed
                else "nothing is worthwhile on this link: baseline FSDP2's own reduce-scatter is "
                "left in place"
            )
            table = cost_table(self.reductions[:_LOGGED_GROUPS])
            self._report.log(f"gradients, after step {self.step}: {verdict}:\n{table}")
        else:
            for label, (before, after) in changed.items():
                self._report.log(f"gradients, after step {self.step}: {label}: {before} -> {after}")
        content: dict[str, Any] = {
            "step": self.step,
            "compressions": compressions,
            "changed": {label: list(both) for label, both in changed.items()},
            "reductions": [asdict(one) for one in self.reductions],
        }
        self._report.save_json(f"gradients-choice-step-{self.step:08}", content)


def choose(reductions: Sequence[Reduction], current: dict[str, str]) -> dict[str, str]:
    """The compression of each parameter group that is reduced, or ``PLAIN``; the others stay. What
    is current stays as long as the other is not faster by more than the margin for errors of
    prediction."""
    chosen = dict(current)
    for one in reductions:
        if current[one.label] == PLAIN and is_worthwhile(one.plain, one.entropy):
            chosen[one.label] = "entropy"
        elif current[one.label] != PLAIN and is_worthwhile(one.entropy, one.plain):
            chosen[one.label] = PLAIN
    return chosen


def _seconds(reductions: Sequence[Reduction], compressions: dict[str, str]) -> float:
    """Predicted seconds a step of all reductions."""
    return sum(one.plain if compressions[one.label] == PLAIN else one.entropy for one in reductions)
