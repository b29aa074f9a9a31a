"""Narrows the parameter all-gathers of a model that ``fully_shard`` has sharded."""

import inspect
import logging
import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from narrowcast.agreement import check_no_later_groups, check_settings, modules_of, sharded_groups
from narrowcast.allgather.announcer import Announcer
from narrowcast.allgather.codec import BlockCheck, Compression, ExponentCoding, Scheme
from narrowcast.allgather.comm import NarrowAllGather
from narrowcast.allgather.offload import Prefetcher, host_copies
from narrowcast.attribution import CALLER, counted_as
from narrowcast.autotune.controller import Controller, Rules, Strategy
from narrowcast.autotune.sampling import Sampler
from narrowcast.config import MAX_CHUNK_VALUES
from narrowcast.errors import Job, job_of
from narrowcast.fsdp2 import ParamGroup, is_default
from narrowcast.steps import StepHook
from narrowcast.telemetry.ledger import (
    CountedModel,
    check_volume,
    count_volume,
    uncounted_baseline,
    unwrapped,
)
from narrowcast.util import own_mode
from narrowcast.wire import floats
from narrowcast.wire.coders import find_coder

logger = logging.getLogger(__name__)


Selection = Literal["auto", "observe"]
CacheDevice = Literal["device", "cpu"]


class NarrowedModel:
    """What ``narrow_all_gather`` returns.

    Attributes:
        selection: chooses compressions; ``None`` where the caller gave one.
        ledger: what each step sent; ``None`` if volume is not counted. ``ledger.last`` is the last
            whole step, ``None`` before the first. Steps end with the optimizer's; without one,
            call ``ledger.end_step()`` yourself.
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
                comm.job, comm.announcer = job, announcer
                comm.on_unannounced = self._warn_of_a_change
                comm.plain, comm.group.all_gather = comm.group.all_gather, comm
                if selection is not None and comm.group.device.type == "cpu":
                    comm.waits = partial(selection.wait_for_gather, comm.group)
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
                with uncounted_baseline(self.ledger):
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
        """
        comms = [comm for comm in self._comms if comm.schemes is not None]
        with own_mode():
            for comm, following in zip_longest(comms, comms[1:]):
                comm.prepare(following)

    def reset(self) -> None:
        """Drops every cache, for ranks that have come out of step. Call it on every rank."""
        for comm in self._comms:
            comm.reset()

    @property
    def cache_bytes(self) -> int:
        """Memory that the caches take on this rank, in bytes."""
        return sum(comm.cache_bytes for comm in self._comms)

    def remove(self) -> None:
        """Gives the model back to plain FSDP2, and frees the caches. Call it on every rank."""
        if self._steps is not None:
            self._steps.remove()
        if self.selection is not None and self.ledger is not None:
            self.ledger.on_gradients = None
        for comm in self._comms:
            comm.group.all_gather = comm.plain
        for group in self._guarded:
            group.unguard_reduction()
        self.reset()
        self._comms, self._guarded = [], []  # a second call must not touch what is narrowed again
        if self._counted is not None:
            self._counted.remove()


