"""Narrows the parameter all-gathers of a model that ``fully_shard`` has sharded."""

import logging
from collections.abc import Iterable
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from itertools import zip_longest
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
from narrowcast.allgather.announcer import Announcer
from narrowcast.allgather.codec import Scheme
from narrowcast.allgather.comm import NarrowAllGather
from narrowcast.allgather.offload import Prefetcher, host_copies
from narrowcast.attribution import counted_by_caller
from narrowcast.autotune import host_coder
from narrowcast.autotune.controller import Controller, Rules
from narrowcast.autotune.sampling import Sampler
from narrowcast.autotune.step_barrier import wait_for_gather
from narrowcast.config import AllGatherConfig, TopologyConfig
from narrowcast.errors import Job, job_of
from narrowcast.fsdp2 import ParamGroup, is_default
from narrowcast.section import takes_settings_of
from narrowcast.steps import StepHook
from narrowcast.telemetry.counted import CountedModel, check_volume, count_volume, uncounted
from narrowcast.telemetry.ledger import beyond_baseline
from narrowcast.telemetry.narrowed import GatherTelemetry
from narrowcast.topology import Topology
from narrowcast.util import own_mode
from narrowcast.wire import floats
from narrowcast.wire.coders import find_coder

logger = logging.getLogger(__name__)


class NarrowedModel:
    """What ``narrow_all_gather`` returns.

    Attributes:
        selection: chooses compressions; ``None`` where the caller gave one, and where ``auto``
            leaves baseline FSDP2 in place, since no entropy coder runs on the device.
        ledger: what each step sent; ``None`` if volume is not counted. ``ledger.last`` is the last
            whole step, ``None`` before the first. Steps end with the optimizer's; without one,
            call ``ledger.end_step()`` yourself. Rates of change and shares of zero gradients are
            counted every ``ledger.sample_interval`` steps, which you may set (10; 0: never).
    """

    def __init__(
        self,
        models: list[nn.Module],
        groups: list[ParamGroup],
        comms: list[NarrowAllGather],
        optimizer: Optimizer | None,
        counted: CountedModel | None,
        selection: Controller | None,
        job: Job,
    ) -> None:
        self.selection = selection
        self.ledger = counted.ledger if counted else None
        self._models, self._groups = models, groups
        self._is_used = False
        self._counted = counted
        self._comms, self._job = comms, job
        self._steps: StepHook | None = None
        self._warned = optimizer is None  # of changes that no step announced
        sharing: dict[dist.ProcessGroup, list[NarrowAllGather]] = {}
        for comm in comms:
            sharing.setdefault(comm.group.process_group, []).append(comm)
        self._spans_job = all(group.size() == job.size() for group in sharing)
        for same in sharing.values():
            announcer = Announcer(same, self._before_forward)
            for comm in same:
                comm.job, comm.before = job, announcer.before
                comm.on_unannounced = self._warn_of_a_change
                comm.plain, comm.group.all_gather = comm.group.all_gather, comm
                if comm.group.device.type == "cpu":
                    comm.wait = partial(wait_for_gather, job, comm.group)
        self._guarded = [
            comm.group
            for comm in comms
            if comm.group.guard_reduction(partial(job.together, f"backward of {comm.group.name}"))
        ]
        if optimizer is not None:
            groups = [comm.group for comm in comms]
            self._steps = StepHook(optimizer, groups, self._after_step)

    def _after_step(self) -> None:
        with self._job.together("the end of a step of the optimizer"):
            if not self._spans_job:
                self._job.check()
            if self.ledger is not None and self.ledger.last is not None:
                self.ledger.last.cache_bytes = self.cache_bytes
            if self.selection is not None:
                with beyond_baseline(self.ledger):
                    self.selection.after_step()
            self.refresh()

    def _before_forward(self) -> None:
        """Before the first gather of a forward in a process group."""
        if not self._is_used:
            check_no_later_groups(self._models, self._groups, "narrow_all_gather")
            self._is_used = True
        if self.ledger is not None:
            self.ledger.catch_up()
        if self._steps is not None and self._steps.missed():
            self.refresh()

    def _warn_of_a_change(self, comm: NarrowAllGather) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "narrowcast: parameters of %s have changed since they were encoded, without a step "
                "of the optimizer that narrow_all_gather was given: that costs a second round of "
                "the gather. Give it the optimizer that steps last, or call refresh() of the "
                "handle after other changes (a loaded checkpoint, averaged weights)",
                comm.group.name,
            )

    def refresh(self) -> None:
        """Encodes all shards now; sizes are exchanged before the next forward's first gather, all
        in one small collective a process group.

        Runs by itself after each step of the optimizer. Call it after parameters changed otherwise
        (a checkpoint was loaded), if you like: a change that nobody announced is noticed when the
        shard is gathered, and costs what was announced and, in a second round, all payloads again.
        Nothing happens after ``remove``.

        Raises:
            NarrowcastError: on every rank alike, if it fails on one.
        """
        comms = [comm for comm in self._comms if comm.schemes is not None]
        with self._job.together("refresh()"), own_mode():
            for comm, following in zip_longest(comms, comms[1:]):
                comm.prepare(following)

    def reset(self) -> None:
        """Drops every cache, for ranks that have come out of step. Call it on every rank. Nothing
        happens after ``remove``.
        """
        for comm in self._comms:
            comm.reset()

    @property
    def cache_bytes(self) -> int:
        """Memory that the caches take on this rank, in bytes."""
        return sum(comm.cache_bytes for comm in self._comms)

    @property
    def is_baseline(self) -> bool:
        """Whether everything is left to baseline FSDP2, now and later: no coder runs on the device,
        or all ranks are on one node."""
        return not self._comms

    def remove(self) -> None:
        """Gives the model back to baseline FSDP2, and frees the caches. Call it on every rank."""
        if self._steps is not None:
            self._steps.remove()
        if self.selection is not None:
            self.selection.remove()
        for comm in self._comms:
            comm.group.all_gather = comm.plain
        for group in self._guarded:
            group.unguard_reduction()
        self.reset()
        self._comms, self._guarded = [], []  # a second call must not touch what is narrowed again
        if self._counted is not None:
            self._counted.remove()


