"""Narrows the gradient reduce-scatters of a model that ``fully_shard`` has sharded."""

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from narrowcast.agreement import check_no_later_groups, check_settings, modules_of, sharded_groups
from narrowcast.config import ReduceScatterConfig, takes_settings_of
from narrowcast.errors import Job, job_of
from narrowcast.fsdp2 import ParamGroup, is_default
from narrowcast.reducescatter.comm import NarrowReduceScatter
from narrowcast.telemetry.counted import CountedModel, check_volume, count_volume, uncounted
from narrowcast.telemetry.narrowed import ReductionTelemetry
from narrowcast.wire.coders import find_coder


class NarrowedGradients:
    """What ``narrow_reduce_scatter`` returns.

    Attributes:
        ledger: what each step sent; ``None`` if volume is not counted. That of ``NarrowedModel``,
            where the model's all-gathers are narrowed too.
    """

    def __init__(
        self,
        models: list[nn.Module],
        comms: list[NarrowReduceScatter],
        counted: CountedModel | None,
        job: Job,
    ) -> None:
        self._models: list[nn.Module] | None = models  # until they are first used
        self._groups = [comm.group for comm in comms]
        self.ledger = counted.ledger if counted else None
        self._counted = counted
        self._replaced = [(comm.group, comm.group.reduce_scatter) for comm in comms]
        self._guarded: list[ParamGroup] = []
        for comm in comms:
            comm.group.reduce_scatter, comm.before = comm, self._before_reduction
            if comm.group.guard_reduction(partial(job.together, f"backward of {comm.group.name}")):
                self._guarded.append(comm.group)

    def _before_reduction(self) -> None:
        if self._models is not None:
            check_no_later_groups(self._models, self._groups, "narrow_reduce_scatter")
            self._models = None

    def remove(self) -> None:
        """Gives the model back its own reduce-scatters. Call it on every rank."""
        for group, replaced in self._replaced:
            group.reduce_scatter = replaced
        for group in self._guarded:
            group.unguard_reduction()
        self._replaced, self._guarded = [], []  # a second call leaves a later handle alone
        if self._counted is not None:
            self._counted.remove()


@takes_settings_of(ReduceScatterConfig, left_out=("enable",))
def narrow_reduce_scatter(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | None = None,
    *,
    volume: bool = True,
    process_group: dist.ProcessGroup | None = None,
    **settings: Any,
) -> NarrowedGradients:
    """Sends fewer bytes in the gradient reduce-scatters of an FSDP2 model.

    Every rank's contribution arrives at its owner bitwise identical. The owner sums them in the
    order of the ranks, in FSDP2's reduce dtype, so that a run repeats bit for bit whatever the
    backend's algorithm. At two ranks the sum is bitwise identical to baseline FSDP2's; at more it
    is where the backend sums in that order, and elsewhere it differs as two orders of one sum do.

    Call it on every rank, after ``fully_shard`` and before or between training steps; before or
    after ``narrow_all_gather``, or without it.

    Args:
        model: A module that ``fully_shard`` was applied to, or several (pipeline stages).
        optimizer: Steps of the ledger end with each of its steps. Not needed where
            ``narrow_all_gather`` was given it.
        volume: Whether to count the bytes of all collectives, in the handle's ``ledger``.
        process_group: The ranks that make this call, each for its part of the model; ``None``
            stands for all. What one of them cannot go on from, all of them raise.
        settings: The keys of ``narrowcast.config.ReduceScatterConfig``; see below.

    Raises:
        ValueError: An argument is not allowed, or the model cannot be narrowed; on every rank.
        SettingsError: The ranks were given different arguments or models.
    """
    groups: list[ParamGroup] = []
    config, error = ReduceScatterConfig(), None
    try:
        config = ReduceScatterConfig.of(settings)
        groups = sharded_groups(model)
        check_volume(groups, optimizer, volume)
        _check_plain(groups)
    except ValueError as wrong:
        error = wrong
    check_settings(groups, {**asdict(config), "volume": volume}, error, process_group)
    job = job_of(process_group)
    counted = count_volume(groups, optimizer) if volume else None
    ledger = counted.ledger if counted else None
    coder = find_coder(config.entropy_coder)
    comms = [
        NarrowReduceScatter(group, config.compression, coder, ReductionTelemetry(ledger), job)
        for group in groups
    ]
    return NarrowedGradients(modules_of(model), comms, counted, job)


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
