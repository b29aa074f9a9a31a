"""Measures, at the start of a run, what its links and coders cost.

A link's cost is a line: seconds = latency + bytes * seconds a byte, fitted to the times of a spread
of sizes. From it follows what a compression saves (CIERA, section 3.2, where it is Comm), from the
speeds of coders and hashes what it takes.

All ranks of a process group end with the same numbers, those of the slowest, and how often they
call a collective depends on nothing but such numbers, so none waits for another that does not come.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls
from torch import Tensor

from narrowcast import util
from narrowcast.allgather import codec
from narrowcast.allgather.codec import Scheme
from narrowcast.allgather.comm import NarrowAllGather
from narrowcast.config import MAX_CHUNK_VALUES
from narrowcast.errors import raise_alike
from narrowcast.fsdp2 import ParamGroup, ShardedParam
from narrowcast.util import aligned
from narrowcast.wire import floats
from narrowcast.wire.coders import Coder, find_coder
from narrowcast.wire.exchange import exchange, largest_sizes

_SMALLEST, _LEAST_LARGEST = 1 << 10, 1 << 16  # bytes
_RATIO = 4  # of one measured size to the one before
_REPEATS = 5  # of one measurement, at most
_CODER_REPEATS = 3
_REPEATS_SHARE = 1 / 12  # of the time for a curve, for the repeats of one size
_CURVE_SHARE = 0.25  # of the time given, for each collective
_MATTERS = 1 << 18  # bytes from which a curve's error is told
_SAMPLE = 1 << 20  # bytes to encode
_BLOCK_SIZE = 512  # values a block, of hashes
_ANNOUNCED = 32  # sizes
_TINY = 1 << 7  # bytes of a shard
_WHOLE = 1 << 23  # bytes of the largest shard that is cached to be gathered again; W of them are


@dataclass(frozen=True)
class Curve:
    """Seconds of an operation by the bytes that each rank gives.

    Attributes:
        latency, seconds_per_byte: of the fitted line.
        error: largest relative deviation of a measured time from the line, at sizes from 256 KiB
            (or at the largest, if none is as large).
        nbytes: measured sizes.
        measured: their seconds: of the slowest rank, median of a few repeats.
    """

    latency: float
    seconds_per_byte: float
    error: float
    nbytes: tuple[int, ...]
    measured: tuple[float, ...]

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes * self.seconds_per_byte

    def scaled(self, factor: float) -> "Curve":
        """The line, times a factor."""
        return replace(
            self, latency=self.latency * factor, seconds_per_byte=self.seconds_per_byte * factor
        )


@dataclass(frozen=True)
class Links:
    """What the collectives of one process group cost.

    Attributes:
        ranks: global ranks of the group.
        all_gather: by the bytes of one rank's shard.
        reduce_scatter: the backend's own, of fp32, by the bytes of the shard that one rank gets.
        pairwise: ``exchange`` and the agreement that ends a reduction, by the bytes of the payload
            for each partner.
        gather_overhead: seconds of a narrowed gather beyond the link's, however small it is.
        unchanged_per_byte: seconds a byte of the shard that one takes besides, if nothing has
            changed: what a rank does with whole shards, which no piece of one tells.
        announce: seconds of ``largest_sizes``, once a step.
    """

    ranks: tuple[int, ...]
    all_gather: Curve
    reduce_scatter: Curve
    pairwise: Curve
    gather_overhead: float
    unchanged_per_byte: float
    announce: float


@dataclass(frozen=True)
class CoderSpeed:
    """How fast a coder is on exponents of Gaussian bf16 values, while all ranks use it at once.

    Attributes:
        encode, decode: bytes of exponents a second.
        ratio: bytes in over bytes out.
        hidden: share of the encoding that goes on after the call has returned; 0 on the CPU.
    """

    name: str
    encode: float
    decode: float
    ratio: float
    hidden: float


@dataclass(frozen=True)
class HostLink:
    """Copies between the device and pinned host memory."""

    to_host: Curve
    from_host: Curve


@dataclass(frozen=True)
class Calibration:
    """What links and coders cost; the same numbers on all ranks of a process group.

    Attributes:
        links: by name of the process group.
        coders: by name.
        hashing, comparing: bytes of exponents a second, of ``block_hashes`` and ``changed_blocks``.
        host: where caches live in host memory and the model does not.
        seconds: what the calibration took.
    """

    links: dict[str, Links]
    coders: dict[str, CoderSpeed]
    hashing: float
    comparing: float
    host: HostLink | None
    seconds: float


def fit(nbytes: Sequence[int], seconds: Sequence[float]) -> Curve:
    """The line with the least squares of relative deviations, weighted by size, for it is the
    large shards that cost. Neither coefficient is negative."""
    size_N, time_N = np.asarray(nbytes, dtype=float), np.asarray(seconds, dtype=float)
    largest = size_N.max()
    relative_N2 = np.stack([1 / time_N, size_N / largest / time_N], axis=1)
    weight_N = np.sqrt(size_N / largest)
    line_2, _ = nnls(relative_N2 * weight_N[:, None], weight_N)
    deviation_N = np.abs(relative_N2 @ line_2 - 1)
    return Curve(
        latency=float(line_2[0]),
        seconds_per_byte=float(line_2[1] / largest),
        error=float(deviation_N[size_N >= min(_MATTERS, largest)].max()),
        nbytes=tuple(nbytes),
        measured=tuple(seconds),
    )


@torch.no_grad()
def calibrate(
    groups: list[ParamGroup],
    coders: dict[str, Coder],
    *,
    cache_device: str | None = None,
    seconds: float = 3.0,
) -> Calibration:
    """Measures links and coders. Every rank that shards one of the groups must call this.

    Args:
        groups: parameter groups of the model; their process groups are measured, up to the largest
            shard of each. Process groups of the same ranks are measured once.
        coders: to be measured, by name.
        cache_device: ``cpu`` where caches are to live in host memory.
        seconds: about how long it may take; slow links are measured up to smaller sizes.
    """
    start = perf_counter()
    device = groups[0].device
    by_ranks: dict[tuple[int, ...], list[ParamGroup]] = {}
    for group in groups:
        ranks = tuple(dist.get_process_group_ranks(group.process_group))
        by_ranks.setdefault(ranks, []).append(group)
    together = _Stopwatch([same[0].process_group for same in by_ranks.values()], device)
    (num_links,) = together.slowest([len(by_ranks)])
    links = {}
    for ranks, same in by_ranks.items():
        measured = _measure_links(ranks, same, device, seconds / num_links)
        links |= {group.process_group.group_name: measured for group in same}
    pieces = _exponents(device)
    speeds = {name: _measure_coder(name, coder, pieces, together) for name, coder in coders.items()}
    cached = pieces[0].clone()
    hashing = _speed(lambda: codec.block_hashes(pieces[0], _BLOCK_SIZE), cached.numel(), together)
    comparing = _speed(
        lambda: codec.changed_blocks(pieces[0], cached, _BLOCK_SIZE), cached.numel(), together
    )
    host = None
    if cache_device == "cpu" and device.type != "cpu":
        largest = max(group.shard_bytes for group in groups)
        host = _measure_host(largest, together, _CURVE_SHARE * seconds)
    (took,) = together.slowest([perf_counter() - start])
    return Calibration(links, speeds, hashing, comparing, host, took)


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class _Stopwatch:
    """Times operations that all ranks of some process groups do at once, by the slowest rank."""

    groups: list[dist.ProcessGroup]
    device: torch.device

    def slowest(self, numbers: list[float]) -> list[float]:
        """The largest of each number over the ranks of the groups, one group after the other."""
        largest = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        for group in self.groups:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return largest.tolist()

    def times(
        self, operation: Callable[[], object], repeats: int, before: Callable[[], object] = _nothing
    ) -> tuple[float, float, float]:
        """Seconds until the operation is done, and until its call has returned: each rank's median
        of repeats in a row. The third is what all of it took, with the waiting for other ranks.

        ``before``, which is not timed, uses up what a link lets pass at once after a pause.
        """
        done, returned = [], []
        begin = perf_counter()
        for group in self.groups:
            dist.barrier(group)
        before()
        for _ in range(repeats):
            start = util.now(self.device)
            operation()
            returned.append(perf_counter() - start)
            done.append(util.now(self.device) - start)
        medians = [statistics.median(done), statistics.median(returned)]
        seconds, until_return, took = self.slowest([*medians, perf_counter() - begin])
        return seconds, until_return, took


def _measure_links(
    ranks: tuple[int, ...], groups: list[ParamGroup], device: torch.device, seconds: float
) -> Links:
    """Of one process group, that of the parameter ``groups``."""
    process_group = groups[0].process_group
    world_size = process_group.size()
    stopwatch = _Stopwatch([process_group], device)

    def all_gather(nbytes: int) -> Callable[[], object]:
        shard = _noise(nbytes, device)

        def gather() -> None:  # into fresh memory, as FSDP2 does
            gathered = shard.new_empty(world_size * nbytes)
            dist.all_gather_single(gathered, shard, group=process_group)

        return gather

    def reduce_scatter(nbytes: int) -> Callable[[], object]:
        gradients = _noise(world_size * nbytes, device).view(torch.float32)

        def reduce() -> None:
            reduced = gradients.new_empty(nbytes // 4)
            dist.reduce_scatter_single(reduced, gradients, group=process_group)

        return reduce

    def pairwise(nbytes: int) -> Callable[[], object]:
        payload = _noise(nbytes, device)

        def exchange_and_agree() -> None:
            for _ in exchange(lambda _: payload, process_group):
                pass
            raise_alike(None, process_group, device)

        return exchange_and_agree

    def curve(operation: Callable[[int], Callable[[], object]], largest: int) -> Curve:
        return _measure_curve(operation, largest, stopwatch, _CURVE_SHARE * seconds)

    largest_fp32 = max(4 * sum(group.numels) for group in groups)
    gathering = curve(all_gather, max(group.shard_bytes for group in groups))
    announce, *_ = stopwatch.times(
        lambda: largest_sizes([0] * _ANNOUNCED, process_group, device), _REPEATS
    )
    whole = min(gathering.nbytes[-1], _WHOLE)
    overhead = _unchanged_gather(process_group, _TINY, gathering, stopwatch)
    unchanged = _unchanged_gather(process_group, whole, gathering, stopwatch) - overhead
    return Links(
        ranks=ranks,
        all_gather=gathering,
        reduce_scatter=curve(reduce_scatter, largest_fp32),
        pairwise=curve(pairwise, largest_fp32),
        gather_overhead=overhead,
        unchanged_per_byte=max(unchanged, 0.0) / whole,
        announce=announce,
    )


def _measure_curve(
    operation: Callable[[int], Callable[[], object]],
    largest: int,
    stopwatch: _Stopwatch,
    seconds: float,
) -> Curve:
    """Times ``operation(nbytes)`` for sizes up to the ``largest``, or as far as ``seconds`` go."""
    sizes = _sizes(largest)
    smaller = operation(sizes[0])
    expected, _, spent = stopwatch.times(smaller, 1)  # a warm-up
    measured: list[float] = []
    for i, size in enumerate(sizes):
        if i >= 2:
            growth = max(measured[-1] - measured[-2], 0.0) / (sizes[i - 1] - sizes[i - 2])
            expected = measured[-1] + growth * (size - sizes[i - 1])
            if spent + expected > seconds:
                break
        repeats = min(max(int(_REPEATS_SHARE * seconds / expected), 1), _REPEATS)
        this = operation(size)
        expected, _, took = stopwatch.times(this, repeats, before=this if repeats > 1 else smaller)
        smaller = this
        measured.append(expected)
        spent += took
    return fit(sizes[: len(measured)], measured)


def _sizes(largest: int) -> list[int]:
    """Ascending sizes at a ratio of 4, multiples of 4 bytes; integers, for all ranks need the same
    ones."""
    sizes = [max(largest, _LEAST_LARGEST)]
    while sizes[-1] >= _RATIO * _SMALLEST:
        sizes.append(sizes[-1] // _RATIO)
    return [size + -size % 4 for size in reversed(sizes)]


@dataclass(frozen=True)
class _OneShard:
    """As much of a parameter group as ``NarrowAllGather`` asks for."""

    process_group: dist.ProcessGroup
    params: tuple[ShardedParam]
    device: torch.device
    name: str = "calibration"
    names: tuple[str, ...] = ("weight",)


def _unchanged_gather(
    process_group: dist.ProcessGroup, nbytes: int, gathering: Curve, stopwatch: _Stopwatch
) -> float:
    """Seconds that the gather of an unchanged ``delta`` shard takes beyond that of its header."""
    param = ShardedParam("weight", nbytes // torch.bfloat16.itemsize, torch.bfloat16)
    group = _OneShard(process_group, (param,), stopwatch.device)
    comm = NarrowAllGather(group, {"weight": Scheme("delta")}, find_coder("auto"))
    shard = _noise(nbytes, stopwatch.device).view(torch.bfloat16)
    size = [process_group.size() * shard.numel()]

    def gather() -> None:  # into fresh memory, as in training
        comm(comm.allocate(size, dtype=shard.dtype, device=shard.device), shard, process_group)

    gather()  # the first sends all
    seconds, *_ = stopwatch.times(gather, _REPEATS)
    header_size = comm.state_of(process_group).codec.header_size
    return max(seconds - gathering.seconds(header_size), 0.0)


def _noise(nbytes: int, device: torch.device) -> Tensor:
    """Bytes (uint8) of Gaussian fp32 values, which no link makes smaller on its way; the same ones
    again and again after a MiB."""
    generator = torch.Generator().manual_seed(0)  # the job's own stays as it is
    values = torch.randn(_SAMPLE // 4, generator=generator, device="cpu").view(torch.uint8)
    return values.repeat(-(-nbytes // _SAMPLE))[:nbytes].to(device)


def _exponents(device: torch.device) -> list[Tensor]:
    """Exponents of Gaussian bf16 values, in pieces as they are coded in training."""
    generator = torch.Generator().manual_seed(0)  # the job's own stays as it is
    values = torch.randn(_SAMPLE, generator=generator, device="cpu").to(device, torch.bfloat16)
    layout = floats.LAYOUTS[torch.bfloat16]
    return list(floats.exponents(values.view(layout.bits), layout).split(MAX_CHUNK_VALUES))


def _measure_coder(
    name: str, coder: Coder, pieces: list[Tensor], stopwatch: _Stopwatch
) -> CoderSpeed:
    def encode() -> list[Tensor]:
        return [coder.encode(piece) for piece in pieces]

    streams = encode()
    encoding, returned, _ = stopwatch.times(encode, _CODER_REPEATS)
    decode = _speed(
        lambda: [
            coder.decode(stream, piece.numel())
            for stream, piece in zip(streams, pieces, strict=True)
        ],
        _SAMPLE,
        stopwatch,
    )
    return CoderSpeed(
        name=name,
        encode=_SAMPLE / encoding,
        decode=decode,
        ratio=_SAMPLE / sum(stream.numel() for stream in streams),
        hidden=0.0 if stopwatch.device.type == "cpu" else 1 - returned / encoding,
    )


def _speed(operation: Callable[[], object], nbytes: int, stopwatch: _Stopwatch) -> float:
    """Bytes a second of an operation on as many bytes."""
    operation()  # a warm-up
    seconds, *_ = stopwatch.times(operation, _CODER_REPEATS)
    return nbytes / seconds


def _measure_host(largest: int, stopwatch: _Stopwatch, seconds: float) -> HostLink:
    def copy(nbytes: int, to_host: bool) -> Callable[[], object]:
        there = _noise(nbytes, stopwatch.device)
        here = _noise(nbytes, torch.device("cpu")).pin_memory()
        target, source = (here, there) if to_host else (there, here)
        return lambda: target.copy_(source, non_blocking=True)

    return HostLink(
        *(
            _measure_curve(partial(copy, to_host=to_host), largest, stopwatch, seconds)
            for to_host in (True, False)
        )
    )


def table(calibration: Calibration) -> str:
    """What links cost, as latency and what each rank sends a second, by process group (its ranks),
    and how fast coders are."""
    measured = {links.ranks: links for links in calibration.links.values()}
    rows = [["ranks", "all-gather", "reduce-scatter", "pairwise", "narrowed gather", "sizes"]]
    for ranks, links in measured.items():
        curves = (links.all_gather, links.reduce_scatter, links.pairwise)
        cells = [_describe(curve, len(ranks) - 1) for curve in curves]
        unchanged = f"{1e3 * 2**20 * links.unchanged_per_byte:.1f} ms/MiB"
        narrowed = f"+ {1e6 * links.gather_overhead:.0f} us + {unchanged}"
        rows.append([_ranges(ranks), *cells, narrowed, f"{1e6 * links.announce:.0f} us"])
    coders = [["coder", "encodes", "decodes", "ratio", "hidden"]]
    for name, coder in calibration.coders.items():
        speeds = [f"{1e-6 * speed:.0f} MB/s" for speed in (coder.encode, coder.decode)]
        coders.append([name, *speeds, f"{coder.ratio:.2f}", f"{100 * coder.hidden:.0f} %"])
    others = {"hashing": calibration.hashing, "comparing": calibration.comparing}
    lines = [f"{name} {1e-6 * speed:.0f} MB/s" for name, speed in others.items()]
    if calibration.host is not None:
        lines.append(f"to the host {_describe(calibration.host.to_host, 1)}")
        lines.append(f"from the host {_describe(calibration.host.from_host, 1)}")
    lines.append(f"measured in {calibration.seconds:.1f} s")
    return "\n".join([aligned(rows, 1), aligned(coders, 1), ", ".join(lines)])


def _describe(curve: Curve, copies: int) -> str:
    """``copies``: how often each rank sends its bytes."""
    seconds = curve.seconds_per_byte / copies
    rate = f"{8e-6 / seconds:.0f} Mbit/s" if seconds else "any rate"
    return f"{1e6 * curve.latency:.0f} us + {rate} (+- {100 * curve.error:.0f} %)"


def _ranges(ranks: tuple[int, ...]) -> str:
    """Ranks in ascending order, as in ``0-3,8``."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    return ",".join("-".join(map(str, ends)) for ends in ranges)


def as_json(calibration: Calibration) -> dict[str, Any]:
    """All of it, as strict JSON holds it."""
    return json.loads(json.dumps(asdict(calibration), allow_nan=False))