@takes_settings_of(AllGatherConfig, left_out=("enable",))
def narrow_all_gather(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | None = None,
    *,
    report: str | Path | None = None,
    volume: bool = True,
    process_group: dist.ProcessGroup | None = None,
    ranks_per_node: int | str = "auto",
    **settings: Any,
) -> NarrowedModel:
    """Sends fewer bytes in the parameter all-gathers of an FSDP2 model; no bit of them changes.

    Call it on every rank, after ``fully_shard`` and before or between training steps. With
    ``compression = "auto"`` that is every rank of the job, and all take their steps together.

    Args:
        model: A module that ``fully_shard`` was applied to, or several (pipeline stages).
        optimizer: Shards are encoded after each of its steps, and all sizes are exchanged at once.
            Of several optimizers, the one that steps last. Without it, each gather of a changed
            shard takes a second round, and steps of the ledger end by ``ledger.end_step()``.
        report: Folder for what ``auto`` and ``observe`` measured and chose, as tables and JSON.
        volume: Whether to count the bytes of all collectives, in the handle's ``ledger``.
        process_group: The ranks that make this call, each for its part of the model; ``None``
            stands for all. What one of them cannot go on from, all of them raise.
        ranks_per_node: Consecutive ranks of the job on each node, where they share its link to the
            others: payloads cross between nodes, and within a node nothing is compressed. "auto":
            LOCAL_WORLD_SIZE, as torchrun sets it. 1: every rank has a link of its own.
        settings: The keys of ``narrowcast.config.AllGatherConfig``; see below.

    Raises:
        ValueError: An argument is not allowed, or the model cannot be narrowed; on every rank,
            but for a ``process_group`` that is none.
        SettingsError: The ranks were given different arguments or models.
    """
    check_process_group(process_group)
    groups: list[ParamGroup] = []
    config, schemes, error = AllGatherConfig(), {}, None
    try:
        config = AllGatherConfig.of(settings)
        TopologyConfig.of({"ranks_per_node": ranks_per_node})
        groups = sharded_groups(model)
        schemes = _schemes_of(groups, optimizer, config)
        check_volume(groups, optimizer, volume)
        if not isinstance(report, str | Path | None):
            raise ValueError(f"report = {report!r}: must be a path, or None")
    except ValueError as wrong:
        error = wrong
    agreed = {**asdict(config), "volume": volume, "ranks_per_node": ranks_per_node}
    agreed["optimizer"] = "none" if optimizer is None else "given"
    check_settings(groups, agreed, error, process_group)
    job = job_of(process_group)
    topology = topology_of(groups, ranks_per_node, process_group)
    far = groups_between_nodes(groups, topology, "all-gather", warns=not config.chooses)
    counted = count_volume(groups, optimizer, topology) if volume else None
    comms = []
    if far and not _is_left_plain(far, config):
        comms = _comms_of(far, schemes, config, counted, topology)
    controller = None
    if config.chooses and comms:
        compressed = {n for n, scheme in schemes.items() if scheme.compression != "none"}
        folder = None if report is None else Path(report)
        with job.together("narrow_all_gather"), counted_by_caller():
            controller = _controller_of(comms, compressed, config, counted, folder, job)
    return NarrowedModel(modules_of(model), groups, comms, optimizer, counted, controller, job)


