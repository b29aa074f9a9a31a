"""FSDP2's all-gather, replaced: one object a parameter group, which moves the bytes.

    optimizer step       first gather of the next forward         every later gather
    prepare(): encode    sizes of all groups are announced
                         start: send in buffers                   start: mostly headers alone
                         finish: check, decode, cache             finish

Sizes are announced at a place that all ranks reach, whether or not each of them has taken a step of
the optimizer: a rank that skips a step must not leave the others waiting.

Where a process group has several ranks on each of several nodes, payloads cross between the ranks
in the same place of each node, and each node completes the gather within itself (``two_levels``).

No rank raises alone: whatever is wrong with a payload, all ranks have received it, or learn of it
within their node. What a rank may still meet alone (no memory, a bug) becomes the error of all
ranks in ``Job.together``.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast import errors
from narrowcast.allgather.codec import Scheme
from narrowcast.allgather.gather import Gather, GatherState, describe
from narrowcast.allgather.offload import HostCopies, Prefetcher
from narrowcast.allgather.shard_codec import Prepared, ShardCodec
from narrowcast.allgather.two_levels import complete_within
from narrowcast.attribution import counted_by_caller
from narrowcast.errors import Job
from narrowcast.fsdp2 import (
    AllGather,
    DefaultAllocMixin,
    ParamGroup,
    ShardedParam,
    WorkThatFinishes,
)
from narrowcast.telemetry.ledger import Ledger
from narrowcast.telemetry.narrowed import GatherTelemetry
from narrowcast.topology import FLAT, Topology
from narrowcast.util import ordinary, own_mode
from narrowcast.wire.coders import Coder
from narrowcast.wire.exchange import start_round

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class NarrowAllGather(DefaultAllocMixin, AllGather):
    """All-gathers the shards of one parameter group, sending what their receivers have not cached.

    Attributes:
        group: the parameter group.
        schemes: by parameter name; ``None``: the shards are gathered by ``plain``.
        verify_interval: gathers from one comparison of checksums to the next; 0: none.
        telemetry: is called at each event that may be counted or timed.
        topology: where the ranks are. Gathers within a node are left to ``plain``.
        plain: the group's own all-gather.
        states: by process group (FSDP2 gathers other shards over smaller groups with
            ``reshard_after_forward`` an int) and by parameters, sizes and dtypes as they were when
            they were gathered.
        copies: how caches in host memory get to the device; ``None`` where they are on it.
        prefetcher: fetches them ahead; the groups of a model share one.
        job: the ranks that must learn of a failure here; ``None``: nobody.
        before: is called with this object before each gather.
        wait: waits for a collective of a gather on a CPU.
        on_unannounced: is called with this object when the shard has changed without ``prepare``.
    """

    group: ParamGroup
    schemes: dict[str, Scheme] | None
    coder: Coder
    verify_interval: int = 0
    telemetry: GatherTelemetry = field(default_factory=GatherTelemetry)
    topology: Topology = FLAT
    plain: AllGather | None = None
    states: dict[tuple[str, tuple[ShardedParam, ...]], GatherState] = field(default_factory=dict)
    copies: HostCopies | None = None
    prefetcher: Prefetcher = field(default_factory=Prefetcher)
    job: Job | None = None
    before: Callable[["NarrowAllGather"], None] | None = None
    wait: Callable[[dist.Work], object] = dist.Work.wait
    on_unannounced: Callable[["NarrowAllGather"], None] | None = None

    @property
    def ledger(self) -> Ledger | None:
        """The ledger that counts the group, if any does."""
        return self.telemetry.ledger

    @property
    def cache_bytes(self) -> int:
        """Memory of the caches."""
        return sum(state.codec.cache.nbytes for state in self.states.values())

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers ``input_tensor`` (n,) into ``output_tensor`` (W * n,), as FSDP2 asks for it.

        Raises:
            NarrowcastError: on every rank of the job alike; with ``async_op``, from ``wait``.
        """
        with self._together():
            if self.before is not None:
                with own_mode():
                    self.before(self)
            if self.topology.is_local(group):
                return self._gather_plainly(output_tensor, input_tensor, group, async_op)
            self.telemetry.on_gather(self.topology.payload_group(group), input_tensor.numel())
            if self.schemes is None:
                return self._gather_plainly(output_tensor, input_tensor, group, async_op)
            with own_mode():
                finish = self._start(
                    ordinary(output_tensor), ordinary(input_tensor), group, async_op
                )

        def finish_together() -> None:
            with self._together(), own_mode():
                finish()

        if not async_op:
            finish_together()
            return None
        return WorkThatFinishes(finish_together)

    def prepare(self, following: "NarrowAllGather | None" = None) -> None:
        """Encodes the group's shard ahead of its gather.

        Args:
            following: the one that is prepared next: its cache is fetched meanwhile.
        """
        state = self.whole_state()
        for comm in (self, following):
            if comm is not None:
                codec = comm.whole_state().codec
                codec.cache.fetch([codec.rank])
        try:
            with self.telemetry.coding():
                state.prepared = self._encode(state, self.group.shard())
        except RuntimeError as error:
            # Not raised: until the gather, which will report what is wrong, nobody waits.
            logger.warning("narrowcast: %s is not encoded ahead: %s", self.group.name, error)
            state.prepared = None

    def change_schemes(self, schemes: dict[str, Scheme] | None) -> None:
        """Changes how shards are compressed; every rank must, between two steps. What is cached of
        a shard stays as far as its new compression can use it; the next gather sends what is
        missing.
        """
        before, self.schemes, self.states = self.states, schemes, {}
        self.prefetcher.forget()
        if schemes is None:
            return
        for key, old in before.items():
            state = self._new_state(key[1], old.codec.rank, len(old.codec.cache))
            state.codec.take_over(old.codec)
            self.states[key] = state

    def reset(self) -> None:
        """Drops all that is cached; every rank must. The next gathers send everything."""
        for state in self.states.values():
            state.reset()

    def whole_state(self) -> GatherState:
        """The state of the gathers over all ranks of the group."""
        return self.state_of(self.group.process_group)

    def state_of(self, group: dist.ProcessGroup) -> GatherState:
        """The state of the gathers over ``group``, of shards as they are now."""
        is_whole = self._is_whole(group)
        key = (group.group_name, self.group.params if is_whole else self.group.resharded_params)
        if key not in self.states:
            for other in [other for other in self.states if other[0] == key[0]]:
                del self.states[other]  # of parameters that were cast since
            payload_group = self.topology.payload_group(group)
            self.states[key] = self._new_state(key[1], payload_group.rank(), payload_group.size())
        return self.states[key]

    def _new_state(
        self, params: tuple[ShardedParam, ...], rank: int, world_size: int
    ) -> GatherState:
        codec = ShardCodec.cold(
            [(param.name, param.numel, param.dtype) for param in params],
            self.schemes,
            self.coder,
            rank=rank,
            world_size=world_size,
            verify_interval=self.verify_interval,
            copies=self.copies,
        )
        return GatherState(codec, padded_size=codec.header_size)

    def _is_whole(self, group: dist.ProcessGroup) -> bool:
        return group.group_name == self.group.process_group.group_name

    def _encode(self, state: GatherState, shard_bytes: Tensor) -> Prepared:
        return state.codec.encode(shard_bytes, self.telemetry.wants_changes(self.group))

    def _gather_plainly(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        if self.group.device.type != "cpu" or async_op:
            return self.plain(output_tensor, input_tensor, group, async_op)
        timed = self.telemetry.plain_gather() if self._is_whole(group) else nullcontext()
        with timed:
            self.wait(self.plain(output_tensor, input_tensor, group, async_op=True))
        return None

    def _start(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> Callable[[], None]:
        """Sends this rank's payload; the function that is returned waits for those of the other
        ranks, and decodes them."""
        shard_bytes = input_tensor.contiguous().view(torch.uint8)
        rows_WB = output_tensor.view(group.size(), -1).view(torch.uint8)
        levels, payload_group = self.topology.levels_of(group), self.topology.payload_group(group)
        state = self.state_of(group)
        if state.codec.shard_bytes != shard_bytes.numel():
            raise errors.SettingsError(
                f"{describe(self.group)} FSDP2 gathers {shard_bytes.numel()} bytes a rank, but its "
                f"parameters have {state.codec.shard_bytes}: they were changed in a way that is "
                "not known here. Narrow the model after all changes of its parameters"
            )
        self.prefetcher.starts(state.codec.cache)
        prepared = self._take_prepared(state, shard_bytes, group)
        with counted_by_caller():
            is_late = async_op or self.group.device.type == "cpu"
            buffers, work = start_round(prepared.payload, state.padded_size, payload_group, is_late)
        gather = Gather(self.group, payload_group, state, prepared, buffers, self.telemetry)

        def finish() -> None:
            self.prefetcher.finishes(state.codec.cache)
            if work is not None:
                self.wait(work)
            with counted_by_caller():
                if levels is None:
                    gather.finish(rows_WB)
                else:
                    complete_within(rows_WB, gather.finish, levels)
                self.telemetry.on_completed(group, shard_bytes.numel(), levels)

        return finish

    def _take_prepared(
        self, state: GatherState, shard_bytes: Tensor, group: dist.ProcessGroup
    ) -> Prepared:
        """The shard as it was encoded ahead, or encoded now if it has changed since."""
        prepared, state.prepared = state.prepared, None
        was_prepared = prepared is not None
        with self.telemetry.coding():
            if was_prepared and torch.equal(prepared.shard_bytes, shard_bytes):
                return prepared
            prepared = self._encode(state, shard_bytes)
        is_unannounced = was_prepared or prepared.payload.numel() > state.padded_size
        is_warm = state.codec.sequence > 0 and self._is_whole(group)
        if is_unannounced and is_warm and self.on_unannounced is not None:
            self.on_unannounced(self)
        return prepared

    def _together(self) -> AbstractContextManager[None]:
        if self.job is None:
            return nullcontext()
        return self.job.together(describe(self.group).removesuffix(":"))
