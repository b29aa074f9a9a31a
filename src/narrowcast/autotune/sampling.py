"""Watches the shards of a training run: how much of them changes, and what each compression costs.

    step s      optimizer | some pieces of shards are copied
    step s + 1  optimizer | the same pieces are compared, encoded and decoded; others are copied

A piece is a stretch of a shard as long as what the codec encodes at once. Each rank looks at other
shards first, and sums go over all ranks. How many pieces a step has room for is agreed upon by all
ranks, so that they look at the same time and within ``share`` of a step. Training is not touched.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast import util
from narrowcast.allgather import codec
from narrowcast.allgather.codec import BlockCheck, ExponentCoding, Scheme
from narrowcast.config import MAX_CHUNK_VALUES
from narrowcast.fsdp2 import ParamGroup
from narrowcast.telemetry.changes import Changes, count_changes
from narrowcast.util import Summable
from narrowcast.wire import floats, packet
from narrowcast.wire.coders import Coder
from narrowcast.wire.exchange import send_buffer
from narrowcast.wire.floats import FloatLayout

COMPRESSIONS = ("delta", "exponent", "entropy", "none")
SHARE = 0.012  # of a step; with copies and gradients it stays below 2 %
ALL = ""  # in the place of a parameter's name: the long pieces of any


@dataclass(frozen=True)
class Cost(Summable):
    """What a compression takes of the pieces of a shard, summed: in the first gather after a step
    of the optimizer, and in a later one. Bytes, and seconds of one rank for one rank's shard."""

    first_bytes: float = 0.0
    later_bytes: float = 0.0
    first_hashing: float = 0.0
    later_hashing: float = 0.0
    first_encoding: float = 0.0
    later_encoding: float = 0.0
    first_decoding: float = 0.0
    later_decoding: float = 0.0

    def scaled(self, factor: float) -> "Cost":
        return Cost(*(getattr(self, f.name) * factor for f in fields(self)))