def _is_left_plain(groups: list[ParamGroup], config: AllGatherConfig) -> bool:
    """Whether ``auto`` leaves baseline FSDP2 in place, since no entropy coder runs on the device.
    A fixed compression that needs the coder then warns of its cost."""
    coder = find_coder(config.entropy_coder)
    if config.compression == "auto":
        return host_coder.leaves_plain(groups, coder, "all-gather", force=config.force)
    if config.compression not in ("observe", "none"):
        host_coder.warn_of_cost(
            groups,
            coder,
            "all-gather",
            encoded=sum(sum(group.numels) for group in groups),
            decoded=sum(sum(group.numels) * group.process_group.size() for group in groups),
            force=config.force,
        )
    return False


def _comms_of(
    groups: list[ParamGroup],
    schemes: dict[str, Scheme],
    config: AllGatherConfig,
    counted: CountedModel | None,
    topology: Topology,
) -> list[NarrowAllGather]:
    """The all-gathers of all parameter groups of which anything is to be compressed."""
    copies, prefetcher = host_copies(groups[0].device, config.cache_device), Prefetcher()
    return [
        NarrowAllGather(
            group,
            None if config.chooses else schemes,
            find_coder(config.entropy_coder),
            config.verify_interval,
            GatherTelemetry(counted.ledger if counted else None),
            topology,
            copies=copies,
            prefetcher=prefetcher,
        )
        for group in groups
        if config.compression == "none"
        or any(schemes[name].compression != "none" for name in group.names)
    ]


def _controller_of(
    comms: list[NarrowAllGather],
    compressed: set[str],
    config: AllGatherConfig,
    counted: CountedModel | None,
    report: Path | None,
    job: Job,
) -> Controller:
    """What chooses the compressions of these parameters."""
    sampler = Sampler(
        [comm.group for comm in comms],
        compressed,
        exponent_coding=config.exponent_coding,
        block_size=config.block_size,
        block_check=config.block_check,
        coder=find_coder(config.entropy_coder),
        job=job.group,
    )
    rules = Rules(
        applies=config.compression == "auto",
        cache_budget_gib=config.cache_budget_gib,
        strategy=config.selection,
        warmup_steps=config.warmup_steps,
        reselect_interval=config.reselect_interval,
        report=report,
    )
    ledger = counted.ledger if counted else None
    return Controller(comms, compressed, sampler, rules, ledger, config.cache_device, job)


def _schemes_of(
    groups: list[ParamGroup], optimizer: Optimizer | None, config: AllGatherConfig
) -> dict[str, Scheme]:
    """Each parameter's scheme.

    Raises:
        ValueError: The model cannot be narrowed as the settings ask for.
    """
    if config.chooses and optimizer is None:
        raise ValueError(
            f'compression = "{config.compression}" without an optimizer, after whose steps shards '
            "are sampled: give narrow_all_gather the optimizer, or another compression"
        )
    _check_plain(groups)
    names = [name for group in groups for name in group.names]
    for pattern in config.parameters:
        if not any(fnmatch(name, pattern) for name in names):
            logger.warning("narrowcast: parameters pattern %r matches no parameter", pattern)
    compressed = {n for n in names if any(fnmatch(n, pattern) for pattern in config.parameters)}
    if not compressed:
        raise ValueError(
            f"parameters = {config.parameters!r} matches none of the model's parameters, such as "
            f"{names[0]!r}"
        )
    coded = {p.name for group in groups for p in group.params if p.dtype in floats.LAYOUTS}
    if config.chooses and not compressed & coded:
        allowed = ", ".join(map(str, floats.LAYOUTS))
        raise ValueError(
            f"parameters = {config.parameters!r} matches parameters of other dtypes than {allowed} "
            f'alone: there is nothing to choose for compression = "{config.compression}"'
        )
    scheme = Scheme(
        "delta" if config.chooses else config.compression,
        config.exponent_coding,
        config.block_size,
        config.block_check,
    )
    return {name: scheme if name in compressed else Scheme("none") for name in names}


def _check_plain(groups: list[ParamGroup]) -> None:
    for group in groups:
        comm = uncounted(group.all_gather)
        if isinstance(comm, NarrowAllGather):
            raise ValueError("the model is narrowed already: call remove() of its handle first")
        if not is_default(comm):
            raise ValueError(
                f"{group.name} has a {type(comm).__name__} as its all-gather, which "
                "narrowcast would replace. Leave out set_custom_all_gather, set_symm_mem_for_comm "
                "and set_allocate_memory_from_process_group_for_comm"
            )
