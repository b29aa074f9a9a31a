"""Chooses how the shards of a training run are compressed, and looks at the choice again.

    step 1 .. warmup_steps      plain FSDP2; shards are watched
    step warmup_steps           the choice: by gain, within the budget of caches
    every reselect_interval     another look, by what was watched in the warmup_steps before

One rank solves for all ranks that hold the same parameters, by numbers summed over all ranks, and
the others take its choice: every rank makes the same one. A compression is changed when that gains
more until the next look than the cold cache costs.
"""

import json
import logging
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.allgather.comm import NarrowAllGather
from narrowcast.autotune import calibration, cost_model, solver
from narrowcast.autotune import gradients as gradient_gain
from narrowcast.autotune.gradients import GradientSampler, Reduction
from narrowcast.autotune.sampling import ALL, COMPRESSIONS, Sampler, SampleStats, sum_over_ranks
from narrowcast.autotune.solver import Strategy
from narrowcast.errors import Job, SettingsError
from narrowcast.fsdp2 import ParamGroup
from narrowcast.telemetry.changes import Changes, shard_type
from narrowcast.telemetry.ledger import Ledger
from narrowcast.util import write_text
from narrowcast.wire.coders import CODERS

logger = logging.getLogger(__name__)

_OF_GRADIENTS = 0.25  # pieces for one of a shard
_SHOWN = 20  # lines of a table in the log
_FOR_GOOD = 1000  # steps in which a cold cache must pay where there is no other look
_GIB = 1 << 30


