"""Samples the shards of a training run: how much of them changes, and what each compression costs.

    step s      optimizer | some chunks of shards are copied
    step s + 1  optimizer | the same chunks are compared, encoded and decoded; others are copied

A chunk is as long as what the codec encodes at once. Each rank begins with other shards, and sums
go over all ranks. How many chunks a step has time for is agreed by all ranks, so that they sample
at the same time and within ``share`` of a step. Training is not changed.
"""

import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.allgather.codec import BlockCheck, ExponentCoding, Scheme
from narrowcast.autotune.sample_stats import ALL, SampleStats
from narrowcast.autotune.timed_gather import sample_chunk
from narrowcast.config import MAX_CHUNK_VALUES
from narrowcast.fsdp2 import ParamGroup
from narrowcast.telemetry.changes import Changes
from narrowcast.wire import floats
from narrowcast.wire.coders import Coder

SHARE = 0.012  # of a step; with copies and gradients it stays below 2 %


@dataclass(frozen=True)
class ChunkPlace:
    """Where a chunk lies: values ``start`` to ``stop`` of the shard of parameter ``param`` of group
    ``group``, by their indices."""

    group: int
    param: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def chunk_places(groups: list[ParamGroup], names: set[str], limit: int | None) -> list[ChunkPlace]:
    """All chunks of at most ``limit`` values (``None``: no limit) of the named parameters, in the
    order in which they are sampled: one of each shard, the largest first, then the next of each."""
    places = []
    for g, group in enumerate(groups):
        for p, info in enumerate(group.params):
            if info.name not in names or info.dtype not in floats.LAYOUTS:
                continue
            numel = info.numel
            size = min(limit or numel, numel)
            for start in range(0, numel, size) if numel else ():
                stop = min(start + size, numel)
                places.append((start // size, -numel, g, p, start, stop))
    return [ChunkPlace(*place[2:]) for place in sorted(places)]


def read_chunk(groups: list[ParamGroup], place: ChunkPlace) -> Tensor:
    """The chunk as it would be gathered now, as integers: a copy."""
    group = groups[place.group]
    layout = floats.LAYOUTS[group.params[place.param].dtype]
    return group.piece(place.param, place.start, place.stop).view(layout.bits)


class Sampler:
    """Samples chunks of the shards of parameter groups, after each step of the optimizer.

    Times are taken where a chunk is long, since shards are encoded together, and bytes everywhere.

    Attributes:
        scheme: how exponents are encoded; its compression does not matter.
        coder: entropy coder of training.
        samples: by parameter, and of ``ALL``, on this rank since ``clear``.
        chunks_per_step: how many there is time for; 0 until it is known.
        seconds, elapsed: seconds spent on sampling since ``clear``, and that passed meanwhile.

    Args:
        names: of the parameters to sample.
        share: of a step's time that sampling may take; infinite: every whole shard, every step.
        job: the ranks that sample; ``None``: all.
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
        share: float = SHARE,
        job: dist.ProcessGroup | None = None,
    ) -> None:
        self._groups, self._names, self._job = groups, names, job
        self.scheme = Scheme("delta", exponent_coding, block_size, block_check)
        self.coder, self._share = coder, share
        self._find_places()
        self._next, self._allowed, self._steps = 0, 0.0, 0
        self._copies: list[tuple[ChunkPlace, Tensor]] = []
        self._samples_next = False  # at the next step, on every rank
        self._ended = 0.0
        self._chunk_seconds = self._time_largest_chunk()
        self.chunks_per_step = 0.0 if math.isfinite(share) else float(len(self._places))
        self.samples: dict[str, SampleStats] = {}
        self.seconds = self.elapsed = 0.0

    def after_step(self) -> dict[str, Changes]:
        """Samples as many chunks as there is time for. Every rank must call this, or ``pause``,
        after each step.

        Returns:
            What changed, by sampled parameter.
        """
        start = time.perf_counter()
        self._steps += 1
        if self._steps == 1:
            self._find_places()  # the model may have been cast until it was first used
        if self._steps == 3 and not self.chunks_per_step:  # the first step is not like others
            self._agree_on_chunks(start - self._ended)
        changes = self._sample_copies()
        self._copy_next()
        before, self._ended = self._ended, time.perf_counter()
        if before:
            self.elapsed += self._ended - before
            self.seconds += self._ended - start
        return changes

    def pause(self) -> None:
        """Skips a step: the next ``after_step`` has nothing to compare with."""
        self._copies, self._samples_next, self._ended = [], False, 0.0

    def clear(self) -> None:
        """Forgets the samples, and begins to count seconds from zero."""
        self.samples = {}
        self.seconds = self.elapsed = 0.0

    def _find_places(self) -> None:
        limit = MAX_CHUNK_VALUES if math.isfinite(self._share) else None
        places = chunk_places(self._groups, self._names, limit)
        first = dist.get_rank(self._job) * len(places) // dist.get_world_size(self._job)
        self._places = places[first:] + places[:first]
        self._largest = max(places, key=lambda place: place.size, default=ChunkPlace(0, 0, 0, 0))

    def _sample_copies(self) -> dict[str, Changes]:
        """Compares the chunks that were copied after the last step with what they are now."""
        if self._samples_next:
            dist.barrier(self._job)  # coding is timed while all ranks code, as in training
        changes: dict[str, Changes] = {}
        for place, old_N in self._copies:
            info = self._groups[place.group].params[place.param]
            layout, new_N = floats.LAYOUTS[info.dtype], read_chunk(self._groups, place)
            stats = sample_chunk(old_N, new_N, layout, self.scheme, self.coder)
            is_long = 2 * place.size > self._largest.size
            for name in (info.name, ALL) if is_long else (info.name,):
                self.samples[name] = self.samples.get(name, SampleStats()) + stats
            changes[info.name] = changes.get(info.name, Changes()) + stats.changes
        return changes

    def _copy_next(self) -> None:
        """Copies the chunks that are sampled after the next step."""
        self._allowed += self.chunks_per_step
        num_chunks = int(self._allowed)
        self._allowed -= num_chunks
        self._samples_next = num_chunks > 0
        self._copies = []
        for _ in range(min(num_chunks, len(self._places))):
            place = self._places[self._next % len(self._places)]
            self._copies.append((place, read_chunk(self._groups, place)))
            self._next += 1

    def _time_largest_chunk(self) -> float:
        """Seconds to sample the largest chunk while all ranks do the same. It holds random values:
        parameters may have no memory yet."""
        group, size = self._groups[self._largest.group], self._largest.size
        dtype = group.params[self._largest.param].dtype
        layout = floats.LAYOUTS.get(dtype, floats.LAYOUTS[torch.bfloat16])
        generator = torch.Generator().manual_seed(0)  # the job's own stays as it is
        values_N = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
        flips_N = torch.rand(size, generator=generator, device="cpu") < 0.5
        old_N = values_N.to(group.device, dtype).view(layout.bits)
        new_N = old_N ^ flips_N.to(group.device)
        start = 0.0
        for _ in range(2):  # the first call of everything takes longer
            dist.barrier(self._job)
            start = time.perf_counter()
            sample_chunk(old_N, new_N, layout, self.scheme, self.coder)
        return time.perf_counter() - start

    def _agree_on_chunks(self, step_seconds: float) -> None:
        """Sets how many chunks a step has time for: by the slowest rank and the shortest step."""
        longest = torch.tensor(
            [self._chunk_seconds, -step_seconds], dtype=torch.float64, device=self._groups[0].device
        )
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self._job)
        chunk_seconds, shortest_step = longest[0].item(), -longest[1].item()
        self.chunks_per_step = self._share * shortest_step / max(chunk_seconds, 1e-9)
