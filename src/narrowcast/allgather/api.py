"""Narrows the parameter all-gathers of a model that ``fully_shard`` has sharded."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from fnmatch import fnmatch
from typing import Any, get_args

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from narrowcast.agreement import check_settings, sharded_groups
from narrowcast.allgather.codec import BlockCheck, ExponentExchange, Scheme, Treatment
from narrowcast.allgather.coders import find_coder
from narrowcast.allgather.comm import MAX_RUN_VALUES, NarrowAllGather
from narrowcast.allgather.exchange import largest_sizes
from narrowcast.torch_internals import ParamGroup, is_default
from narrowcast.volume import (
    CountedModel,
    all_reduce_bytes,
    check_volume,
    count_volume,
    uncounted,
)

logger = logging.getLogger(__name__)


class NarrowedModel:
    """What ``narrow_all_gather`` returns.

    Attributes:
        ledger: what each step sent; ``None`` if volume is not counted. ``ledger.last`` is the last
            whole step, ``None`` before the first. Steps end with the optimizer's; without one,
            call ``ledger.end_step()`` yourself.
    """

    def __init__(
        self,
        comms: list[NarrowAllGather],
        optimizer: Optimizer | None,
        counted: CountedModel | None,
    ) -> None:
        self.ledger = counted.ledger if counted else None
        self._counted = counted
        self._comms = comms
        self._replaced = [comm.group.all_gather for comm in comms]
        for comm in comms:
            comm.group.all_gather = comm
        self._hook: RemovableHandle | None = None
        if optimizer is not None:
            self._hook = optimizer.register_step_post_hook(lambda *_: self._after_step())

    def _after_step(self) -> None:
        if self.ledger is not None and self.ledger.last is not None:
            self.ledger.last.kept_bytes = self.kept_bytes
        self.refresh()

    def refresh(self) -> None:
        """Encodes all shards now, and exchanges all sizes in one small collective a process group.

        Runs by itself after each step of the optimizer. Call it, on every rank, after parameters
        changed otherwise (a checkpoint was loaded), if you like: a change that nobody announced is
        noticed when the shard is gathered, and costs a second round there.
        """
        by_process_group: dict[dist.ProcessGroup, list[NarrowAllGather]] = {}
        for comm in self._comms:
            by_process_group.setdefault(comm.group.process_group, []).append(comm)
        for process_group, comms in by_process_group.items():
            states = [comm.prepare() for comm in comms]
            sizes = [state.prepared_size for state in states]
            with self.ledger.named() if self.ledger else nullcontext():
                largest = largest_sizes(sizes, process_group, comms[0].group.device)
            if self.ledger:
                sent_bytes = all_reduce_bytes(8 * len(sizes), process_group.size())
                self.ledger.add("all_gather", sent_bytes, plain_bytes=0)
            for state, size in zip(states, largest, strict=True):
                state.slot_size = size

    def reset(self) -> None:
        """Drops every cache, for ranks that have come out of step. Call it on every rank."""
        for comm in self._comms:
            comm.reset()

    @property
    def kept_bytes(self) -> int:
        """Memory that the caches take on this rank, in bytes."""
        return sum(comm.kept_bytes for comm in self._comms)

    def remove(self) -> None:
        """Gives the model back to plain FSDP2, and frees the caches. Call it on every rank."""
        if self._hook is not None:
            self._hook.remove()
        for comm, replaced in zip(self._comms, self._replaced, strict=True):
            comm.group.all_gather = replaced
        self.reset()
        # A second call must not touch the model, which may have been narrowed again.
        self._comms, self._replaced = [], []
        if self._counted is not None:
            self._counted.remove()


def narrow_all_gather(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | None = None,
    *,
    treatment: Treatment = "value",
    exponent_exchange: ExponentExchange = "difference",
    block_size: int = 512,
    block_check: BlockCheck = "compare",
    coder: str = "auto",
    verify_interval: int = 0,
    parameters: Sequence[str] = ("*",),
    volume: bool = True,
) -> NarrowedModel:
    """Sends fewer bytes in the parameter all-gathers of an FSDP2 model; no bit of them changes.

    Call it on every rank, after ``fully_shard`` and before or between training steps.

    Args:
        model: a module that ``fully_shard`` was applied to, or several (pipeline stages).
        optimizer: shards are encoded after each of its steps, when all sizes are exchanged at once.
            Of several, the one that steps last. Without it, each gather of a changed shard takes a
            second round, and steps of the ledger end by ``ledger.end_step()``.
        treatment: what every receiver keeps of a shard, hence what need not be sent: ``value`` (as
            much memory as the gathered parameters), ``exponent`` (a byte a parameter), ``coded``
            (nothing), or ``raw``, which sends all.
        exponent_exchange: of ``exponent``: the coded ``difference`` of exponents, or the exponents
            of changed ``blocks``, as in the CIERA paper.
        block_size: values a block.
        block_check: of ``blocks``: ``compare`` with the exponents last sent, or their 128-bit
            ``hash``, for which the sender keeps 16 bytes a block.
        coder: entropy coder: ``auto`` or ``zstd``.
        verify_interval: every how many gathers of a parameter group all ranks compare checksums of
            what was rebuilt; 0: never.
        parameters: patterns (``fnmatch``) of the names of the parameters to treat; others go raw.
        volume: whether to count the bytes of all collectives, in the handle's ``ledger``.

    Raises:
        ValueError: an argument is not allowed, or the model cannot be narrowed.
        SettingsError: the ranks were given different arguments or models.
    """
    groups = sharded_groups(model)
    settings = {
        "treatment": treatment,
        "exponent_exchange": exponent_exchange,
        "block_size": block_size,
        "block_check": block_check,
        "coder": coder,
        "verify_interval": verify_interval,
        "parameters": list(parameters) if isinstance(parameters, list | tuple) else parameters,
        "volume": volume,
    }
    error = None
    try:
        schemes = _check(groups, optimizer, settings)
    except ValueError as wrong:
        error = wrong
    check_settings(groups, settings, error)
    counted = count_volume(groups, optimizer) if volume else None
    ledger = counted.ledger if counted else None
    comms = [
        NarrowAllGather(group, schemes, find_coder(coder), verify_interval, ledger)
        for group in groups
        if treatment == "raw" or any(schemes[p.name].treatment != "raw" for p in group.params)
    ]
    return NarrowedModel(comms, optimizer, counted)


def _check(groups: list[ParamGroup], optimizer: Any, settings: dict[str, Any]) -> dict[str, Scheme]:
    """Each parameter's scheme.

    Raises:
        ValueError: a setting is not allowed, or the model has another custom all-gather.
    """
    for name, literal in _CHOICES.items():
        if settings[name] not in get_args(literal):
            allowed = ", ".join(map(repr, get_args(literal)))
            raise ValueError(f"{name} = {settings[name]!r}; allowed: {allowed}")
    for name, least, most in (("block_size", 1, MAX_RUN_VALUES), ("verify_interval", 0, None)):
        value = settings[name]
        if type(value) is not int or value < least or (most is not None and value > most):
            allowed = f"{least} to {most}" if most else f"{least} (never) and more"
            raise ValueError(f"{name} = {value!r}; allowed: {allowed}")
    check_volume(groups, optimizer, settings["volume"])
    find_coder(settings["coder"])
    _check_plain(groups)
    patterns = settings["parameters"]
    if not isinstance(patterns, list | tuple) or not all(isinstance(p, str) for p in patterns):
        raise ValueError(f"parameters = {patterns!r}; allowed: a list of patterns")
    names = [param.name for group in groups for param in group.params]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            logger.warning("narrowcast: parameters pattern %r matches no parameter", pattern)
    treated = {name for name in names if any(fnmatch(name, pattern) for pattern in patterns)}
    if not treated:
        raise ValueError(
            f"parameters = {patterns!r} matches none of the model's parameters, such as "
            f"{names[0]!r}"
        )
    scheme = Scheme(**{name: settings[name] for name in ("block_size", *_CHOICES)})
    return {name: scheme if name in treated else Scheme("raw") for name in names}


_CHOICES = {
    "treatment": Treatment,
    "exponent_exchange": ExponentExchange,
    "block_check": BlockCheck,
}


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
