"""The FSDP2 seam: one all-gather object a parameter group.

    optimizer step                        gather                           every later gather
    prepare(): encode, sizes announced    start: send in slots             start: mostly heads alone
                                          finish: check, decode, keep      finish

What a group keeps is replicated: ``kept[r]`` is the same on every rank, except that a rank may keep
hashes of its own shard. It changes only in ``_finish``, rank after rank in the same order on every
rank, so that it is the same still when a later payload turns out not to decode.
"""

import hashlib
import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast import floats
from narrowcast.allgather import codec, wire
from narrowcast.allgather.codec import Encoded, Form, Scheme
from narrowcast.allgather.coders import Coder
from narrowcast.allgather.exchange import start_round
from narrowcast.floats import FloatLayout
from narrowcast.torch_internals import AllGather, DefaultAllocMixin, ParamGroup, WorkThatFinishes
from narrowcast.volume import Changes, Ledger, all_reduce_bytes, count_changes, shard_type

logger = logging.getLogger(__name__)

_BYTES = FloatLayout(torch.uint8, torch.uint8, 8, 0)  # of dtypes that only ever go raw


# A run of 16-bit values then makes two zstd blocks, and its temporaries stay in a CPU's cache.
MAX_RUN_VALUES = 1 << 17


@dataclass(frozen=True)
class Run:
    """Neighbouring values of one dtype and one scheme: what is encoded together.

    Attributes:
        params: name of each parameter, and how many of its values are in this run.
        start, stop: in bytes, within the shard of the group.
    """

    scheme: Scheme
    layout: FloatLayout
    params: tuple[tuple[str, int], ...]
    start: int
    stop: int

    @property
    def num_values(self) -> int:
        return (self.stop - self.start) // self.layout.itemsize

    def bits(self, shard_bytes: Tensor) -> Tensor:
        """This run's values within a shard of uint8, as integers."""
        section = shard_bytes[self.start : self.stop]
        if section.storage_offset() % self.layout.itemsize:
            section = section.clone()
        return section.view(self.layout.bits)


