"""What the collectives of a process group cost."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from narrowcast.allgather.codec import Scheme
from narrowcast.allgather.comm import NarrowAllGather
from narrowcast.autotune.curves import MAX_REPEATS, Curve, measure_curve, noise
from narrowcast.autotune.stopwatch import Stopwatch
from narrowcast.errors import raise_alike
from narrowcast.fsdp2 import ParamGroup, ShardedParam
from narrowcast.wire.coders import find_coder
from narrowcast.wire.exchange import exchange, largest_sizes

CURVE_SHARE = 0.25  # of the time for a link, for the curve of one operation
_ANNOUNCED = 32  # sizes
_TINY = 1 << 7  # bytes of a shard
_WHOLE = 1 << 23  # bytes of the largest shard that is gathered again from caches; W of them are


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
            changed: for what a rank does with whole shards, which no chunk shows.
        announce: seconds of ``largest_sizes``, once a step.
    """

    ranks: tuple[int, ...]
    all_gather: Curve
    reduce_scatter: Curve
    pairwise: Curve
    gather_overhead: float
    unchanged_per_byte: float
    announce: float


def measure_links(
    ranks: tuple[int, ...], groups: list[ParamGroup], device: torch.device, seconds: float
) -> Links:
    """Measures the process group of the parameter ``groups``. All its ranks must call this.

    Args:
        ranks: global ranks of the process group.
        seconds: about how long it may take.
    """
    process_group = groups[0].process_group
    stopwatch = Stopwatch([process_group], device)

    def curve(operation: Callable[[int], Callable[[], object]], largest: int) -> Curve:
        return measure_curve(operation, largest, stopwatch, CURVE_SHARE * seconds)

    largest_fp32 = max(4 * sum(group.numels) for group in groups)
    all_gather = curve(_all_gather(stopwatch), max(group.shard_bytes for group in groups))
    announce, *_ = stopwatch.times(
        lambda: largest_sizes([0] * _ANNOUNCED, process_group, device), MAX_REPEATS
    )
    whole = min(all_gather.nbytes[-1], _WHOLE)
    overhead = _unchanged_gather(process_group, _TINY, all_gather, stopwatch)
    unchanged = _unchanged_gather(process_group, whole, all_gather, stopwatch) - overhead
    return Links(
        ranks=ranks,
        all_gather=all_gather,
        reduce_scatter=curve(_reduce_scatter(stopwatch), largest_fp32),
        pairwise=curve(_pairwise(stopwatch), largest_fp32),
        gather_overhead=overhead,
        unchanged_per_byte=max(unchanged, 0.0) / whole,
        announce=announce,
    )


def _all_gather(stopwatch: Stopwatch) -> Callable[[int], Callable[[], object]]:
    (group,), device = stopwatch.groups, stopwatch.device

    def of_size(nbytes: int) -> Callable[[], object]:
        shard = noise(nbytes, device)

        def gather() -> None:  # into fresh memory, as FSDP2 does
            gathered = shard.new_empty(group.size() * nbytes)
            dist.all_gather_single(gathered, shard, group=group)

        return gather

    return of_size


def _reduce_scatter(stopwatch: Stopwatch) -> Callable[[int], Callable[[], object]]:
    (group,), device = stopwatch.groups, stopwatch.device

    def of_size(nbytes: int) -> Callable[[], object]:
        gradients = noise(group.size() * nbytes, device).view(torch.float32)

        def reduce() -> None:
            reduced = gradients.new_empty(nbytes // 4)
            dist.reduce_scatter_single(reduced, gradients, group=group)

        return reduce

    return of_size


def _pairwise(stopwatch: Stopwatch) -> Callable[[int], Callable[[], object]]:
    (group,), device = stopwatch.groups, stopwatch.device

    def of_size(nbytes: int) -> Callable[[], object]:
        payload = noise(nbytes, device)

        def exchange_and_agree() -> None:
            for _ in exchange(lambda _: payload, group):
                pass
            raise_alike(None, group, device)

        return exchange_and_agree

    return of_size


@dataclass(frozen=True)
class _OneShard:
    """As much of a parameter group as ``NarrowAllGather`` asks for."""

    process_group: dist.ProcessGroup
    params: tuple[ShardedParam]
    device: torch.device
    name: str = "calibration"
    names: tuple[str, ...] = ("weight",)


def _unchanged_gather(
    process_group: dist.ProcessGroup, nbytes: int, all_gather: Curve, stopwatch: Stopwatch
) -> float:
    """Seconds that the gather of an unchanged ``delta`` shard takes beyond that of its header."""
    param = ShardedParam("weight", nbytes // torch.bfloat16.itemsize, torch.bfloat16)
    group = _OneShard(process_group, (param,), stopwatch.device)
    comm = NarrowAllGather(group, {"weight": Scheme("delta")}, find_coder("auto"))
    shard = noise(nbytes, stopwatch.device).view(torch.bfloat16)
    size = [process_group.size() * shard.numel()]

    def gather() -> None:  # into fresh memory, as in training
        comm(comm.allocate(size, dtype=shard.dtype, device=shard.device), shard, process_group)

    gather()  # the first sends all
    seconds, *_ = stopwatch.times(gather, MAX_REPEATS)
    header_size = comm.state_of(process_group).codec.header_size
    return max(seconds - all_gather.seconds(header_size), 0.0)