@dataclass(frozen=True)
class Rules:
    """What the user grants and wants.

    Attributes:
        applies: ``False``: shards are watched and the choice is reported, and nothing is changed.
        cache_budget_gib: memory of caches on a rank, in GiB.
        strategy: ``exact``, or the paper's ``ratio``.
        warmup_steps: that are watched before a choice.
        reselect_interval: steps from one look to the next; 0: none.
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
        choice: in force (or, where nothing is applied, that would be); ``None`` before the first.
        problem: what there was to choose from.
        reductions: what the gradients of each parameter group cost; empty where they are not
            counted.
        changed: changes of a shard's compression after the first choice.
        watching: share of the time that went into looking at shards, before the last look.
        sampler: that looks at them.

    Args:
        comms: of all parameter groups, gathered by plain FSDP2 at first.
        names: of the parameters to compress.
        sampler: watches the same groups.
        job: the ranks that choose together.
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
        self._comms, self._names, self.sampler, self._job = comms, names, sampler, job
        self._rules, self._ledger, self._scheme = rules, ledger, sampler.scheme
        groups = [comm.group for comm in comms]
        self._device = groups[0].device
        self._labels = _labels(groups)
        self.calibration = calibration.calibrate(groups, CODERS, cache_device=cache_device)
        coder = next(name for name, coder in CODERS.items() if coder == sampler.coder)
        self._hidden = self.calibration.coders[coder].hidden
        self._gradients = GradientSampler(
            dict(zip(self._labels, groups, strict=True)), sampler.coder, job.group
        )
        if ledger is not None:
            ledger.on_gradients = self._gradients
        self._watch = job.new_watch()
        self._meet()
        self.step = 0
        self._steps = 0
        self._late = 0
        self._steps_since_look = 0
        self._seen: dict[str, SampleStats] = {}
        self.problem: list[solver.Group] = []
        self._timed = SampleStats()
        self._coding_scale, self._coded = 1.0, 0.0
        self._link_scales: dict[str, float] = {}
        self.reductions: list[Reduction] = []
        self.choice: solver.Choice | None = None
        self.changed = 0
        self.watching = 0.0
        if self._is_leader:
            self._log("calibrated:\n" + calibration.table(self.calibration))
            self._save("calibration", calibration.as_json(self.calibration))

    def after_step(self) -> None:
        """Watches, and chooses where it is time. Every rank calls it after each step."""
        self.step += 1
        self._steps += 1
        self._steps_since_look += 1
        until_look = self._until_look()
        watches = until_look is not None and (
            not self._rules.applies or until_look <= self._rules.warmup_steps
        )
        if watches or until_look == 0:
            self._come_together()
        if watches:
            self._count(self.sampler.after_step())
            if self.sampler.pieces_a_step:
                self._gradients.make_room(_OF_GRADIENTS * self.sampler.pieces_a_step)
        else:
            self.sampler.pause()
        if until_look is None:
            for comm in self._comms:
                comm.telemetry.plain_seconds.clear()
        if until_look == 0:
            self._look()

    def wait_for_gather(self, group: ParamGroup, work: dist.Work) -> None:
        """Waits for a gather, or raises if a rank waits for this one to end a step instead."""
        next_forward = [] if group.in_backward else [group.process_group.group_name]
        self._job.wait(work, self._watch, self._steps, steps_end=False, groups=next_forward)

    def _come_together(self) -> None:
        """Waits for all ranks at the end of a step; one that skipped it finds that out."""
        if self._device.type == "cpu":
            barrier = dist.barrier(self._job.group, async_op=True)
            names = [comm.group.process_group.group_name for comm in self._comms]
            groups = list(set(names))
            self._job.wait(barrier, self._watch, self._steps, steps_end=True, groups=groups)

    def scalars(self) -> dict[str, float]:
        """For a dashboard; the same on all ranks that hold the same parameters."""
        if self.choice is None:
            return {}
        values = Counter(dict.fromkeys(COMPRESSIONS, 0))
        for group in self.problem:
            chosen = self.choice.compressions.get(group.name, {})
            for shard in group.shards:
                values[chosen.get(shard.name, "none")] += shard.values
        total = max(sum(values.values()), 1)
        scalars = {f"share/{compression}": count / total for compression, count in values.items()}
        scalars |= {
            "plain_seconds": self.choice.plain_seconds,
            "predicted_seconds": self.choice.seconds,
            "cache_bytes": float(self.choice.cache_bytes),
            "changed_shards": float(self.changed),
            "watching": self.watching,
        }
        return {f"narrowcast/selection/{name}": value for name, value in scalars.items()}

    def _until_look(self) -> int | None:
        """Steps until the next look; ``None`` if there is none."""
        warmup, interval = self._rules.warmup_steps + self._late, self._rules.reselect_interval
        if self._steps <= warmup:
            return warmup - self._steps
        return -(self._steps - warmup) % interval if interval else None

    def _meet(self) -> None:
        """Learns what the other ranks hold: their parameters, and the times of their links."""
        links = [self.calibration.links[c.group.process_group.group_name] for c in self._comms]
        params = [list(comm.group.names) for comm in self._comms]
        mine = (self._labels, params, links, replace(self._rules, report=None))
        everyones: list[Any] = [None] * self._job.size()
        dist.all_gather_object(everyones, mine, self._job.group)
        for rank, (*_, rules) in enumerate(everyones):
            if rules != everyones[0][-1]:
                raise SettingsError(
                    f"ranks were given different settings: rank 0 {everyones[0][-1]}, rank {rank} "
                    f"{rules}: give all the same"
                )
        self._all_labels = list(
            dict.fromkeys(label for labels, *_ in everyones for label in labels)
        )
        first: dict[str, int] = {}  # of the ranks that hold the same parameters
        for rank, (labels, names, *_) in enumerate(everyones):
            first.setdefault(repr((labels, names)), rank)
        self._leaders = list(first.values())
        self._leader = first[repr(mine[:2])]
        self._is_leader = self._leader == self._job.group.rank()
        self._all_names = list(
            dict.fromkeys([ALL])
            | dict.fromkeys(
                name for _, groups, *_ in everyones for names in groups for name in names
            )
        )
        self._links = {
            label: max(
                (
                    other_links
                    for labels, _, all_links, _ in everyones
                    for other_label, other_links in zip(labels, all_links, strict=True)
                    if other_label == label
                ),
                key=lambda one: one.all_gather.seconds(1 << 20),
            )
            for label in self._labels
        }

    def _count(self, changes: dict[str, Changes]) -> None:
        """Adds what was seen to the ledger, where nothing else compares."""
        if self._ledger is None:
            return
        counted = self._ledger.current.changes
        plain = {name for c in self._comms if c.schemes is None for name in c.group.names}
        for name in changes.keys() & plain:
            kind = shard_type(name)
            counted[kind] = counted.get(kind, Changes()) + changes[name]

    def _look(self) -> None:
        seen = sum_over_ranks(self.sampler.seen, self._all_names, self._device, self._job.group)
        self.watching = self._watching()
        self.sampler.clear()
        self._gradients.spent = 0.0
        timed, self._timed = self._timed, seen[ALL]
        self._seen |= {name: one for name, one in seen.items() if one.changes.values}
        self._seen[ALL] = timed + self._timed  # of two looks: the time of few pieces says little
        if not any(one.changes.values for one in self._seen.values()):
            if self._late == 0 and self._is_leader:
                self._log(
                    f"nothing was seen of the shards until step {self.step}: a step has less room "
                    "than it takes to look at a piece. The choice comes as soon as one was"
                )
            self._late += 1
            return
        self._coded = self._coding_seconds()
        self._rescale_links()
        self.reductions = self._gradients.reductions(
            self._all_labels, self._links, self._steps_since_look, self._device
        )
        first = self.choice is None
        solved = self._of_leader(self._solve() if self._is_leader else None)
        for comm in self._comms:
            comm.telemetry.gathers.clear()
            comm.telemetry.coding_seconds = 0.0
            comm.telemetry.plain_seconds.clear()
        self._steps_since_look = 0
        if isinstance(solved, str):
            logger.warning("narrowcast: compressions stay as they are: %s", solved)
            return
        before = self._chosen()
        self.problem, self.choice = solved
        after = self._chosen()
        changed = {n: (before[n], after[n]) for n in after if before[n] != after[n]}
        if not first:
            self.changed += len(changed)
        if self._rules.applies:
            self._apply()
        if self._is_leader:
            self._tell(first, changed)

    def _of_leader(self, answer: Any) -> Any:
        """What the leader of the ranks with the same parameters answers, which alone has one."""
        found = None
        for leader in self._leaders:
            answers = [answer if leader == self._leader else None]
            dist.broadcast_object_list(answers, group=self._job.group, group_src=leader)
            if leader == self._leader:
                found = answers[0]
        return found

    def _solve(self) -> tuple[list[solver.Group], solver.Choice] | str:
        """The choice, or why there is none: then compressions stay as they are."""
        try:
            self._rescale()
            problem = self._make_problem(self._coding_scale)
            budget_bytes = int(self._rules.cache_budget_gib * _GIB)
            return problem, solver.choose(
                problem, budget_bytes, self._rules.strategy, solver.MARGIN
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _make_problem(self, scale: float) -> list[solver.Group]:
        sharing = Counter(comm.group.process_group.group_name for comm in self._comms)
        groups = []
        for label, comm in zip(self._labels, self._comms, strict=True):
            links = self._links[label]
            link_scale = self._link_scales.get(label, 1.0)
            links = replace(links, all_gather=links.all_gather.scaled(link_scale))
            gathers = cost_model.merged_times(comm.telemetry.gathers)
            groups.append(
                cost_model.Gathered(
                    label=label,
                    params=comm.group.params,
                    times={s: n / self._steps_since_look for s, n in gathers.items()},
                    links=links,
                    hidden=self._hidden,
                    host=_host_link(self.calibration.host),
                    announce=links.announce / sharing[comm.group.process_group.group_name],
                    compressions={
                        name: scheme.compression for name, scheme in (comm.schemes or {}).items()
                    },
                    compressible=frozenset(self._names),
                )
            )
        horizon = self._rules.reselect_interval or _FOR_GOOD
        return cost_model.problem(groups, self._seen, self._scheme, horizon, scale)

    def _watching(self) -> float:
        """Of the rank that it takes longest."""
        spent = self.sampler.spent + self._gradients.spent
        share = spent / max(self.sampler.elapsed, 1e-9)
        longest = torch.tensor([share], dtype=torch.float64, device=self._device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self._job.group)
        return longest.item()

    def _coding_seconds(self) -> float:
        """What coding took a step since the last look: mean of the ranks with the same parameters
        that code. Where calls return before all is done, on accelerators, it is not known: 0."""
        mine = 0.0
        if self._device.type == "cpu":
            mine = (
                sum(comm.telemetry.coding_seconds for comm in self._comms) / self._steps_since_look
            )
        sums = torch.zeros(self._job.size(), 2, dtype=torch.float64, device=self._device)
        sums[self._leader, 0], sums[self._leader, 1] = mine, mine > 0
        dist.all_reduce(sums, group=self._job.group)
        total, ranks = sums[self._leader].tolist()
        return total / max(ranks, 1)

    def _rescale(self) -> None:
        """Learns from the time that coding took in training, over what the same shards' pieces say
        of it. Where nothing is coded it forgets: a slow moment must not turn all off for good."""
        predicted = 0.0
        for group, comm in zip(self._make_problem(scale=1.0), self._comms, strict=True):
            if comm.schemes is None:
                continue
            for shard in group.shards:
                option = shard.options[comm.schemes[shard.name].compression]
                predicted += option.hashing + option.encoding + option.decoding
            # Heads are packed and read in what is timed as coding.
            num_gathers = sum(comm.telemetry.gathers.values()) / self._steps_since_look
            predicted += num_gathers * self._links[group.name].gather_overhead
        if predicted > 0 and self._coded > 0:
            self._coding_scale = self._coded / predicted
        else:
            self._coding_scale **= 0.5

    def _rescale_links(self) -> None:
        """Learns from the times of plain gathers in training, over what was predicted of them. Of
        the ranks of a gather the one that came last does not wait for any other: it counts. Of
        the process groups that gather the same parameters, the slowest."""
        scales: dict[str, float] = {}
        by_process_group: dict[str, list[int]] = {}
        for index, comm in enumerate(self._comms):
            name = comm.group.process_group.group_name
            by_process_group.setdefault(name, []).append(index)
        for indices in by_process_group.values():
            comms = [self._comms[index] for index in indices]
            seconds = [second for comm in comms for second in comm.telemetry.plain_seconds]
            if not seconds:
                continue
            least = torch.tensor(seconds, dtype=torch.float64, device=self._device)
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=comms[0].group.process_group)
            predicted = sum(
                len(comm.telemetry.plain_seconds)
                * self._links[self._labels[index]].all_gather.seconds(comm.group.shard_bytes)
                for index, comm in zip(indices, comms, strict=True)
            )
            if predicted:
                scales |= {self._labels[i]: least.sum().item() / predicted for i in indices}
        everyones: list[Any] = [None] * self._job.size()
        dist.all_gather_object(everyones, scales, self._job.group)
        for label in self._labels:
            found = [other[label] for other in everyones if label in other]
            if found:
                self._link_scales[label] = max(found)

    def _chosen(self) -> dict[str, str]:
        """By parameter; ``plain`` where its group is."""
        by_group = self.choice.compressions if self.choice is not None else {}
        return {
            name: by_group.get(label, {}).get(name, "plain")
            for label, comm in zip(self._labels, self._comms, strict=True)
            for name in comm.group.names
        }

    def _apply(self) -> None:
        for label, comm in zip(self._labels, self._comms, strict=True):
            chosen = self.choice.compressions.get(label)
            schemes = None
            if chosen is not None:
                schemes = {
                    name: replace(self._scheme, compression=compression)
                    for name, compression in chosen.items()
                }
            if schemes != comm.schemes:
                comm.change_schemes(schemes)

    def _tell(self, first: bool, changed: dict[str, tuple[str, str]]) -> None:
        if first:
            verb = "chosen" if self._rules.applies else "would be chosen (nothing is applied)"
            table = self._table(_SHOWN)
            self._log(f"{verb} after step {self.step}:\n{table}")
        for name, (before, after) in changed.items() if not first else ():
            self._log(f"after step {self.step}: {name}: {before} -> {after}")
        report = {
            "step": self.step,
            "applied": self._rules.applies,
            "warmup_steps": self._rules.warmup_steps,
            "watching_share": self.watching,
            "coding_scale": self._coding_scale,
            "link_scale": sum(self._link_scales.values()) / max(len(self._link_scales), 1),
            "seen": {
                name: {"values": one.changes.values, **one.changes.rates()}
                for name, one in self._seen.items()
                if name != ALL
            },
            "changed": {name: list(both) for name, both in changed.items()},
            "reductions": [asdict(one) for one in self.reductions],
            **solver.as_json(self.problem, self.choice),
        }
        self._save(f"choice-step-{self.step:08}", report)
        if self._rules.report is not None:
            table = self._table(sys.maxsize)
            self._write(f"choice-step-{self.step:08}", ".txt", table + "\n")

    def _table(self, limit: int) -> str:
        table = solver.table(self.problem, self.choice, limit=limit)
        names = self._names & {name for comm in self._comms for name in comm.group.names}
        unseen = names - self._seen.keys()
        if unseen:
            table += (
                f"\n{len(unseen)} of {len(names)} shards were not looked at yet: what was seen of "
                "their kind, or else of all, stands for them."
            )
        if self.reductions:
            table += "\n\n" + gradient_gain.table(self.reductions[:limit])
        return table

    def _log(self, text: str) -> None:
        logger.info("narrowcast: %s", text)

    def _save(self, name: str, content: dict[str, Any]) -> None:
        self._write(name, ".json", json.dumps(content, indent=1, allow_nan=False) + "\n")

    def _write(self, name: str, suffix: str, text: str) -> None:
        """A report is not worth a training run: what cannot be written is only warned of."""
        if self._rules.report is None:
            return
        stage = f"-rank-{self._leader}" if self._leader else ""
        try:
            write_text(self._rules.report / f"{name}{stage}{suffix}", text)
        except OSError as error:
            logger.warning(
                "narrowcast: the report is not written: %s. Give a folder that can be", error
            )
            self._rules = replace(self._rules, report=None)  # said once


def _labels(groups: list[ParamGroup]) -> list[str]:
    """Names of the groups, told apart by their first parameter where several have one name."""
    counts = Counter(group.name for group in groups)
    return [
        group.name if counts[group.name] == 1 else f"{group.name} ({group.names[0]} ..)"
        for group in groups
    ]


def _host_link(host: calibration.HostLink | None) -> tuple[float, float]:
    """Seconds a byte from host memory and to it."""
    if host is None:
        return 0.0, 0.0
    return host.from_host.seconds_per_byte, host.to_host.seconds_per_byte
