"""The ledger: every byte sent, counted where it is sent, beside what plain torch would have sent.

A byte is counted when this rank hands it to the wire: all-gather, reduce-scatter and all-reduce as
in a ring, all-to-all pairwise, a rank's own share not at all. That is the least that an algorithm
can send; some backends send more. Padding and headers are counted.

Collectives fall under one of ``COLLECTIVES``. Those of FSDP2 and of the token dispatch are counted
by whoever starts them; all else that can be seen is "other", but for what another model of the
process sends. The same ledger knows what share of the parameters, their exponents and their blocks
changed, by kind of shard.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from narrowcast.attribution import CALLER, counted_as, sender
from narrowcast.fsdp2 import AllGather, ParamGroup, ReduceScatter
from narrowcast.steps import StepHook
from narrowcast.telemetry.changes import SHARD_TYPES, Changes
from narrowcast.telemetry.collectives import count_collectives

COLLECTIVES = ("all_gather", "reduce_scatter", "dispatch", "combine", "other")


@dataclass
class GatherVolume:
    """Parameters gathered, and the bits sent for them; summed over groups, headers included."""

    parameters: int = 0
    bits: int = 0

    @property
    def bits_per_parameter(self) -> float:
        return self.bits / self.parameters if self.parameters else 0.0


@dataclass
class GradientVolume(GatherVolume):
    """Contributions to gradients that were sent to their owners, and the bits sent for them.

    ``zeros`` is how many of the ``examined`` ones were zero: all of those that were coded.
    """

    examined: int = 0
    zeros: int = 0


@dataclass
class TokenVolume:
    """Tokens of one MoE layer that crossed to their experts, once to each rank.

    Attributes:
        tokens, assignments: of this rank; pairs of a token and an expert.
        local: assignments to experts on the token's own rank.
        rank_rows, node_rows: pairs of a token and a rank, and of a token and a node, that holds any
            of its experts. Of two levels each rank counts the rows that it passes on.
        rows, bytes: sent to other ranks in dispatch and combine, forward and backward.
    """

    tokens: int = 0
    assignments: int = 0
    local: int = 0
    rank_rows: int = 0
    node_rows: int = 0
    rows: int = 0
    bytes: int = 0

    def scalars(self, layer: str) -> dict[str, float]:
        if not self.tokens:
            return {}
        scalars = {
            "rows_per_token": self.rank_rows / self.tokens,
            "rows_removed": 1 - self.rank_rows / self.assignments,
            "local_share": self.local / self.assignments,
            "worst_rank_rows": self.rows,
            "worst_rank_bytes": self.bytes,
        }
        if self.node_rows:
            scalars["nodes_per_token"] = self.node_rows / self.tokens
        return {f"narrowcast/{name}/{layer}": value for name, value in scalars.items()}


@dataclass
class StepVolume:
    """What one step sent.

    Attributes:
        sent, plain: bytes of each collective that this rank sent, and that plain torch would have,
            at least: by a ring, where gloo's reduce-scatter sends about twice as much.
        first, later: parameter gathers after the optimizer's step, and all further ones (backward,
            or more microbatches). Sizes are those of the largest rank, since all are padded to it.
        gradients: all reductions of the step.
        changes: by kind of shard; empty where nothing is cached to compare with.
        tokens: by MoE layer; empty where tokens are not deduplicated.
        cache_bytes: memory of what receivers keep, at the end of the step.
    """

    sent: Counter[str] = field(default_factory=Counter)
    plain: Counter[str] = field(default_factory=Counter)
    first: GatherVolume = field(default_factory=GatherVolume)
    later: GatherVolume = field(default_factory=GatherVolume)
    gradients: GradientVolume = field(default_factory=GradientVolume)
    changes: dict[str, Changes] = field(default_factory=dict)
    tokens: dict[str, TokenVolume] = field(default_factory=dict)
    cache_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Bytes sent over bytes that plain torch would have sent."""
        plain = sum(self.plain.values())
        return sum(self.sent.values()) / plain if plain else 1.0

    def scalars(self) -> dict[str, float]:
        """The step as flat TensorBoard scalars, under ``narrowcast/``."""
        scalars: dict[str, float] = {
            "narrowcast/ratio/all": self.ratio,
            "narrowcast/cache_bytes": self.cache_bytes,
        }
        for name in COLLECTIVES:
            scalars[f"narrowcast/bytes/{name}"] = self.sent[name]
            scalars[f"narrowcast/plain_bytes/{name}"] = self.plain[name]
        for name in ("all_gather", "reduce_scatter"):
            if self.plain[name]:
                scalars[f"narrowcast/ratio/{name}"] = self.sent[name] / self.plain[name]
        volumes = {"first_gather": self.first, "later_gathers": self.later}
        for name, volume in (*volumes.items(), ("gradients", self.gradients)):
            if volume.parameters:
                scalars[f"narrowcast/bits_per_parameter/{name}"] = volume.bits_per_parameter
        if self.gradients.examined:
            share = self.gradients.zeros / self.gradients.examined
            scalars["narrowcast/zero_gradients"] = share
        for layer, tokens in self.tokens.items():
            scalars |= tokens.scalars(layer)
        for kind, changes in self.changes.items():
            for name, rate in changes.rates().items():
                scalars[f"narrowcast/{name}/{kind}"] = rate
        return scalars