@dataclass(frozen=True)
class SampleStats:
    """Sums over the pieces of a shard that were looked at; ``changes.values`` is their size."""

    changes: Changes = field(default_factory=Changes)
    costs: tuple[Cost, ...] = (Cost(),) * len(COMPRESSIONS)

    def __add__(self, other: "SampleStats") -> "SampleStats":
        costs = tuple(a + b for a, b in zip(self.costs, other.costs, strict=True))
        return SampleStats(self.changes + other.changes, costs)

    def a_value(self, compression: str) -> Cost:
        """The mean of a value."""
        return self.costs[COMPRESSIONS.index(compression)].scaled(1 / max(self.changes.values, 1))

    def at_the_speed_of(self, other: "SampleStats") -> "SampleStats":
        """With the seconds a value of another, and its own bytes."""
        share = self.changes.values / max(other.changes.values, 1)
        costs = tuple(
            replace(
                theirs.scaled(share), first_bytes=ours.first_bytes, later_bytes=ours.later_bytes
            )
            for ours, theirs in zip(self.costs, other.costs, strict=True)
        )
        return SampleStats(self.changes, costs)

    def to_numbers(self) -> list[float]:
        parts = (self.changes, *self.costs)
        return [float(getattr(part, f.name)) for part in parts for f in fields(part)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> "SampleStats":
        counts, width = len(fields(Changes)), len(fields(Cost))
        rest = numbers[counts:]
        costs = [Cost(*rest[i : i + width]) for i in range(0, len(rest), width)]
        return cls(Changes(*map(round, numbers[:counts])), tuple(costs))


NUM_NUMBERS = len(SampleStats().to_numbers())


class SampleHistory:
    """The samples of all ranks over the sampling windows of a run.

    Attributes:
        samples: by parameter, of the last window in which it was sampled; of ``ALL``, of the last
            two windows, since the times of few chunks are noisy.
    """

    def __init__(self) -> None:
        self.samples: dict[str, SampleStats] = {}
        self._last_of_all = SampleStats()

    def add(self, window: dict[str, SampleStats]) -> None:
        """Takes the samples of one window, by parameter and of ``ALL``."""
        before, self._last_of_all = self._last_of_all, window[ALL]
        self.samples |= {name: stats for name, stats in window.items() if stats.changes.values}
        self.samples[ALL] = before + self._last_of_all

    @property
    def has_any(self) -> bool:
        """Whether anything was sampled so far."""
        return any(stats.changes.values for stats in self.samples.values())


def examine(
    old_N: Tensor,
    new_N: Tensor,
    layout: FloatLayout,
    scheme: Scheme,
    coder: Coder,
    counts: bool = True,
) -> SampleStats:
    """Looks at a piece of a shard as it was before a step of the optimizer, and as it is after.

    Args:
        old_N, new_N: as integers of ``layout.bits``.
        scheme: how exponents are exchanged; its compression does not matter.
        counts: whether gathers count what changed, as with a ledger.
    """
    changes = count_changes(new_N, old_N, layout, scheme.block_size)
    costs = []
    for compression in COMPRESSIONS:
        passage = _Passage(replace(scheme, compression=compression), layout, coder, counts)
        first = passage.gather(old_N, new_N, is_first=True)
        later = replace(first, preparing=0.0)  # of coded and raw shards nothing is cached
        if compression in ("delta", "exponent"):
            later = passage.gather(new_N, new_N, is_first=False)
        pairs = zip(first.cost, later.cost, strict=True)
        costs.append(Cost(*(number for pair in pairs for number in pair)))
    return SampleStats(changes, tuple(costs))


@dataclass(frozen=True)
class _Gather:
    """Bytes that a piece takes in one gather, and seconds: of what only the first gather of a step
    has to do before it encodes, of hashing, of other encoding, and of decoding by one rank."""

    nbytes: float
    preparing: float
    hashing: float
    encoding: float
    decoding: float

    @property
    def cost(self) -> tuple[float, float, float, float]:
        return self.nbytes, self.hashing, self.preparing + self.encoding, self.decoding


@dataclass(frozen=True)
class _Passage:
    """The way of a shard through ``comm`` but for the link, by the same functions, timed.

    What is compared or copied lies in memory of its own, as it does there: ``torch.equal`` of a
    tensor with itself returns at once.
    """

    scheme: Scheme
    layout: FloatLayout
    coder: Coder
    counts: bool

    def gather(self, before_N: Tensor, new_N: Tensor, is_first: bool) -> _Gather:
        """Of ``new_N``, where ``before_N`` was gathered before."""
        scheme, layout, device = self.scheme, self.layout, new_N.device
        before_N = before_N.clone()
        cached = codec.sender_cache(before_N, scheme, layout)
        cached_N = codec.receiver_cache(before_N, scheme, layout)
        row_N = torch.empty_like(new_N)
        shard_N, preparing = new_N, 0.0
        if is_first:
            start = util.now(device)
            shard_N = self._prepared(new_N, cached)
            preparing = util.now(device) - start
        hashing = self._hashing(shard_N, cached)
        start = util.now(device)
        encoded = codec.encode(shard_N, cached, scheme, layout, self.coder)
        payload = packet.pack(
            [encoded], coder=self.coder, settings=0, sequence=0, shard_checksum=0, device=device
        )
        buffer = send_buffer(payload, payload.numel())
        encoding = max(util.now(device) - start - hashing, 0.0)
        start = util.now(device)
        (arrived,) = packet.unpack_body(*packet.unpack(buffer))
        bits_N = codec.decode(arrived, cached_N, new_N.numel(), scheme, layout, self.coder)
        row_N.copy_(bits_N)
        to_cache = codec.receiver_cache(bits_N, scheme, layout)
        if to_cache is not cached_N:
            cached_N.copy_(to_cache)
        decoding = util.now(device) - start
        if scheme.caches_hashes:  # of what it has sent, when it decodes its own
            hashing += self._hashing(shard_N, cached)
        return _Gather(encoded.size, preparing, hashing, encoding, decoding)

    def _prepared(self, new_N: Tensor, cached: Tensor | None) -> Tensor:
        """The shard as it is encoded ahead: cast, joined, counted, and compared when it is due."""
        shard_N = torch.cat([new_N.clone()])
        if self.counts and cached is not None and not self.scheme.caches_hashes:
            count_changes(shard_N, cached, self.layout, self.scheme.block_size)
        torch.equal(shard_N, new_N)
        return shard_N

    def _hashing(self, shard_N: Tensor, cached: Tensor | None) -> float:
        """Seconds to find the changed blocks, which is a part of encoding."""
        scheme = self.scheme
        if scheme.compression != "exponent" or scheme.exponent_coding != "blocks":
            return 0.0
        start = util.now(shard_N.device)
        exponents_N = floats.exponents(shard_N, self.layout)
        if scheme.caches_hashes:
            codec.block_hashes(exponents_N, scheme.block_size)
        else:
            codec.changed_blocks(exponents_N, cached, scheme.block_size)
        return util.now(shard_N.device) - start


@dataclass(frozen=True)
class _Piece:
    """A stretch of a shard, as it was after the step before."""

    group: int
    param: int
    start: int
    bits_N: Tensor


class Sampler:
    """Looks at pieces of the shards of parameter groups, after each step of the optimizer.

    Times are taken where a piece is long, since shards are encoded together, and bytes everywhere.

    Attributes:
        scheme: how exponents are exchanged; its compression does not matter.
        coder: as of training.
        counts: whether gathers count what changed.
        seen: by parameter, and of ``ALL``, on this rank since ``clear``.
        pieces_a_step: how many there is room for; 0 until it is known.
        spent, elapsed: seconds that went into looking since ``clear``, and that passed meanwhile.

    Args:
        names: of the parameters to look at.
        share: of a step's time that looking may take; infinite: every whole shard, every step.
        job: the ranks that look; ``None``: all.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        names: set[str],
        *,
        exponent_coding: ExponentCoding,
        block_size: int,
        block_check: BlockCheck,
        coder: Coder,
        counts: bool = True,
        share: float = SHARE,
        job: dist.ProcessGroup | None = None,
    ) -> None:
        self._groups, self._job = groups, job
        self.scheme = Scheme("delta", exponent_coding, block_size, block_check)
        self.coder, self.counts, self._share = coder, counts, share
        self._names = names
        self._take_turns()
        self._next, self._due, self._steps = 0, 0.0, 0
        self._looks = False  # at the next step, on every rank
        self._pieces: list[_Piece] = []
        self._ended = 0.0
        self._cost = self._cost_of_a_piece()
        self.pieces_a_step = 0.0 if math.isfinite(share) else float(len(self._turns))
        self.seen: dict[str, SampleStats] = {}
        self.spent = self.elapsed = 0.0

    def _take_turns(self) -> None:
        limit = MAX_CHUNK_VALUES if math.isfinite(self._share) else None
        turns = _turns(self._groups, self._names, limit)
        first = dist.get_rank(self._job) * len(turns) // dist.get_world_size(self._job)
        self._turns = turns[first:] + turns[:first]
        self._longest = max((turn[3] - turn[2] for turn in turns), default=0)

    def after_step(self) -> dict[str, Changes]:
        """Looks at what there is room for. Every rank must call it, or ``pause``, after each step.

        Returns:
            What changed, by parameter that was looked at.
        """
        start = time.perf_counter()
        self._steps += 1
        if self._steps == 1:
            self._take_turns()  # the model may have been cast until it was first used
        if self._steps == 3 and not self.pieces_a_step:  # the first step is not like others
            self._agree(start - self._ended)
        changes: dict[str, Changes] = {}
        if self._looks:
            dist.barrier(self._job)  # coding is timed while all ranks code, as in training
        for piece in self._pieces:
            group = self._groups[piece.group]
            info = group.params[piece.param]
            layout = floats.LAYOUTS[info.dtype]
            stop = piece.start + piece.bits_N.numel()
            new_N = group.piece(piece.param, piece.start, stop).view(layout.bits)
            seen = examine(piece.bits_N, new_N, layout, self.scheme, self.coder, self.counts)
            whole = 2 * new_N.numel() > self._longest
            for name in (info.name, ALL) if whole else (info.name,):
                self.seen[name] = self.seen.get(name, SampleStats()) + seen
            changes[info.name] = changes.get(info.name, Changes()) + seen.changes
        self._due += self.pieces_a_step
        self._looks = int(self._due) > 0
        self._pieces = [self._copy() for _ in range(min(int(self._due), len(self._turns)))]
        self._due -= int(self._due)
        before, self._ended = self._ended, time.perf_counter()
        if before:
            self.elapsed += self._ended - before
            self.spent += self._ended - start
        return changes

    def pause(self) -> None:
        """In the place of ``after_step``: the next one has nothing to compare with."""
        self._pieces, self._looks, self._ended = [], False, 0.0

    def clear(self) -> None:
        """Forgets what was seen."""
        self.seen = {}
        self.spent = self.elapsed = 0.0

    def _cost_of_a_piece(self) -> float:
        """Seconds to look at the largest one, as all ranks do at once."""
        group, param, start, stop = max(
            self._turns, key=lambda turn: turn[3] - turn[2], default=(0, 0, 0, 0)
        )
        info, device = self._groups[group].params[param], self._groups[group].device
        layout = floats.LAYOUTS.get(info.dtype, floats.LAYOUTS[torch.bfloat16])
        # Not the parameters themselves, which may have no memory yet.
        generator = torch.Generator().manual_seed(0)  # the job's own stays as it is
        values_N = torch.randn(stop - start, generator=generator, dtype=torch.float32, device="cpu")
        flips_N = torch.rand(stop - start, generator=generator, device="cpu") < 0.5
        bits_N = values_N.to(device, info.dtype).view(layout.bits)
        other_N = bits_N ^ flips_N.to(device)
        began = 0.0
        for _ in range(2):  # the first call of everything takes longer
            dist.barrier(self._job)
            began = time.perf_counter()
            examine(bits_N, other_N, layout, self.scheme, self.coder, self.counts)
        return time.perf_counter() - began

    def _agree(self, step_seconds: float) -> None:
        """How many pieces a step has room for: of the slowest rank, the shortest step."""
        device = self._groups[0].device
        slowest = torch.tensor([self._cost, -step_seconds], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self._job)
        cost, shortest_step = slowest[0].item(), -slowest[1].item()
        self.pieces_a_step = self._share * shortest_step / max(cost, 1e-9)

    def _copy(self) -> _Piece:
        group, param, start, stop = self._turns[self._next % len(self._turns)]
        self._next += 1
        layout = floats.LAYOUTS[self._groups[group].params[param].dtype]
        bits_N = self._groups[group].piece(param, start, stop).view(layout.bits)
        return _Piece(group, param, start, bits_N)


def _turns(
    groups: list[ParamGroup], names: set[str], limit: int | None
) -> list[tuple[int, int, int, int]]:
    """Group, parameter, start and stop of all pieces of at most ``limit`` values (None: no limit),
    in the order in which they are looked at: one of each shard, then the next of each."""
    turns = []
    for g, group in enumerate(groups):
        for p, info in enumerate(group.params):
            if info.name not in names or info.dtype not in floats.LAYOUTS:
                continue
            numel = info.numel
            size = min(limit or numel, numel)
            for start in range(0, numel, size) if numel else ():
                turns.append((start // size, -numel, g, p, start, min(start + size, numel)))
    return [turn[2:] for turn in sorted(turns)]


def sum_over_ranks(
    seen: dict[str, SampleStats],
    names: Sequence[str],
    device: torch.device,
    job: dist.ProcessGroup | None = None,
) -> dict[str, SampleStats]:
    """What all ranks have seen together, by parameter. ``names`` are the same on every rank."""
    rows = [seen.get(name, SampleStats()).to_numbers() for name in names]
    sums = torch.tensor(rows, dtype=torch.float64, device=device).view(-1, NUM_NUMBERS)
    dist.all_reduce(sums, group=job)
    return {
        name: SampleStats.from_numbers(row) for name, row in zip(names, sums.tolist(), strict=True)
    }