def narrow_all_gather(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | None = None,
    *,
    compression: Compression | Selection = "auto",
    exponent_coding: ExponentCoding = "delta",
    block_size: int = 512,
    block_check: BlockCheck = "compare",
    entropy_coder: str = "auto",
    verify_interval: int = 0,
    parameters: Sequence[str] = ("*",),
    cache_budget_gib: float = 4.0,
    cache_device: CacheDevice = "device",
    selection: Strategy = "exact",
    warmup_steps: int = 30,
    reselect_interval: int = 100,
    report: str | Path | None = None,
    volume: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> NarrowedModel:
    """Sends fewer bytes in the parameter all-gathers of an FSDP2 model; no bit of them changes.

    Call it on every rank, after ``fully_shard`` and before or between training steps. With
    ``compression = "auto"`` that is every rank of the job, and all take their steps together.

    Args:
        model: a module that ``fully_shard`` was applied to, or several (pipeline stages).
        optimizer: shards are encoded after each of its steps, when all sizes are exchanged at once.
            Of several, the one that steps last. Without it, each gather of a changed shard takes a
            second round, and steps of the ledger end by ``ledger.end_step()``.
        compression: what every receiver keeps of a shard, hence what need not be sent: ``delta``
            (as much memory as the gathered parameters), ``exponent`` (a byte a parameter),
            ``entropy`` (nothing), or ``none``, which sends all. ``auto`` gives each shard the one
            that pays on this link, or leaves it to plain FSDP2; ``observe`` only reports what that
            would be.
        exponent_coding: of ``exponent``: the coded ``delta`` of exponents, or the exponents
            of changed ``blocks``, as in the CIERA paper.
        block_size: values a block.
        block_check: of ``blocks``: ``compare`` with the exponents last sent, or their 128-bit
            ``hash``, for which the sender keeps 16 bytes a block.
        entropy_coder: entropy coder: ``auto`` or ``zstd``.
        verify_interval: every how many gathers of a parameter group all ranks compare checksums of
            what was rebuilt; 0: never.
        parameters: patterns (``fnmatch``) of the names of the parameters to compress; others go
            raw.
        cache_budget_gib: of ``auto``: memory in GiB that a rank may keep; a hard limit.
        cache_device: where it is cached: on the ``device``, or in pinned memory of the ``cpu``.
        selection: of ``auto``: the ``exact`` choice under the budget, or the paper's: by ``ratio``
            of gain to memory.
        warmup_steps: of ``auto``: steps of plain FSDP2 that are watched before the choice.
        reselect_interval: of ``auto``: steps from one look at the choice to the next; 0: none.
        report: folder for what ``auto`` and ``observe`` measured and chose, as tables and JSON.
        volume: whether to count the bytes of all collectives, in the handle's ``ledger``.
        process_group: the ranks that make this call, each for its part of the model; ``None``: all.
            What one of them cannot go on from, all of them raise.

    Raises:
        ValueError: an argument is not allowed, or the model cannot be narrowed; on every rank.
        SettingsError: the ranks were given different arguments or models.
    """
    settings = {
        "compression": compression,
        "exponent_coding": exponent_coding,
        "block_size": block_size,
        "block_check": block_check,
        "entropy_coder": entropy_coder,
        "verify_interval": verify_interval,
        "parameters": list(parameters) if isinstance(parameters, list | tuple) else parameters,
        "cache_budget_gib": cache_budget_gib,
        "cache_device": cache_device,
        "selection": selection,
        "warmup_steps": warmup_steps,
        "reselect_interval": reselect_interval,
        "volume": volume,
    }
    groups: list[ParamGroup] = []
    error = None
    try:
        groups = sharded_groups(model)
        schemes = _check(groups, optimizer, settings)
        if not isinstance(report, str | Path | None):
            raise ValueError(f"report = {report!r}; allowed: a path, or None")
    except ValueError as wrong:
        error = wrong
    check_settings(groups, settings, error, process_group)
    job = job_of(process_group)
    counted = count_volume(groups, optimizer) if volume else None
    ledger = counted.ledger if counted else None
    chooses = compression in get_args(Selection)
    copies, prefetcher = host_copies(groups[0].device, cache_device), Prefetcher()
    comms = [
        NarrowAllGather(
            group,
            None if chooses else schemes,
            find_coder(entropy_coder),
            verify_interval,
            ledger,
            copies=copies,
            prefetcher=prefetcher,
        )
        for group in groups
        if compression == "none" or any(schemes[name].compression != "none" for name in group.names)
    ]
    controller = None
    if chooses:
        compressed = {name for name, scheme in schemes.items() if scheme.compression != "none"}
        with job.together("narrow_all_gather"), counted_as(CALLER):
            controller = Controller(
                comms,
                compressed,
                Sampler(
                    [comm.group for comm in comms],
                    compressed,
                    exponent_coding=exponent_coding,
                    block_size=block_size,
                    block_check=block_check,
                    coder=find_coder(entropy_coder),
                    counts=volume,
                    job=job.group,
                ),
                Rules(
                    applies=compression == "auto",
                    cache_budget_gib=cache_budget_gib,
                    strategy=selection,
                    warmup_steps=warmup_steps,
                    reselect_interval=reselect_interval,
                    report=None if report is None else Path(report),
                ),
                ledger,
                cache_device,
                job,
            )
    return NarrowedModel(modules_of(model), groups, comms, optimizer, counted, controller, job)


def _check(groups: list[ParamGroup], optimizer: Any, settings: dict[str, Any]) -> dict[str, Scheme]:
    """Each parameter's scheme.

    Raises:
        ValueError: a setting is not allowed, or the model has another custom all-gather.
    """
    for name, choices in _CHOICES.items():
        if settings[name] not in choices:
            allowed = ", ".join(map(repr, choices))
            raise ValueError(f"{name} = {settings[name]!r}; allowed: {allowed}")
    for name, (least, most, allowed) in _NUMBERS.items():
        value = settings[name]
        if type(value) is not int or value < least or (most is not None and value > most):
            raise ValueError(f"{name} = {value!r}; allowed: {allowed}")
    budget = settings["cache_budget_gib"]
    if type(budget) not in (int, float) or not 0 <= budget < math.inf:
        raise ValueError(f"cache_budget_gib = {budget!r}; allowed: a number of at least 0")
    if settings["compression"] not in get_args(Selection):
        defaults = inspect.signature(narrow_all_gather).parameters
        for name in ("cache_budget_gib", "selection", "warmup_steps", "reselect_interval"):
            if settings[name] != defaults[name].default:
                raise ValueError(
                    f"{name} = {settings[name]!r}: works with compression = 'auto' or 'observe', "
                    f"not {settings['compression']!r}: leave it out"
                )
    if settings["compression"] in get_args(Selection) and optimizer is None:
        raise ValueError(
            f"compression = {settings['compression']!r} without an optimizer, after whose steps "
            "shards are looked at: give narrow_all_gather the optimizer, or another compression"
        )
    check_volume(groups, optimizer, settings["volume"])
    find_coder(settings["entropy_coder"])
    _check_plain(groups)
    patterns = settings["parameters"]
    if not isinstance(patterns, list | tuple) or not all(isinstance(p, str) for p in patterns):
        raise ValueError(f"parameters = {patterns!r}; allowed: a list of patterns")
    names = [name for group in groups for name in group.names]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            logger.warning("narrowcast: parameters pattern %r matches no parameter", pattern)
    compressed = {name for name in names if any(fnmatch(name, pattern) for pattern in patterns)}
    coded = {p.name for group in groups for p in group.params if p.dtype in floats.LAYOUTS}
    if settings["compression"] in get_args(Selection) and compressed and not compressed & coded:
        allowed = ", ".join(map(str, floats.LAYOUTS))
        raise ValueError(
            f"parameters = {patterns!r} matches parameters of other dtypes than {allowed} alone: "
            f"there is nothing to choose for compression = {settings['compression']!r}"
        )
    if not compressed:
        raise ValueError(
            f"parameters = {patterns!r} matches none of the model's parameters, such as "
            f"{names[0]!r}"
        )
    compression = settings["compression"]
    scheme = Scheme(
        "delta" if compression in get_args(Selection) else compression,
        settings["exponent_coding"],
        settings["block_size"],
        settings["block_check"],
    )
    return {name: scheme if name in compressed else Scheme("none") for name in names}


_CHOICES = {
    "compression": (*get_args(Selection), *get_args(Compression)),
    "exponent_coding": get_args(ExponentCoding),
    "block_check": get_args(BlockCheck),
    "cache_device": get_args(CacheDevice),
    "selection": get_args(Strategy),
}
# The least and the most that is allowed, and both in words.
_NUMBERS = {
    "block_size": (1, MAX_CHUNK_VALUES, f"1 to {MAX_CHUNK_VALUES}"),
    "verify_interval": (0, None, "0 (never) and more"),
    "warmup_steps": (3, None, "3 and more"),
    "reselect_interval": (0, None, "0 (never) and more"),
}


def _check_plain(groups: list[ParamGroup]) -> None:
    for group in groups:
        comm = unwrapped(group.all_gather)
        if isinstance(comm, NarrowAllGather):
            raise ValueError("the model is narrowed already: call remove() of its handle first")
        if not is_default(comm):
            raise ValueError(
                f"{group.name} has a {type(comm).__name__} as its all-gather, which "
                "narrowcast would replace. Leave out set_custom_all_gather, set_symm_mem_for_comm "
                "and set_allocate_memory_from_process_group_for_comm"
            )
