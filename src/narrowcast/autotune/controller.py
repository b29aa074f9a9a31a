"""Chooses how the shards of a training run are compressed, and reconsiders the choice.

One rank solves for all ranks that hold the same parameters, from numbers summed over all ranks, and
the others take its choice (``consensus``). It chooses by predicted gain within the budget of caches
when the ``schedule`` says so. A compression is changed when that saves more until the next choice
than its cold cache costs. A choice that made steps slower all the same is undone (``trial``).
"""

import logging
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from narrowcast.allgather.comm import NarrowAllGather
from narrowcast.autotune import calibration, choice_report, solver
from narrowcast.autotune.consensus import Consensus
from narrowcast.autotune.gathers import Gathers
from narrowcast.autotune.gradients import GradientSampler, Reduction
from narrowcast.autotune.predictor import Predictor
from narrowcast.autotune.problem import Choice, Group
from narrowcast.autotune.report import ReportWriter
from narrowcast.autotune.sampling import Sampler
from narrowcast.autotune.schedule import Schedule
from narrowcast.autotune.solver import Strategy
from narrowcast.autotune.step_barrier import StepBarrier
from narrowcast.autotune.trial import Proposal, Trials
from narrowcast.errors import Job
from narrowcast.telemetry.changes import Changes, shard_type
from narrowcast.telemetry.ledger import Ledger
from narrowcast.wire.coders import CODERS

logger = logging.getLogger(__name__)

_GRADIENT_CHUNKS = 0.25  # chunks of gradients that are sampled for one of a shard
_LOGGED_SHARDS = 20  # rows of a table in the log
_GIB = 1 << 30


@dataclass(frozen=True)
class Rules:
    """What the user grants and wants.

    Attributes:
        applies: ``False``: the choice is only reported, and nothing is changed.
        cache_budget_gib: memory for caches on a rank, in GiB.
        strategy: ``exact``, or the paper's ``ratio``.
        warmup_steps: steps that are sampled before a choice.
        reselect_interval: steps from one choice to the next; 0: the first choice is final.
        report: folder for what was measured and chosen.
    """

    applies: bool
    cache_budget_gib: float
    strategy: Strategy
    warmup_steps: int
    reselect_interval: int
    report: Path | None