def reduce_over_ranks(volume: StepVolume, device: torch.device) -> StepVolume:
    """A step over all ranks of the job, each of which must call this: the rows and bytes of the
    worst rank in each collective, in each layer and in memory; all other counts of all together."""
    no_changes = Changes()
    worst = [counts[name] for counts in (volume.sent, volume.plain) for name in COLLECTIVES]
    worst.append(volume.cache_bytes)
    layers = [astuple(tokens) for tokens in volume.tokens.values()]
    worst += [count for layer in layers for count in layer[-2:]]
    parts = (volume.first, volume.later, volume.gradients)
    parts += tuple(volume.changes.get(kind, no_changes) for kind in SHARD_TYPES)
    total = [
        count
        for part in (*map(astuple, parts), *(layer[:-2] for layer in layers))
        for count in part
    ]
    worst, total = (torch.tensor(counts, device=device) for counts in (worst, total))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    names, kinds = len(COLLECTIVES), len(SHARD_TYPES)
    sent, plain, (cache_bytes,), worst = (
        part.tolist() for part in worst.split([names, names, 1, 2 * len(layers)])
    )
    volumes, changes, sums = total.split([8, kinds * len(astuple(no_changes)), 5 * len(layers)])
    volumes, changes = volumes.tolist(), changes.view(kinds, -1).tolist()
    of_layers = zip(
        sums.view(-1, 5).tolist(), zip(worst[::2], worst[1::2], strict=True), strict=True
    )
    return StepVolume(
        sent=Counter(dict(zip(COLLECTIVES, sent, strict=True))),
        plain=Counter(dict(zip(COLLECTIVES, plain, strict=True))),
        first=GatherVolume(*volumes[:2]),
        later=GatherVolume(*volumes[2:4]),
        gradients=GradientVolume(*volumes[4:]),
        changes={
            kind: Changes(*counts)
            for kind, counts in zip(SHARD_TYPES, changes, strict=True)
            if any(counts)
        },
        tokens={
            layer: TokenVolume(*summed, *most)
            for layer, (summed, most) in zip(volume.tokens, of_layers, strict=True)
        },
        cache_bytes=cache_bytes,
    )


def all_reduce_bytes(nbytes: int, world_size: int) -> int:
    """What a rank sends in a ring all-reduce of ``nbytes`` bytes."""
    return 2 * nbytes * (world_size - 1) // world_size


def uncounted_baseline(ledger: "Ledger | None") -> AbstractContextManager[None]:
    """``ledger.uncounted_baseline()``; ``counted_as(CALLER)`` where there is no ledger."""
    return counted_as(CALLER) if ledger is None else ledger.uncounted_baseline()


