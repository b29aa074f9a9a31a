"""Narrows the gradient reduce-scatters of a model that ``fully_shard`` has sharded."""

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from narrowcast.agreement import (
    check_no_later_groups,
    check_process_group,
    check_settings,
    groups_between_nodes,
    modules_of,
    sharded_groups,
    topology_of,
)
from narrowcast.attribution import counted_by_caller
from narrowcast.autotune import host_coder
from narrowcast.autotune.gradient_controller import GradientController
from narrowcast.config import ReduceScatterConfig, TopologyConfig
from narrowcast.errors import Job, job_of
from narrowcast.fsdp2 import ParamGroup, is_default
from narrowcast.reducescatter.comm import NarrowReduceScatter
from narrowcast.section import takes_settings_of
from narrowcast.steps import StepHook
from narrowcast.telemetry.counted import CountedModel, check_volume, count_volume, uncounted
from narrowcast.telemetry.ledger import beyond_baseline
from narrowcast.telemetry.narrowed import ReductionTelemetry
from narrowcast.topology import Topology
from narrowcast.wire.coders import find_coder


class NarrowedGradients:
    """What ``narrow_reduce_scatter`` returns.

    Attributes:
        selection: chooses compressions; ``None`` where the caller gave one, and where ``auto``
            leaves baseline FSDP2 in place, since no entropy coder runs on the device.
        ledger: what each step sent; ``None`` if volume is not counted. That of ``NarrowedModel``,
            where the model's all-gathers are narrowed too.
    """

    def __init__(
        self,
        models: list[nn.Module],
        comms: list[NarrowReduceScatter],
        optimizer: Optimizer | None,
        counted: CountedModel | None,
        selection: GradientController | None,
        job: Job,
    ) -> None:
        self.selection, self._job = selection, job
        self._models: list[nn.Module] | None = models  # until they are first used
        self._groups = [comm.group for comm in comms]
        self.ledger = counted.ledger if counted else None
        self._counted = counted
        self._comms = comms
        self._guarded: list[ParamGroup] = []
        for comm in comms:
            comm.plain, comm.before = comm.group.reduce_scatter, self._before_reduction
            comm.group.reduce_scatter = comm
            if comm.group.guard_reduction(partial(job.together, f"backward of {comm.group.name}")):
                self._guarded.append(comm.group)
        self._steps: StepHook | None = None
        if selection is not None:
            assert optimizer is not None
            self._steps = StepHook(optimizer, self._groups, self._after_step)

    def _after_step(self) -> None:
        assert self.selection is not None
        with (
            self._job.together("the end of a step of the optimizer"),
            beyond_baseline(self.ledger),
        ):
            self.selection.after_step()

    def _before_reduction(self) -> None:
        if self._models is not None:
            check_no_later_groups(self._models, self._groups, "narrow_reduce_scatter")
            self._models = None

    @property
    def is_baseline(self) -> bool:
        """Whether everything is left to baseline FSDP2, now and later: no coder runs on the device,
        or all ranks are on one node."""
        return not self._comms

    def remove(self) -> None:
        """Gives the model back its own reduce-scatters. Call it on every rank."""
        if self._steps is not None:
            self._steps.remove()
        if self.selection is not None:
            self.selection.remove()
        for comm in self._comms:
            assert comm.plain is not None
            comm.group.reduce_scatter = comm.plain
        for group in self._guarded:
            group.unguard_reduction()
        self._comms, self._guarded = [], []  # a second call leaves a later handle alone
        if self._counted is not None:
            self._counted.remove()