def make_runs(
    params: list[tuple[str, int, torch.dtype]], schemes: dict[str, Scheme]
) -> tuple[Run, ...]:
    """Cuts a shard into runs. ``params``: name, number of elements and dtype, in memory order."""
    runs: list[Run] = []
    start = 0
    for name, numel, dtype in params:
        layout, scheme, left = floats.LAYOUTS.get(dtype), schemes[name], numel
        if layout is None:
            layout, scheme, left = _BYTES, Scheme("raw"), numel * dtype.itemsize
        limit = max(MAX_RUN_VALUES // scheme.block_size, 1) * scheme.block_size
        while left > 0:
            open_run = runs[-1] if runs else None
            if (
                open_run is None
                or (open_run.scheme, open_run.layout) != (scheme, layout)
                or open_run.num_values == limit
            ):
                runs.append(Run(scheme, layout, (), start, start))
            taken = min(left, limit - runs[-1].num_values)
            start += taken * layout.itemsize
            piece = ((name, taken),)
            runs[-1] = replace(runs[-1], params=runs[-1].params + piece, stop=start)
            left -= taken
    return tuple(runs)


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
        kept: for each rank of the group and each run, what ``codec`` keeps; ``None`` when cold.
        sequence: gathers that went into ``kept``.
        slot_size: bytes that every rank sends in the first round of the next gather.
    """

    runs: tuple[Run, ...]
    settings: int
    kept: list[list[Tensor | None]]
    slot_size: int
    sequence: int = 0
    prepared: Prepared | None = None

    @property
    def head_size(self) -> int:
        return wire.head_size(len(self.runs))

    @property
    def prepared_size(self) -> int:
        """Bytes of the payload that is prepared; of a head if none is."""
        return self.prepared.payload.numel() if self.prepared is not None else self.head_size

    @property
    def kept_bytes(self) -> int:
        tensors = [tensor for row in self.kept for tensor in row if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def reset(self) -> None:
        """Drops what is kept, but not ``slot_size``, on which the ranks have agreed."""
        self.kept = [[None] * len(self.runs) for _ in self.kept]
        self.sequence, self.prepared = 0, None


@dataclass
class NarrowAllGather(DefaultAllocMixin, AllGather):
    """All-gathers the shards of one parameter group, sending what their receivers do not keep.

    Attributes:
        group: the parameter group.
        schemes: by parameter name.
        verify_interval: gathers from one comparison of checksums to the next; 0: none.
        ledger: where bytes are counted, if anywhere.
        states: what is kept, by process group, size and dtype (FSDP2 gathers other shards over
            smaller groups with ``reshard_after_forward`` an int).
    """

    group: ParamGroup
    schemes: dict[str, Scheme]
    coder: Coder
    verify_interval: int = 0
    ledger: Ledger | None = None
    states: dict[tuple[str, int, torch.dtype], GroupState] = field(default_factory=dict)

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
        shard_bytes = input_tensor.contiguous().view(torch.uint8)
        rows = output_tensor.view(group.size(), -1).view(torch.uint8)
        state = self.state_of(group, input_tensor.numel(), input_tensor.dtype)
        prepared, state.prepared = state.prepared, None
        if prepared is None or not torch.equal(prepared.shard_bytes, shard_bytes):
            prepared = self._encode(state, group, shard_bytes)
        with self._named():
            slots, work = start_round(prepared.payload, state.slot_size, group, async_op)

        def finish() -> None:
            if work is not None:
                work.wait()
            with self._named():
                self._finish(state, group, prepared, slots, rows)

        if not async_op:
            finish()
            return None
        return WorkThatFinishes(finish)

    def prepare(self) -> GroupState:
        """Encodes the group's shard ahead of its gather, which every rank must do together.

        The caller sets ``slot_size`` to the largest ``prepared_size`` of all ranks.
        """
        group = self.group.process_group
        dtypes = {param.dtype for param in self.group.params}
        if len(dtypes) == 1:
            state = self.state_of(group, sum(self.group.numels), dtypes.pop())
        else:
            state = self.state_of(group, self._shard_bytes(), torch.uint8)
        try:
            state.prepared = self._encode(state, group, self.group.shard())
        except RuntimeError as error:
            # Not raised, since the other ranks go on: the gather itself will say what is wrong.
            logger.warning("narrowcast: %s is not encoded ahead: %s", self.group.name, error)
            state.prepared = None
        return state

    def _shard_bytes(self) -> int:
        sizes = zip(self.group.numels, self.group.params, strict=True)
        return sum(numel * param.dtype.itemsize for numel, param in sizes)

    def reset(self) -> None:
        """Drops all that is kept; every rank must. The next gathers send everything."""
        for state in self.states.values():
            state.reset()

    @property
    def kept_bytes(self) -> int:
        """Memory of the caches."""
        return sum(state.kept_bytes for state in self.states.values())

    def state_of(self, group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> GroupState:
        key = (group.group_name, numel, dtype)
        if key not in self.states:
            scale = numel * dtype.itemsize / self._shard_bytes()
            params = [
                (param.name, round(param_numel * scale), param.dtype)
                for param_numel, param in zip(self.group.numels, self.group.params, strict=True)
            ]
            runs = make_runs(params, self.schemes)
            digest = hashlib.sha256(repr((runs, self.verify_interval)).encode()).digest()
            self.states[key] = GroupState(
                runs=runs,
                settings=int.from_bytes(digest[:8], "little"),
                kept=[[None] * len(runs) for _ in range(group.size())],
                slot_size=wire.head_size(len(runs)),
            )
        return self.states[key]

    def _named(self) -> AbstractContextManager[None]:
        return self.ledger.named() if self.ledger is not None else nullcontext()

    def _encode(self, state: GroupState, group: dist.ProcessGroup, shard_bytes: Tensor) -> Prepared:
        """Never raises: a rank that cannot encode must tell the others, or they would hang."""
        kept = state.kept[group.rank()]
        device = shard_bytes.device
        try:
            encoded = [
                codec.encode(run.bits(shard_bytes), kept_of_run, run.scheme, run.layout, self.coder)
                for run, kept_of_run in zip(state.runs, kept, strict=True)
            ]
            payload = wire.pack(
                encoded,
                coder=self.coder,
                settings=state.settings,
                sequence=state.sequence,
                shard_checksum=wire.checksum(shard_bytes) if self._verifies(state) else 0,
                device=device,
            )
            changes = self._changes(state, kept, shard_bytes) if self.ledger else {}
        except Exception as error:
            payload = wire.pack_failure(
                error,
                num_runs=len(state.runs),
                settings=state.settings,
                sequence=state.sequence,
                device=device,
            )
            changes = {}
        return Prepared(shard_bytes, payload, changes)

    def _verifies(self, state: GroupState) -> bool:
        return self.verify_interval > 0 and (state.sequence + 1) % self.verify_interval == 0

    def _changes(
        self, state: GroupState, kept: list[Tensor | None], shard_bytes: Tensor
    ) -> dict[str, Changes]:
        changes: dict[str, Changes] = {}
        if not self.ledger.is_first_gather(self.group):
            return changes
        for run, kept_of_run in zip(state.runs, kept, strict=True):
            if kept_of_run is None or run.scheme.keeps_hashes:
                continue
            sizes = [size for _, size in run.params]
            pieces = zip(run.bits(shard_bytes).split(sizes), kept_of_run.split(sizes), strict=True)
            for (name, size), (bits, kept_bits) in zip(run.params, pieces, strict=True):
                if size:
                    counted = count_changes(bits, kept_bits, run.layout, run.scheme.block_size)
                    kind = shard_type(name)
                    changes[kind] = changes.get(kind, Changes()) + counted
        return changes

    def _finish(
        self,
        state: GroupState,
        group: dist.ProcessGroup,
        prepared: Prepared,
        slots: Tensor,
        rows: Tensor,
    ) -> None:
        """Checks what arrived, decodes it into ``rows`` (W, bytes), and keeps it."""
        ranks = dist.get_process_group_ranks(group)
        heads = self._read_heads(state, ranks, slots)
        with self._blamed():
            wire.check_agreement(heads)
        sizes = [head.body_size for head in heads.values()]
        needed = state.head_size + max(sizes)
        sent_bytes = state.slot_size
        if needed > state.slot_size:
            body = prepared.payload[state.head_size :]
            bodies, _ = start_round(body, max(sizes), group, async_op=False)
            sent_bytes += max(sizes)
        else:
            bodies = slots[:, state.head_size :]
        for r, rank in enumerate(ranks):
            with self._blamed(rank):
                encoded = wire.unpack_body(heads[rank], bodies[r, : sizes[r]])
                own_shard = prepared.shard_bytes if r == group.rank() else None
                self._decode(state.runs, encoded, state.kept[r], rows[r], own_shard)
        if self._verifies(state):
            self._verify(ranks, group, heads, rows)
        state.sequence += 1
        state.slot_size = state.head_size + max(
            _size_if_unchanged(state.runs, head) for head in heads.values()
        )
        if self.ledger is not None:
            others = group.size() - 1
            shard_bytes = prepared.shard_bytes.numel()
            self.ledger.add("all_gather", others * sent_bytes, others * shard_bytes)
            num_values = sum(run.num_values for run in state.runs)
            self.ledger.record_gather(self.group, num_values, sent_bytes, prepared.changes)

    def _read_heads(
        self, state: GroupState, ranks: list[int], slots: Tensor
    ) -> dict[int, wire.Head]:
        data = slots[:, : state.head_size].cpu().numpy()
        heads = {}
        for rank, row in zip(ranks, data, strict=True):
            with self._blamed(rank):
                heads[rank] = wire.unpack_head(row.tobytes(), len(state.runs))
        return heads

    def _decode(
        self,
        runs: tuple[Run, ...],
        encoded: list[Encoded],
        kept: list[Tensor | None],
        row: Tensor,
        own_shard: Tensor | None,
    ) -> None:
        """Decodes one rank's shard into ``row``, uint8, and replaces what is ``kept`` of it.

        ``own_shard`` is given for this rank's own, which must fail where it fails elsewhere.
        """
        keep = codec.receiver_keeps if own_shard is None else codec.sender_keeps
        for i, (run, one) in enumerate(zip(runs, encoded, strict=True)):
            kept_of_run = kept[i]
            if own_shard is not None and run.scheme.keeps_hashes and kept_of_run is not None:
                kept_of_run = codec.receiver_keeps(run.bits(own_shard), run.scheme, run.layout)
            bits = codec.decode(
                one, kept_of_run, run.num_values, run.scheme, run.layout, self.coder
            )
            row[run.start : run.stop] = bits.view(torch.uint8)
            to_keep = keep(bits, run.scheme, run.layout)
            if kept[i] is None or to_keep is None:
                kept[i] = to_keep
            elif to_keep is not kept[i]:
                kept[i].copy_(to_keep)  # in place: fresh memory would cost page faults

    def _verify(
        self, ranks: list[int], group: dist.ProcessGroup, heads: dict[int, wire.Head], rows: Tensor
    ) -> None:
        """Compares checksums of all rows with those that the senders took before encoding."""
        differs = [
            wire.checksum(row) != head.shard_checksum
            for row, head in zip(rows, heads.values(), strict=True)
        ]
        wrong = torch.tensor(differs, dtype=torch.int32, device=rows.device)
        dist.all_reduce(wrong, op=dist.ReduceOp.MAX, group=group)
        if self.ledger is not None:
            sent_bytes = all_reduce_bytes(4 * len(differs), group.size())
            self.ledger.add("all_gather", sent_bytes, plain_bytes=0)
        blamed = [rank for rank, is_wrong in zip(ranks, wrong.tolist(), strict=True) if is_wrong]
        if blamed:
            with self._blamed(blamed[0]):
                raise wire.VerificationError(
                    "was not rebuilt as it was sent, on at least one rank: caches differ. Call "
                    "reset() of the handle on every rank, or restart from the last checkpoint"
                )

    def _blamed(self, rank: int | None = None) -> AbstractContextManager[None]:
        """Says in an error which gather, and whose payload, it is about."""
        return wire.blamed(self._subject(rank))

    def _subject(self, rank: int | None) -> str:
        names = [param.name for param in self.group.params]
        gather = f"all-gather of {self.group.name} ({names[0]} .. {names[-1]}):"
        return gather if rank is None else f"{gather} the payload of rank {rank}"


def _size_if_unchanged(runs: tuple[Run, ...], head: wire.Head) -> int:
    """Bytes of the body of this rank's next payload if its shard does not change until then."""
    size = 0
    for run, (form, sections) in zip(runs, head.runs, strict=True):
        if run.scheme.treatment == "value":
            continue
        if run.scheme.treatment == "exponent" and form != Form.RAW:
            size += floats.sign_mantissa_bytes(run.num_values, run.layout)
            if run.scheme.exponent_exchange == "blocks":
                size += (-(-run.num_values // run.scheme.block_size) + 7) // 8
        else:
            size += sum(sections)
    return size