class Controller:
    """Owns the compressions of a model's ``comms``. Every rank of the job makes one alike.

    Attributes:
        step: steps of the optimizer so far; the owner may set it where training was resumed.
        calibration: what links and coders cost, measured when this object is made.
        choice: the current one (or, where nothing is applied, the one that would be); ``None``
            before the first.
        problem: what there was to choose from.
        reductions: predicted costs of each parameter group's gradients; empty before the first
            choice, and where no gradient was sampled.
        num_changed: changes of a shard's compression after the first choice.
        num_undone: choices that were undone, since they made steps slower.
        sampling_share: share of the time that sampling took, in the last sampling window.
        sampler: samples the shards.

    Args:
        comms: of all parameter groups, gathered by baseline FSDP2 at first.
        names: of the parameters to compress.
        sampler: samples the same groups.
        job: the ranks that choose together.

    Raises:
        SettingsError: the ranks were given different rules.
    """

    def __init__(
        self,
        comms: list[NarrowAllGather],
        names: set[str],
        sampler: Sampler,
        rules: Rules,
        ledger: Ledger | None,
        cache_device: str,
        job: Job,
    ) -> None:
        self._gathers = Gathers(comms, names)
        groups = self._gathers.groups
        self._rules, self._ledger, self.sampler = rules, ledger, sampler
        self.calibration = calibration.calibrate(
            list(groups.values()),
            CODERS,
            job,
            topology=comms[0].topology,
            cache_device=cache_device,
        )
        self._gradients = GradientSampler(groups, sampler.coder, job.group, comms[0].topology)
        self._schedule = Schedule(
            rules.warmup_steps, rules.reselect_interval, always_samples=not rules.applies
        )
        self._barrier = StepBarrier(job, list(groups.values()), self._schedule)
        self._consensus = Consensus.form(
            job.group, comms[0].group.device, self._gathers.params, replace(rules, report=None)
        )
        self._trials = Trials(job, comms[0].group.device)
        self._previous: tuple[list[Group], Choice] | None = None
        self._predictor = Predictor(
            self._gathers, self.calibration, self._consensus, sampler.scheme, sampler.coder
        )
        self.step = 0
        self.problem: list[Group] = []
        self.reductions: list[Reduction] = []
        self.choice: Choice | None = None
        self.num_changed = 0
        self.sampling_share = 0.0
        self._report = ReportWriter(rules.report, self._consensus.leader)
        if self._consensus.is_leader:
            self._report.log("calibrated:\n" + calibration.table(self.calibration))
            self._report.save_json("calibration", calibration.as_json(self.calibration))
        self._gradients.subscribe()

    def remove(self) -> None:
        """Ends the observation of gradients and of step times. Compressions stay as they are."""
        self._gradients.unsubscribe()
        self._barrier.remove()
        self._trials.remove()

    def after_step(self) -> None:
        """Samples, and chooses when it is time. Every rank must call this after each step."""
        self.step += 1
        self._schedule.advance()
        is_near = self._rules.applies and self._schedule.samples
        self._trials.end_step(is_near)
        if self._schedule.samples or self._trials.is_due:
            self._barrier.wait()
        if self._schedule.samples:
            self._record_changes(self.sampler.after_step())
            if self.sampler.chunks_per_step:
                self._gradients.allow(_GRADIENT_CHUNKS * self.sampler.chunks_per_step)
        else:
            self.sampler.pause()
        if self._schedule.steps_to_choice is None:
            self._gathers.clear_plain_times()
        if self._trials.is_due:
            self._judge()
        if self._schedule.chooses:
            if self._rules.applies and self._trials.is_busy:
                self._schedule.postpone()
            else:
                self._reconsider()
        self._trials.begin_step(is_near)

    @property
    def num_undone(self) -> int:
        return self._trials.num_undone

    def scalars(self) -> dict[str, float]:
        """Scalars for a dashboard; the same on all ranks that hold the same parameters."""
        if self.choice is None:
            return {}
        shares = choice_report.compression_shares(self.problem, self.choice)
        scalars = {f"share/{compression}": share for compression, share in shares.items()}
        scalars |= {
            "plain_seconds": self.choice.plain_seconds,
            "predicted_seconds": self.choice.seconds,
            "cache_bytes": float(self.choice.cache_bytes),
            "changed_shards": float(self.num_changed),
            "sampling_share": self.sampling_share,
            "undone": float(self.num_undone),
        }
        return {f"narrowcast/selection/{name}": value for name, value in scalars.items()}

    def _record_changes(self, changes: dict[str, Changes]) -> None:
        """Adds sampled changes to the ledger, for groups whose gathers compare nothing."""
        if self._ledger is None:
            return
        counted = self._ledger.current.changes
        for name in changes.keys() & self._gathers.uncompared:
            kind = shard_type(name)
            counted[kind] = counted.get(kind, Changes()) + changes[name]

    def _reconsider(self) -> None:
        """Chooses from the samples so far, applies the choice and reports it."""
        self._end_window_of_samples()
        if not self._predictor.has_samples:
            if not self._schedule.is_postponed and self._consensus.is_leader:
                self._report.log(
                    f"no shard was sampled until step {self.step}: a step is too short to sample a "
                    "chunk within the time allowed. The choice follows the first sample"
                )
            self._schedule.postpone()
            return
        steps = self._schedule.steps_since_choice
        coding_seconds = self._predictor.learn_from_gathers(steps)
        self.reductions = self._gradients.predict(
            self._consensus.labels, self._predictor.links, steps, self._consensus.device
        )
        solved = self._consensus.from_leader(lambda: self._solve(coding_seconds))
        self._gathers.clear_times()
        self._schedule.restart_window()
        self._previous = None if self.choice is None else (self.problem, self.choice)
        proposal, num_changed = None, 0
        if isinstance(solved, str):
            logger.warning("narrowcast: compressions stay as they are: %s", solved)
        else:
            proposal = self._gathers.proposal(*solved)
            num_changed = self._take(*solved, proposal)
        if self._rules.applies and self._consensus.largest(num_changed):
            self._trials.start(proposal)

    def _take(self, problem: list[Group], choice: Choice, proposal: Proposal) -> int:
        """Makes a choice the current one, applies it and reports it, unless it was undone before.

        Returns:
            Of how many parameters the compression has changed.
        """
        before = self._gathers.compressions(self.choice.compressions if self.choice else {})
        changed = {
            name: (before[name], after)
            for name, after in proposal.compressions.items()
            if before[name] != after
        }
        if changed and self._trials.was_undone(proposal):
            if self._consensus.is_leader:
                self._report.log_kept("gathers", self.step)
            return 0
        is_first = self.choice is None
        self.problem, self.choice = problem, choice
        if not is_first:
            self.num_changed += len(changed)
        if self._rules.applies:
            self._gathers.apply(choice.compressions, self.sampler.scheme)
        if self._consensus.is_leader:
            self._report_choice(is_first, changed)
        return len(changed)

    def _judge(self) -> None:
        """Ends the trial of the current choice, and undoes it where it made steps slower."""
        comparison = self._trials.verdict()
        if comparison.is_slower:
            if self._previous is not None:
                self.problem, self.choice = self._previous
            elif self.choice is not None:
                self.choice = self.choice.all_plain("undone: it made steps slower")
            chosen = self.choice.compressions if self.choice is not None else {}
            self._gathers.apply(chosen, self.sampler.scheme)
        if self._consensus.is_leader:
            self._report.trial("gathers", self.step, comparison)

    def _end_window_of_samples(self) -> None:
        """Adds the samples of all ranks to the history, and notes the time that they took."""
        self._predictor.add_samples(self.sampler.samples)
        spent = self.sampler.seconds + self._gradients.seconds
        self.sampling_share = self._consensus.largest(spent / max(self.sampler.elapsed, 1e-9))
        self.sampler.clear()
        self._gradients.seconds = 0.0

    def _solve(self, coding_seconds: float) -> tuple[list[Group], Choice] | str:
        """The choice, or why there is none: then compressions stay as they are.

        Args:
            coding_seconds: of a step, measured.
        """
        try:
            problem = self._predictor.problem(coding_seconds, self._schedule)
            budget_bytes = int(self._rules.cache_budget_gib * _GIB)
            return problem, solver.choose(
                problem, budget_bytes, self._rules.strategy, solver.MARGIN
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _report_choice(self, is_first: bool, changed: dict[str, tuple[str, str]]) -> None:
        table = partial(
            choice_report.full_table,
            self.problem,
            self.choice,
            self.reductions,
            choice_report.unsampled_note(self._gathers.compressible, self._predictor.samples),
        )
        if is_first:
            verb = "chosen" if self._rules.applies else "would be chosen (nothing is applied)"
            self._report.log(f"{verb} after step {self.step}:\n{table(_LOGGED_SHARDS)}")
        for name, (before, after) in changed.items() if not is_first else ():
            self._report.log(f"after step {self.step}: {name}: {before} -> {after}")
        content = {
            "step": self.step,
            "applied": self._rules.applies,
            "warmup_steps": self._rules.warmup_steps,
            "sampling_share": self.sampling_share,
            "coding_scale": self._predictor.corrections.coding,
            "link_scale": self._predictor.corrections.mean_link,
            "samples": choice_report.sample_rates(self._predictor.samples),
            "changed": {name: list(both) for name, both in changed.items()},
            "reductions": [asdict(one) for one in self.reductions],
            **choice_report.as_json(self.problem, self.choice),
        }
        self._report.save_json(f"choice-step-{self.step:08}", content)
        self._report.save_text(f"choice-step-{self.step:08}", table())
