"""The FSDP2 seam: one all-gather object a parameter group.

    optimizer step       first gather of the next forward         every later gather
    prepare(): encode    sizes of all groups are announced
                         start: send in buffers                     start: mostly headers alone
                         finish: check, decode, keep              finish

Sizes are announced where all ranks come by together, whether or not each of them has taken a step
of the optimizer: a rank that skips one must not leave the others waiting.

What a group keeps is replicated: ``cached[r]`` is the same on every rank, except that a rank may
keep hashes of its own shard. It changes only in ``_finish``, rank after rank in the same order on
every rank, so that it is the same still when a later payload turns out not to decode.
"""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast import errors
from narrowcast.allgather import codec
from narrowcast.allgather.announcer import Announcer
from narrowcast.allgather.chunks import Chunk, make_chunks, rechunk
from narrowcast.allgather.codec import Scheme
from narrowcast.allgather.offload import HostCopies, Prefetcher, ShardCache
from narrowcast.attribution import CALLER, counted_as
from narrowcast.errors import Job
from narrowcast.fsdp2 import (
    AllGather,
    DefaultAllocMixin,
    ParamGroup,
    ShardedParam,
    WorkThatFinishes,
)
from narrowcast.telemetry.changes import Changes, count_changes, shard_type
from narrowcast.telemetry.ledger import Ledger, all_reduce_bytes
from narrowcast.util import ordinary, own_mode
from narrowcast.wire import floats, packet
from narrowcast.wire.coders import Coder
from narrowcast.wire.exchange import start_round
from narrowcast.wire.packet import Encoded, Form

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A shard that was encoded ahead of its gather; valid while the shard is ``shard_bytes``."""

    shard_bytes: Tensor
    payload: Tensor
    changes: dict[str, Changes]


@dataclass
class GroupState:
    """What one set of ranks keeps of a group's shards of one size.

    Attributes:
        cached: for each rank of the group and each run, what ``codec`` keeps; ``None`` when cold.
        sequence: gathers that went into ``cached``.
        padded_size: bytes that every rank sends in the first round of the next gather.
    """

    chunks: tuple[Chunk, ...]
    settings: int
    cache: ShardCache
    padded_size: int
    sequence: int = 0
    prepared: Prepared | None = None

    @property
    def header_size(self) -> int:
        return packet.header_size(len(self.chunks))

    @property
    def next_size(self) -> int:
        """Bytes of the payload that is prepared; if none is, of what was sent in the last round."""
        return self.prepared.payload.numel() if self.prepared is not None else self.padded_size

    @property
    def shard_bytes(self) -> int:
        """Bytes of a shard that the runs cover."""
        return self.chunks[-1].stop if self.chunks else 0

    @property
    def cache_bytes(self) -> int:
        return self.cache.nbytes

    def reset(self) -> None:
        """Drops what is cached, but not ``padded_size``, on which the ranks have agreed."""
        self.cache.clear()
        self.sequence, self.prepared = 0, None


@dataclass(eq=False)
class NarrowAllGather(DefaultAllocMixin, AllGather):
    """All-gathers the shards of one parameter group, sending what their receivers do not keep.

    Attributes:
        group: the parameter group.
        schemes: by parameter name; ``None``: the shards are gathered by ``plain``.
        verify_interval: gathers from one comparison of checksums to the next; 0: none.
        ledger: where bytes are counted, if anywhere.
        plain: the group's own all-gather.
        states: what is cached, by process group (FSDP2 gathers other shards over smaller groups
            with ``reshard_after_forward`` an int) and by parameters, sizes and dtypes as they were
            when they were gathered.
        gathers: how many there were of each process group (its name), number of ranks and number of
            elements, since the owner of this object set it to zero.
        coding_seconds: the time of encoding and decoding, likewise.
        plain_seconds: the time of each gather by ``plain``, likewise; of those over all ranks of
            the group, on a CPU, where a call that returns is done.
        copies: how caches in host memory get to the device; ``None`` where they are on it.
        prefetcher: fetches them ahead; the groups of a model share one.
        job: the ranks that must learn of a failure here; ``None``: nobody.
        announcer: of the group's process group, if sizes are announced.
        waits: for a collective of a gather on a CPU.
        on_unannounced: is called when the shard has changed without ``prepare``.
    """

    group: ParamGroup
    schemes: dict[str, Scheme] | None
    coder: Coder
    verify_interval: int = 0
    ledger: Ledger | None = None
    plain: AllGather | None = None
    states: dict[tuple[str, tuple[ShardedParam, ...]], GroupState] = field(default_factory=dict)
    gathers: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    coding_seconds: float = 0.0
    plain_seconds: list[float] = field(default_factory=list)
    copies: HostCopies | None = None
    prefetcher: Prefetcher = field(default_factory=Prefetcher)
    job: Job | None = None
    announcer: Announcer | None = None
    waits: Callable[[dist.Work], object] = dist.Work.wait
    on_unannounced: Callable[["NarrowAllGather"], None] | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers ``input_tensor`` (n,) into ``output_tensor`` (W * n,), as FSDP2 asks for it.

        Raises:
            NarrowcastError: on every rank of the group alike; with ``async_op``, from ``wait``.
        """
        with self._together():
            if self.announcer is not None:
                with own_mode():
                    self.announcer.before(self)
            self.gathers[group.group_name, group.size(), input_tensor.numel()] += 1
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

    def _gather_plainly(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        if self.group.device.type != "cpu" or async_op:
            return self.plain(output_tensor, input_tensor, group, async_op)
        start = time.perf_counter()
        self.waits(self.plain(output_tensor, input_tensor, group, async_op=True))
        if self._is_whole(group):
            self.plain_seconds.append(time.perf_counter() - start)
        return None

    def _start(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> Callable[[], None]:
        """Sends this rank's payload; what is returned waits for the others', and decodes them."""
        shard_bytes = input_tensor.contiguous().view(torch.uint8)
        rows = output_tensor.view(group.size(), -1).view(torch.uint8)
        state = self.state_of(group)
        if state.shard_bytes != shard_bytes.numel():
            raise errors.SettingsError(
                f"{self._subject(None)} FSDP2 gathers {shard_bytes.numel()} bytes a rank, but its "
                f"parameters have {state.shard_bytes}: they were changed in a way that is not "
                "known here. Narrow the model after all changes of its parameters"
            )
        self.prefetcher.starts(state.cache)
        prepared, state.prepared = state.prepared, None
        with self._timed():
            is_new = prepared is None or not torch.equal(prepared.shard_bytes, shard_bytes)
        if is_new:
            unannounced = prepared is not None
            with self._timed():
                prepared = self._encode(state, group, shard_bytes)
            unannounced = unannounced or prepared.payload.numel() > state.padded_size
            known = state.sequence > 0 and self._is_whole(group)
            if unannounced and known and self.on_unannounced is not None:
                self.on_unannounced(self)
        with counted_as(CALLER):
            is_late = async_op or self.group.device.type == "cpu"
            buffers, work = start_round(prepared.payload, state.padded_size, group, is_late)

        def finish() -> None:
            self.prefetcher.finishes(state.cache)
            if work is not None:
                self.waits(work)
            with counted_as(CALLER):
                self._finish(state, group, prepared, buffers, rows)

        return finish

    def change_schemes(self, schemes: dict[str, Scheme] | None) -> None:
        """Changes how shards are compressed; every rank must, between two steps. What is cached of
        a shard stays as far as its new compression can use it; the next gather sends what is
        missing.
        """
        before, self.schemes = self.states, schemes
        self.states = {}
        self.prefetcher.forget()
        if schemes is None:
            return
        for key, old in before.items():
            state = self.states[key] = self._new_state(key[1], world_size=len(old.cache))
            for r in range(len(old.cache)):
                for i, to_cache in enumerate(rechunk(old.chunks, old.cache.take(r), state.chunks)):
                    if to_cache is not None:
                        state.cache.store(r, i, to_cache)
            state.sequence = old.sequence

    def prepare(self, following: "NarrowAllGather | None" = None) -> None:
        """Encodes the group's shard ahead of its gather.

        Args:
            following: the one that is prepared next: what it needs is fetched meanwhile.
        """
        group = self.group.process_group
        state = self.whole_state()
        for comm in (self, following):
            if comm is not None:
                comm.whole_state().cache.fetch([comm.group.process_group.rank()])
        try:
            with self._timed():
                state.prepared = self._encode(state, group, self.group.shard())
        except RuntimeError as error:
            # Not raised: there is time until the gather, which will say what is wrong.
            logger.warning("narrowcast: %s is not encoded ahead: %s", self.group.name, error)
            state.prepared = None

    def whole_state(self) -> GroupState:
        """Of the gathers over all ranks of the group."""
        return self.state_of(self.group.process_group)

    def _is_whole(self, group: dist.ProcessGroup) -> bool:
        return group.group_name == self.group.process_group.group_name

    def reset(self) -> None:
        """Drops all that is cached; every rank must. The next gathers send everything."""
        for state in self.states.values():
            state.reset()

    @property
    def cache_bytes(self) -> int:
        """Memory of the caches."""
        return sum(state.cache_bytes for state in self.states.values())

    def state_of(self, group: dist.ProcessGroup) -> GroupState:
        """What the ranks of ``group`` keep of the shards that they gather, as these are now."""
        is_whole = self._is_whole(group)
        key = (group.group_name, self.group.params if is_whole else self.group.resharded_params)
        if key not in self.states:
            for other in [other for other in self.states if other[0] == key[0]]:
                del self.states[other]  # of parameters that were cast since
            self.states[key] = self._new_state(key[1], group.size())
        return self.states[key]

    def _new_state(self, params: tuple[ShardedParam, ...], world_size: int) -> GroupState:
        chunks = make_chunks([(p.name, p.numel, p.dtype) for p in params], self.schemes)
        digest = hashlib.sha256(repr((chunks, self.verify_interval)).encode()).digest()
        return GroupState(
            chunks=chunks,
            settings=int.from_bytes(digest[:8], "little"),
            cache=ShardCache(world_size, len(chunks), self.copies),
            padded_size=packet.header_size(len(chunks)),
        )

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.coding_seconds += time.perf_counter() - start

    def _together(self) -> AbstractContextManager[None]:
        return self.job.together(self._subject(None)) if self.job is not None else nullcontext()

    def _encode(self, state: GroupState, group: dist.ProcessGroup, shard_bytes: Tensor) -> Prepared:
        """Never raises: a rank that cannot encode must tell the others, or they would hang."""
        device = shard_bytes.device
        try:
            cached = state.cache.take(group.rank())
            encoded = [
                codec.encode(
                    chunk.bits(shard_bytes), cached_chunk, chunk.scheme, chunk.layout, self.coder
                )
                for chunk, cached_chunk in zip(state.chunks, cached, strict=True)
            ]
            payload = packet.pack(
                encoded,
                coder=self.coder,
                settings=state.settings,
                sequence=state.sequence,
                shard_checksum=packet.checksum(shard_bytes) if self._verifies(state) else 0,
                device=device,
            )
            changes = self._changes(state, cached, shard_bytes) if self.ledger else {}
        except Exception as error:
            payload = packet.pack_failure(
                error,
                num_chunks=len(state.chunks),
                settings=state.settings,
                sequence=state.sequence,
                device=device,
            )
            changes = {}
        return Prepared(shard_bytes, payload, changes)

    def _verifies(self, state: GroupState) -> bool:
        return self.verify_interval > 0 and (state.sequence + 1) % self.verify_interval == 0

    def _changes(
        self, state: GroupState, cached: list[Tensor | None], shard_bytes: Tensor
    ) -> dict[str, Changes]:
        changes: dict[str, Changes] = {}
        if not self.ledger.is_first_gather(self.group):
            return changes
        for chunk, cached_chunk in zip(state.chunks, cached, strict=True):
            if cached_chunk is None or chunk.scheme.caches_hashes:
                continue
            sizes = [size for _, size in chunk.params]
            pieces = zip(
                chunk.bits(shard_bytes).split(sizes), cached_chunk.split(sizes), strict=True
            )
            for (name, size), (bits, cached_bits) in zip(chunk.params, pieces, strict=True):
                if size:
                    counted = count_changes(
                        bits, cached_bits, chunk.layout, chunk.scheme.block_size
                    )
                    kind = shard_type(name)
                    changes[kind] = changes.get(kind, Changes()) + counted
        return changes

    def _finish(
        self,
        state: GroupState,
        group: dist.ProcessGroup,
        prepared: Prepared,
        buffers: Tensor,
        rows: Tensor,
    ) -> None:
        """Checks what arrived, decodes it into ``rows`` (W, bytes), and keeps it."""
        ranks = dist.get_process_group_ranks(group)
        headers = self._read_headers(state, ranks, buffers)
        with self._error_context():
            packet.check_agreement(headers)
        sizes = [header.body_size for header in headers.values()]
        needed = state.header_size + max(sizes)
        sent_bytes = state.padded_size
        if needed > state.padded_size:
            body = prepared.payload[state.header_size :]
            bodies, _ = start_round(body, max(sizes), group, async_op=False)
            sent_bytes += max(sizes)
        else:
            bodies = buffers[:, state.header_size :]
        for r, rank in enumerate(ranks):
            with self._error_context(rank), self._timed():
                encoded = packet.unpack_body(headers[rank], bodies[r, : sizes[r]])
                own_shard = prepared.shard_bytes if r == group.rank() else None
                self._decode(state, r, encoded, rows[r], own_shard)
        if self._verifies(state):
            self._verify(ranks, group, headers, rows)
        state.sequence += 1
        state.padded_size = state.header_size + max(
            _size_if_unchanged(state.chunks, header) for header in headers.values()
        )
        if self.ledger is not None:
            others = group.size() - 1
            shard_bytes = prepared.shard_bytes.numel()
            self.ledger.add("all_gather", others * sent_bytes, others * shard_bytes)
            num_values = sum(chunk.num_values for chunk in state.chunks)
            self.ledger.record_gather(self.group, num_values, sent_bytes, prepared.changes)

    def _read_headers(
        self, state: GroupState, ranks: list[int], buffers: Tensor
    ) -> dict[int, packet.Header]:
        data, num_chunks = buffers[:, : state.header_size].cpu().numpy(), len(state.chunks)
        headers = {}
        for rank, row, buffer in zip(ranks, data, buffers, strict=True):
            with self._error_context(rank):
                header = row.tobytes()
                if packet.num_chunks_of(header) == num_chunks:
                    headers[rank] = packet.unpack_header(header, num_chunks)
                else:  # of other parameters or settings, which is for all headers to tell
                    headers[rank], _ = packet.unpack(buffer)
        return headers

    def _decode(
        self,
        state: GroupState,
        r: int,
        encoded: list[Encoded],
        row: Tensor,
        own_shard: Tensor | None,
    ) -> None:
        """Decodes rank r's shard into ``row``, uint8, and replaces what is cached of it.

        ``own_shard`` is given for this rank's own, which must fail where it fails elsewhere.
        """
        keep = codec.receiver_cache if own_shard is None else codec.sender_cache
        cached = state.cache.take(r)
        for i, (chunk, one) in enumerate(zip(state.chunks, encoded, strict=True)):
            cached_chunk = cached[i]
            if own_shard is not None and chunk.scheme.caches_hashes and cached_chunk is not None:
                cached_chunk = codec.receiver_cache(
                    chunk.bits(own_shard), chunk.scheme, chunk.layout
                )
            bits = codec.decode(
                one, cached_chunk, chunk.num_values, chunk.scheme, chunk.layout, self.coder
            )
            row[chunk.start : chunk.stop] = bits.view(torch.uint8)
            to_cache = keep(bits, chunk.scheme, chunk.layout)
            if to_cache is not cached[i]:
                state.cache.store(r, i, to_cache)

    def _verify(
        self,
        ranks: list[int],
        group: dist.ProcessGroup,
        headers: dict[int, packet.Header],
        rows: Tensor,
    ) -> None:
        """Compares checksums of all rows with those that the senders took before encoding."""
        differs = [
            packet.checksum(row) != header.shard_checksum
            for row, header in zip(rows, headers.values(), strict=True)
        ]
        wrong = torch.tensor(differs, dtype=torch.int32, device=rows.device)
        dist.all_reduce(wrong, op=dist.ReduceOp.MAX, group=group)
        if self.ledger is not None:
            sent_bytes = all_reduce_bytes(4 * len(differs), group.size())
            self.ledger.add("all_gather", sent_bytes, plain_bytes=0)
        blamed = [rank for rank, is_wrong in zip(ranks, wrong.tolist(), strict=True) if is_wrong]
        if blamed:
            with self._error_context(blamed[0]):
                raise errors.VerificationError(
                    "was not rebuilt as it was sent, on at least one rank: caches differ. Call "
                    "reset() of the handle on every rank, or restart from the last checkpoint"
                )

    def _error_context(self, rank: int | None = None) -> AbstractContextManager[None]:
        """Says in an error which gather, and whose payload, it is about."""
        return errors.error_context(self._subject(rank))

    def _subject(self, rank: int | None) -> str:
        names = self.group.names
        gather = f"all-gather of {self.group.name} ({names[0]} .. {names[-1]}):"
        return gather if rank is None else f"{gather} the payload of rank {rank}"


def _size_if_unchanged(chunks: tuple[Chunk, ...], header: packet.Header) -> int:
    """Bytes of the body of this rank's next payload if its shard does not change until then."""
    size = 0
    for chunk, (form, sections) in zip(chunks, header.chunks, strict=True):
        if chunk.scheme.compression == "delta":
            continue
        if chunk.scheme.compression == "exponent" and form != Form.RAW:
            size += floats.sign_mantissa_bytes(chunk.num_values, chunk.layout)
            if chunk.scheme.exponent_coding == "blocks":
                size += (-(-chunk.num_values // chunk.scheme.block_size) + 7) // 8
        else:
            size += sum(sections)
    return size