@takes_settings_of(ReduceScatterConfig, left_out=("enable",))
def narrow_reduce_scatter(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | None = None,
    *,
    report: str | Path | None = None,
    volume: bool = True,
    process_group: dist.ProcessGroup | None = None,
    ranks_per_node: int | str = "auto",
    **settings: Any,
) -> NarrowedGradients:
    """Sends fewer bytes in the gradient reduce-scatters of an FSDP2 model.

    With ``compression = "auto"`` it does so for the parameter groups for which that is predicted to
    reduce step time, and leaves the others to baseline FSDP2. Where gradients are compressed, every
    rank's contribution arrives at its owner bitwise identical. The owner sums them in the
    order of the ranks, in FSDP2's reduce dtype, so that a run repeats bit for bit whatever the
    backend's algorithm. At two ranks the sum is bitwise identical to baseline FSDP2's; at more it
    is where the backend sums in that order, and elsewhere it differs as two orders of one sum do.

    Call it on every rank, after ``fully_shard`` and before or between training steps; before or
    after ``narrow_all_gather``, or without it. With ``compression = "auto"`` that is every rank of
    the job, and all take their steps together.

    Args:
        model: A module that ``fully_shard`` was applied to, or several (pipeline stages).
        optimizer: Steps of the ledger end with each of its steps, and so do those that ``auto``
            counts. Of several, the one that steps last. Needed for ``auto``. Without it, and
            unless ``narrow_all_gather`` was given it, steps of the ledger end by
            ``ledger.end_step()``.
        report: Folder for what ``auto`` predicted and chose, as JSON.
        volume: Whether to count the bytes of all collectives, in the handle's ``ledger``.
        process_group: The ranks that make this call, each for its part of the model; ``None``
            stands for all. What one of them cannot go on from, all of them raise.
        ranks_per_node: Consecutive ranks of the job on each node, where they share its link to the
            others: payloads cross between nodes, and within a node nothing is compressed. "auto":
            LOCAL_WORLD_SIZE, as torchrun sets it. 1: every rank has a link of its own.
        settings: The keys of ``narrowcast.config.ReduceScatterConfig``; see below.

    Raises:
        ValueError: An argument is not allowed, or the model cannot be narrowed; on every rank,
            but for a ``process_group`` that is none.
        SettingsError: The ranks were given different arguments or models.
    """
    check_process_group(process_group)
    groups: list[ParamGroup] = []
    config, error = ReduceScatterConfig(), None
    try:
        config = ReduceScatterConfig.of(settings)
        TopologyConfig.of({"ranks_per_node": ranks_per_node})
        groups = sharded_groups(model)
        check_volume(groups, optimizer, volume)
        _check_plain(groups)
        if config.chooses and optimizer is None:
            raise ValueError(
                'compression = "auto" without an optimizer, after whose steps gradients are '
                "sampled: give narrow_reduce_scatter the optimizer, or another compression"
            )
        if not isinstance(report, str | Path | None):
            raise ValueError(f"report = {report!r}: must be a path, or None")
    except ValueError as wrong:
        error = wrong
    agreed = {**asdict(config), "volume": volume, "ranks_per_node": ranks_per_node}
    agreed["optimizer"] = "none" if optimizer is None else "given"
    check_settings(groups, agreed, error, process_group)
    job = job_of(process_group)
    topology = topology_of(groups, ranks_per_node, process_group)
    far = groups_between_nodes(groups, topology, "reduce-scatter", warns=not config.chooses)
    counted = count_volume(groups, optimizer, topology) if volume else None
    comms = []
    if far and not _is_left_plain(far, config):
        comms = _comms_of(far, config, counted, job, topology)
    selection = None
    if config.chooses and comms:
        folder = None if report is None else Path(report)
        with job.together("narrow_reduce_scatter"), counted_by_caller():
            selection = GradientController(
                comms,
                find_coder(config.entropy_coder),
                config.warmup_steps,
                config.reselect_interval,
                folder,
                job,
            )
    return NarrowedGradients(modules_of(model), comms, optimizer, counted, selection, job)


def _is_left_plain(groups: list[ParamGroup], config: ReduceScatterConfig) -> bool:
    """Whether ``auto`` leaves baseline FSDP2 in place, since no entropy coder runs on the device.
    A fixed compression that needs the coder then warns of its cost."""
    coder = find_coder(config.entropy_coder)
    if config.compression == "auto":
        return host_coder.leaves_plain(groups, coder, "reduce-scatter", force=config.force)
    if config.compression == "entropy":
        others = sum(sum(group.numels) * (group.process_group.size() - 1) for group in groups)
        host_coder.warn_of_cost(
            groups, coder, "reduce-scatter", encoded=others, decoded=others, force=config.force
        )
    return False


def _comms_of(
    groups: list[ParamGroup],
    config: ReduceScatterConfig,
    counted: CountedModel | None,
    job: Job,
    topology: Topology,
) -> list[NarrowReduceScatter]:
    return [
        NarrowReduceScatter(
            group,
            None if config.compression == "auto" else config.compression,
            find_coder(config.entropy_coder),
            ReductionTelemetry(counted.ledger if counted else None),
            job,
            topology,
        )
        for group in groups
    ]


def _check_plain(groups: list[ParamGroup]) -> None:
    for group in groups:
        comm = uncounted(group.reduce_scatter)
        if isinstance(comm, NarrowReduceScatter):
            raise ValueError(
                "the model's gradients are narrowed already: call remove() of their handle first"
            )
        if not is_default(comm):
            raise ValueError(
                f"{group.name} has a {type(comm).__name__} as its reduce-scatter, which narrowcast "
                "would replace. Leave out set_custom_reduce_scatter, set_symm_mem_for_comm and "
                "set_allocate_memory_from_process_group_for_comm"
            )