class Ledger:
    """Counts the collectives of this process between ``start`` and ``stop``, step by step.

    Attributes:
        current, last: the step that is being counted, and the last whole one.
        steps: whole steps counted.
        moe_layers: whose deduplicated tokens are counted; the same on every rank.
        on_gradients: is called with a parameter group and this rank's contributions to its
            gradients, (W, n), before they are reduced.
    """

    def __init__(self) -> None:
        self.current = StepVolume()
        self.moe_layers: tuple[str, ...] = ()
        self.last: StepVolume | None = None
        self.steps = 0
        self.on_gradients: Callable[[ParamGroup, Tensor], None] | None = None
        self._gathered: set[ParamGroup] = set()
        self._stop_counting: Callable[[], None] | None = None
        self._holds = 0
        self._groups: list[ParamGroup] = []
        self._owns: WeakKeyDictionary[object, bool] = WeakKeyDictionary()  # by root
        self._hook: StepHook | None = None

    def acquire(self, groups: list[ParamGroup], optimizer: Optimizer | None) -> None:
        """Counts these groups until as many calls of ``release``; see ``count_volume``."""
        self._holds += 1
        for group in groups:
            if ledger_of(group) is None:
                group.all_gather = CountedAllGather(group, group.all_gather, self)
                group.reduce_scatter = CountedReduceScatter(group, group.reduce_scatter, self)
                self._groups.append(group)
        self._owns.clear()
        if optimizer is not None and self._hook is None:
            self._hook = StepHook(optimizer, groups, self.end_step)
        self.start()

    def release(self) -> None:
        self._holds -= 1
        if self._holds:
            return
        for group in self._groups:
            group.all_gather = unwrapped(group.all_gather)
            group.reduce_scatter = unwrapped(group.reduce_scatter)
        self._groups = []
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self.stop()

    def catch_up(self) -> None:
        """Ends the step if an optimizer that nobody knew of has ended it."""
        if self._hook is not None and self._hook.missed():
            self.end_step()

    def start(self) -> None:
        if self._stop_counting is None:
            self._stop_counting = count_collectives(self._on_collective)

    def stop(self) -> None:
        if self._stop_counting is not None:
            self._stop_counting()
            self._stop_counting = None

    def end_step(self) -> None:
        """Closes the step: ``last`` is what it sent, and counting goes on from zero."""
        self.last = self.current
        self.current = StepVolume(tokens={layer: TokenVolume() for layer in self.moe_layers})
        self._gathered.clear()
        self.steps += 1

    def add(self, collective: str, sent_bytes: int, plain_bytes: int | None = None) -> None:
        """Counts what this rank sent under one of ``COLLECTIVES``, and what plain torch would have
        sent in its place (by default as much)."""
        self.current.sent[collective] += sent_bytes
        self.current.plain[collective] += sent_bytes if plain_bytes is None else plain_bytes

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
    def uncounted_baseline(self) -> Iterator[None]:
        """What is sent within a step in here, plain torch does not send, nor any other model."""
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
        """Notes what each rank of a group sent of its ``parameters`` (its shard) in one gather."""
        step = self.current
        volume = step.first if self.is_first_gather(group) else step.later
        volume.parameters += parameters
        volume.bits += 8 * sent_bytes
        for kind, counted in changes.items():
            step.changes[kind] = step.changes.get(kind, Changes()) + counted
        self._gathered.add(group)

    def show_gradients(self, group: ParamGroup, rows_WN: Tensor) -> None:
        if self.on_gradients is not None:
            self.on_gradients(group, rows_WN)

    def record_reduction(
        self, parameters: int, sent_bytes: int, examined: int = 0, zeros: int = 0
    ) -> None:
        """Notes what this rank sent of its contributions in one reduction: how many of them, in
        how many bytes, and how many of the ``examined`` ones were ``zeros``."""
        volume = self.current.gradients
        volume.parameters += parameters
        volume.bits += 8 * sent_bytes
        volume.examined += examined
        volume.zeros += zeros

    def _on_collective(self, sent_bytes: int) -> None:
        owner = sender()
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
        self.ledger.add("all_gather", (group.size() - 1) * shard_bytes)
        num_values = self.group.num_values(input_tensor)
        self.ledger.record_gather(self.group, num_values, shard_bytes, {})
        with counted_as(CALLER):
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
        self.ledger.show_gradients(self.group, input_tensor.view(group.size(), -1))
        num_values = (group.size() - 1) * output_tensor.numel()
        sent_bytes = num_values * output_tensor.element_size()
        self.ledger.add("reduce_scatter", sent_bytes)
        self.ledger.record_reduction(num_values, sent_bytes)
        with counted_as(CALLER):
            return self.inner(output_tensor, input_tensor, group, op, async_op)


@dataclass
class CountedModel:
    """What ``count_volume`` returns: a hold on a ledger that counts as long as anybody has one."""

    ledger: Ledger
    _released: bool = False

    def remove(self) -> None:
        """Ends the counting and gives the model back its own collectives, if nobody else counts."""
        if not self._released:
            self._released = True
            self.ledger.release()


def count_volume(groups: list[ParamGroup], optimizer: Optimizer | None = None) -> CountedModel:
    """Counts what a sharded model sends, and changes nothing of it. A model that is counted already
    stays with its ledger.

    Args:
        groups: of the model, from ``param_groups``.
        optimizer: a step of the ledger ends with each of its steps; without it, call
            ``ledger.end_step`` yourself.
    """
    ledger = next((found for group in groups if (found := ledger_of(group))), None) or Ledger()
    ledger.acquire(groups, optimizer)
    return CountedModel(ledger)


def check_volume(groups: list[ParamGroup], optimizer: Any, volume: Any) -> None:
    """Whether a model can be counted (``volume``), or not counted, as its caller wishes.

    Raises:
        ValueError: it cannot.
    """
    if not isinstance(volume, bool):
        raise ValueError(f"volume = {volume!r}; allowed: True, False")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer = {optimizer!r}; allowed: a torch.optim.Optimizer (of several, the one "
            "that steps last), or None"
        )
    for group in groups:
        for comm in (group.all_gather, group.reduce_scatter):
            if hasattr(comm, "ledger") and (comm.ledger is not None) != volume:
                raise ValueError(
                    f"volume = {volume}, but the model's bytes are "
                    f"{'not counted' if volume else 'counted'} since it was narrowed before: give "
                    "both calls the same volume"
                )


def ledger_of(group: ParamGroup) -> Ledger | None:
    """The ledger that counts a parameter group, if any does."""
    comms = (group.all_gather, group.reduce_scatter)
    return next((comm.ledger for comm in comms if getattr(comm, "ledger", None)), None)


def unwrapped(comm: AllGather | ReduceScatter) -> AllGather | ReduceScatter:
    """A group's collective itself, without the one that counts it."""
    return comm.inner if isinstance(comm, CountedAllGather | CountedReduceScatter) else comm
