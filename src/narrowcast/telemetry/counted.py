"""FSDP2's own collectives, counted: a model is counted, and otherwise as it was."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from narrowcast.attribution import counted_by_caller
from narrowcast.fsdp2 import AllGather, ParamGroup, ReduceScatter
from narrowcast.telemetry.ledger import Ledger, ledger_of
from narrowcast.topology import FLAT, Topology


@dataclass
class CountedAllGather(AllGather):
    """A parameter group's own all-gather, counted."""

    group: ParamGroup
    inner: AllGather
    ledger: Ledger

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        shard_bytes = input_tensor.numel() * input_tensor.element_size()
        for add in (self.ledger.add_sent, self.ledger.add_plain):
            add("all_gather", (group.size() - 1) * shard_bytes, group)
        num_values = self.group.num_values(input_tensor)
        self.ledger.record_gather(self.group, num_values, shard_bytes, {})
        with counted_by_caller():
            return self.inner(output_tensor, input_tensor, group, async_op)


@dataclass
class CountedReduceScatter(ReduceScatter):
    """A parameter group's own reduce-scatter, counted."""

    group: ParamGroup
    inner: ReduceScatter
    ledger: Ledger

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        num_values = (group.size() - 1) * output_tensor.numel()
        sent_bytes = num_values * output_tensor.element_size()
        for add in (self.ledger.add_sent, self.ledger.add_plain):
            add("reduce_scatter", sent_bytes, group)
        self.ledger.record_reduction(num_values, sent_bytes)
        with counted_by_caller():
            return self.inner(output_tensor, input_tensor, group, op, async_op)


@dataclass
class CountedModel:
    """What ``count_volume`` returns: a ledger that counts until every holder has left it."""

    ledger: Ledger
    _is_removed: bool = False

    def remove(self) -> None:
        """Ends the counting and gives the model its own collectives back, if nobody else counts."""
        if self._is_removed:
            return
        self._is_removed = True
        for group in self.ledger.release():
            group.all_gather = uncounted(group.all_gather)
            group.reduce_scatter = uncounted(group.reduce_scatter)


def count_volume(
    groups: list[ParamGroup], optimizer: Optimizer | None = None, topology: Topology = FLAT
) -> CountedModel:
    """Counts what a sharded model sends, and changes nothing of it. A model that is counted already
    stays with its ledger.

    Args:
        groups: of the model, from ``param_groups``.
        optimizer: a step of the ledger ends with each of its steps; without it, call
            ``ledger.end_step`` yourself.
        topology: where the ranks are, by which bytes that leave a node are told from others.
    """
    ledger = next((found for group in groups if (found := ledger_of(group))), None) or Ledger()
    new_groups = [group for group in groups if ledger_of(group) is None]
    for group in new_groups:
        group.all_gather = CountedAllGather(group, group.all_gather, ledger)
        group.reduce_scatter = CountedReduceScatter(group, group.reduce_scatter, ledger)
    ledger.topology = topology
    ledger.replicas = max((group.replicas for group in groups), default=1)
    ledger.acquire(groups, new_groups, optimizer)
    return CountedModel(ledger)


def check_volume(groups: list[ParamGroup], optimizer: Any, volume: Any) -> None:
    """Checks that a model can be counted (``volume``) or left uncounted, as its caller asks.

    Raises:
        ValueError: it cannot.
    """
    if not isinstance(volume, bool):
        raise ValueError(f"volume = {volume!r}; allowed: True, False")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer = {reprlib.repr(optimizer)}; allowed: a torch.optim.Optimizer (of several, "
            "the one that steps last), or None"
        )
    for group in groups:
        for comm in (group.all_gather, group.reduce_scatter):
            if hasattr(comm, "ledger") and (comm.ledger is not None) != volume:
                raise ValueError(
                    f"volume = {volume}, but the model's bytes are "
                    f"{'not counted' if volume else 'counted'} since it was narrowed before: give "
                    "both calls the same volume"
                )


def uncounted(comm: AllGather | ReduceScatter) -> AllGather | ReduceScatter:
    """The collective of a group itself, without the one that counts it."""
    return comm.inner if isinstance(comm, CountedAllGather | CountedReduceScatter) else comm
