"""The ledger: every byte sent, counted where it is sent, beside what the baseline would have sent.

A byte is counted when this rank hands it to the wire: all-gather, reduce-scatter and all-reduce as
in a ring, all-to-all pairwise, a rank's own share not at all. That is the least that an algorithm
can send; some backends send more. Padding and headers are counted.

Collectives are counted under one of ``COLLECTIVES``. Those of FSDP2 and of the token dispatch are
counted by the code that starts them. All others that can be seen are "other", except those that
another model of the process sends.

What needs a pass over the data is sampled: the share of parameters, exponents and blocks that
changed, by kind of shard, and the share of gradients that are zero. Every ``sample_interval`` steps
they are counted; the records of all other steps do not have them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.optim import Optimizer

from narrowcast.attribution import counted_as, counted_by_caller, current_owner
from narrowcast.fsdp2 import ParamGroup
from narrowcast.steps import StepHook
from narrowcast.telemetry.changes import Changes
from narrowcast.telemetry.collectives import count_collectives
from narrowcast.telemetry.step_volume import StepVolume, TokenVolume
from narrowcast.topology import FLAT

SAMPLE_INTERVAL = 10
"""Steps from one sample to the next where the caller does not choose. To count what has changed in
a shard takes about half as long as to encode it."""


class Ledger:
    """Counts the collectives of this process between ``start`` and ``stop``, step by step.

    Attributes:
        current, last: the step that is being counted, and the last whole one.
        steps: whole steps counted.
        step: number of the step that is being counted, from 1; the owner may set it where training
            was resumed.
        sample_interval: what needs a pass over the data is counted in the steps whose number is a
            multiple of it, and in step 1; 0: in none.
        topology: where the ranks are; the owner sets it.
        replicas: how many times the job holds each parameter; the owner sets it.
        moe_layers: whose deduplicated tokens are counted; the same on every rank.
    """

    def __init__(self) -> None:
        self.current = StepVolume()
        self.last: StepVolume | None = None
        self.steps = 0
        self.step = 1
        self.sample_interval = SAMPLE_INTERVAL
        self.topology = FLAT
        self.replicas = 1
        self.moe_layers: tuple[str, ...] = ()
        self._gathered: set[ParamGroup] = set()
        self._stop_counting: Callable[[], None] | None = None
        self._holders = 0
        self._groups: list[ParamGroup] = []
        self._owns: WeakKeyDictionary[object, bool] = WeakKeyDictionary()  # by root
        self._hook: StepHook | None = None

    def acquire(
        self, groups: list[ParamGroup], new_groups: list[ParamGroup], optimizer: Optimizer | None
    ) -> None:
        """Counts until as many calls of ``release``; see ``count_volume``.

        Args:
            groups: of the model.
            new_groups: those whose collectives no ledger counted so far.
            optimizer: ends steps, unless an earlier caller gave one.
        """
        self._holders += 1
        self._groups += new_groups
        self._owns.clear()
        if optimizer is not None and self._hook is None:
            self._hook = StepHook(optimizer, groups, self.end_step)
        self.start()

    def release(self) -> list[ParamGroup]:
        """Ends the counting if nobody else counts; returns the groups that are free then."""
        self._holders -= 1
        if self._holders:
            return []
        groups, self._groups = self._groups, []
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self.stop()
        return groups

    def start(self) -> None:
        if self._stop_counting is None:
            self._stop_counting = count_collectives(self._on_collective)

    def stop(self) -> None:
        if self._stop_counting is not None:
            self._stop_counting()
            self._stop_counting = None

    def end_step(self) -> None:
        """Closes the step: ``last`` is what it sent, and counting continues from zero."""
        self.last = self.current
        if self.topology.num_nodes:
            self.last.nodes, self.last.replicas = self.topology.num_nodes, self.replicas
        self.current = StepVolume(tokens={layer: TokenVolume() for layer in self.moe_layers})
        self._gathered.clear()
        self.steps += 1
        self.step += 1

    def catch_up(self) -> None:
        """Ends the step if an optimizer that was not known here has ended it."""
        if self._hook is not None and self._hook.missed():
            self.end_step()

    @property
    def is_sampled(self) -> bool:
        """Whether the current step is one in which passes over the data are counted."""
        interval = self.sample_interval
        return interval > 0 and (self.step == 1 or self.step % interval == 0)

    def add(self, collective: str, sent_bytes: int, plain_bytes: int | None = None) -> None:
        """Counts what this rank sent under one of ``COLLECTIVES``.

        Args:
            plain_bytes: what the baseline would have sent in its place; ``None``: as much.
        """
        self.current.sent[collective] += sent_bytes
        self.current.plain[collective] += sent_bytes if plain_bytes is None else plain_bytes

    def add_sent(self, collective: str, sent_bytes: int, over: dist.ProcessGroup) -> None:
        """Counts what this rank sent of parameters or gradients in a ring over a process group, or
        to ranks that are all on other nodes or all on its own."""
        self.current.sent[collective] += sent_bytes
        leaves = self.topology.ring_leaves_node(over)
        where = self.current.leaving if leaves else self.current.staying
        where[collective] += sent_bytes

    def add_plain(self, collective: str, sent_bytes: int, over: dist.ProcessGroup) -> None:
        """Counts what the baseline would have sent, as ``add_sent`` does."""
        self.current.plain[collective] += sent_bytes
        self.current.plain_leaving[collective] += sent_bytes * self.topology.ring_leaves_node(over)

    def count_layers(self, layers: Sequence[str]) -> None:
        """Counts the tokens of these MoE layers one by one, from now on. The same on every rank."""
        self.moe_layers = tuple(layers)
        self.current.tokens = {layer: TokenVolume() for layer in layers}

    def add_rows(
        self, layer: str, collective: str, rows: int, sent_bytes: int, plain_bytes: int
    ) -> None:
        """Counts rows of a layer's tokens that this rank sent: see ``add``."""
        self.add(collective, sent_bytes, plain_bytes)
        self.current.tokens[layer].rows += rows
        self.current.tokens[layer].bytes += sent_bytes

    @contextmanager
    def beyond_baseline(self) -> Iterator[None]:
        """Collectives that start within are this ledger's alone, and the baseline has none of
        them."""
        plain_bytes = self.current.plain["other"]
        with counted_as(self):
            yield
        self.current.plain["other"] = plain_bytes

    def is_first_gather(self, group: ParamGroup) -> bool:
        """Whether a parameter group was not gathered yet in this step."""
        return group not in self._gathered

    def record_gather(
        self, group: ParamGroup, parameters: int, sent_bytes: int, changes: dict[str, Changes]
    ) -> None:
        """Records what each rank of a group sent of its ``parameters`` (its shard) in a gather."""
        step = self.current
        volume = step.first if self.is_first_gather(group) else step.later
        volume.parameters += parameters
        volume.bits += 8 * sent_bytes
        for kind, counted in changes.items():
            step.changes[kind] = step.changes.get(kind, Changes()) + counted
        self._gathered.add(group)

    def record_reduction(
        self, parameters: int, sent_bytes: int, examined: int = 0, zeros: int = 0
    ) -> None:
        """Records what this rank sent of its contributions in one reduction.

        Args:
            parameters: how many contributions.
            examined, zeros: how many of them were searched for zeros, and how many were zero.
        """
        volume = self.current.gradients
        volume.parameters += parameters
        volume.bits += 8 * sent_bytes
        volume.examined += examined
        volume.zeros += zeros

    def _on_collective(self, sent_bytes: int) -> None:
        owner = current_owner()
        if owner is None or owner is self or (isinstance(owner, ParamGroup) and self._is_of(owner)):
            self.add("other", sent_bytes)

    def _is_of(self, group: ParamGroup) -> bool:
        """Whether a parameter group is of the model that is counted here, itself counted or not."""
        ledger = ledger_of(group)
        if ledger is not None:
            return ledger is self
        root = group.root
        if root not in self._owns:
            self._owns[root] = any(root is counted.root for counted in self._groups)
        return self._owns[root]


def ledger_of(group: ParamGroup) -> Ledger | None:
    """The ledger that counts a parameter group, if any does."""
    comms = (group.all_gather, group.reduce_scatter)
    return next((comm.ledger for comm in comms if getattr(comm, "ledger", None)), None)


def beyond_baseline(ledger: Ledger | None) -> AbstractContextManager[None]:
    """``ledger.beyond_baseline()``, or ``counted_by_caller()`` where there is no ledger."""
    return counted_by_caller() if ledger is None else ledger.beyond_baseline()


def all_reduce_bytes(nbytes: int, world_size: int) -> int:
    """Bytes that a rank sends in a ring all-reduce of ``nbytes`` bytes."""
    return 2 * nbytes * (world_size - 1) // world_size
