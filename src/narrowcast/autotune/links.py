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
from narrowcast.reducescatter.two_levels import sum_within
from narrowcast.topology import Topology, TwoLevels
from narrowcast.wire.coders import find_coder
from narrowcast.wire.exchange import exchange, largest_sizes

CURVE_SHARE = 0.25  # of the time for a link, for the curve of one operation
_ANNOUNCED = 32  # sizes
_TINY = 1 << 7  # bytes of a shard
_WHOLE = 1 << 23  # bytes of the largest shard that is gathered again from caches; W of them are


@dataclass(frozen=True)
class LevelLinks:
    """What narrowed collectives cost where nodes complete them within themselves.

    Attributes:
        nodes: how many ranks exchange payloads with each other, one of each node.
        payload_gather: the all-gather among them, by the bytes of one rank's payload.
        sum_within: sums within nodes, of fp32, by the bytes of the shard that one rank gets.
    """

    nodes: int
    payload_gather: Curve
    sum_within: Curve


@dataclass(frozen=True)
class Links:
    """What the collectives of one process group cost.

    Attributes:
        ranks: global ranks of the group.
        all_gather: the backend's own, by the bytes of one rank's shard.
        reduce_scatter: the backend's own, of fp32, by the bytes of the shard that one rank gets.
        pairwise: ``exchange`` and the agreement that ends a reduction, by the bytes of the payload
            for each partner.
        gather_overhead: seconds of a narrowed gather beyond the link's, however small it is.
        unchanged_per_byte: seconds a byte of the shard that one takes besides, if nothing has
            changed: for what a rank does with whole shards, which no chunk shows, and for the
            gathers within nodes.
        announce: seconds of ``largest_sizes``, once a step.
        levels: of a process group of several ranks on each of several nodes; ``None`` of others.
    """

    ranks: tuple[int, ...]
    all_gather: Curve
    reduce_scatter: Curve
    pairwise: Curve
    gather_overhead: float
    unchanged_per_byte: float
    announce: float
    levels: LevelLinks | None = None

    @property
    def payloads(self) -> int:
        """How many ranks exchange payloads with each other: all, or one of each node."""
        return len(self.ranks) if self.levels is None else self.levels.nodes

    @property
    def payload_gather(self) -> Curve:
        """The all-gather among the ranks that exchange payloads."""
        return self.all_gather if self.levels is None else self.levels.payload_gather


def measure_links(
    ranks: tuple[int, ...],
    groups: list[ParamGroup],
    device: torch.device,
    seconds: float,
    topology: Topology,
) -> Links:
    """Measures the process group of the parameter ``groups``. All its ranks must call this.

    Args:
        ranks: global ranks of the process group.
        seconds: about how long it may take.
    """
    process_group = groups[0].process_group
    levels, payload_group = topology.levels_of(process_group), topology.payload_group(process_group)
    stopwatch = Stopwatch([process_group], device)

    def curve(operation: Callable[[int], Callable[[], object]], largest: int) -> Curve:
        return measure_curve(operation, largest, stopwatch, CURVE_SHARE * seconds)

    largest_fp32 = max(4 * sum(group.numels) for group in groups)
    largest_shard = max(group.shard_bytes for group in groups)
    all_gather = curve(_all_gather(process_group, device), largest_shard)
    of_levels = None
    if levels is not None:
        of_levels = LevelLinks(
            levels.across.size(),
            curve(_all_gather(levels.across, device), largest_shard),
            curve(_sum_within(process_group, levels, device), largest_fp32),
        )
    payload_gather = all_gather if of_levels is None else of_levels.payload_gather
    announce, *_ = stopwatch.times(
        lambda: largest_sizes([0] * _ANNOUNCED, payload_group, device), MAX_REPEATS
    )
    whole = min(all_gather.nbytes[-1], _WHOLE)
    overhead = _unchanged_gather(topology, _TINY, payload_gather, stopwatch)
    unchanged = _unchanged_gather(topology, whole, payload_gather, stopwatch) - overhead
    return Links(
        ranks=ranks,
        all_gather=all_gather,
        reduce_scatter=curve(_reduce_scatter(stopwatch), largest_fp32),
        pairwise=curve(_pairwise(payload_group, stopwatch), largest_fp32),
        gather_overhead=overhead,
        unchanged_per_byte=max(unchanged, 0.0) / whole,
        announce=announce,
        levels=of_levels,
    )


def _all_gather(
    group: dist.ProcessGroup, device: torch.device
) -> Callable[[int], Callable[[], object]]:
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


def _sum_within(
    group: dist.ProcessGroup, levels: TwoLevels, device: torch.device
) -> Callable[[int], Callable[[], object]]:
    def of_size(nbytes: int) -> Callable[[], object]:
        gradients = noise(group.size() * nbytes, device).view(torch.float32)
        return lambda: sum_within(gradients.view(group.size(), -1), levels)

    return of_size


def _pairwise(
    payload_group: dist.ProcessGroup, stopwatch: Stopwatch
) -> Callable[[int], Callable[[], object]]:
    (group,), device = stopwatch.groups, stopwatch.device

    def of_size(nbytes: int) -> Callable[[], object]:
        payload = noise(nbytes, device)

        def exchange_and_agree() -> None:
            for _ in exchange(lambda _: payload, payload_group):
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
    topology: Topology, nbytes: int, payload_gather: Curve, stopwatch: Stopwatch
) -> float:
    """Seconds that the gather of an unchanged ``delta`` shard takes beyond that of its header."""
    (process_group,) = stopwatch.groups
    param = ShardedParam("weight", nbytes // torch.bfloat16.itemsize, torch.bfloat16)
    group = _OneShard(process_group, (param,), stopwatch.device)
    schemes = {"weight": Scheme("delta")}
    comm = NarrowAllGather(group, schemes, find_coder("auto"), topology=topology)
    shard = noise(nbytes, stopwatch.device).view(torch.bfloat16)
    size = [process_group.size() * shard.numel()]

    def gather() -> None:  # into fresh memory, as in training
        comm(comm.allocate(size, dtype=shard.dtype, device=shard.device), shard, process_group)

    gather()  # the first sends all
    seconds, *_ = stopwatch.times(gather, MAX_REPEATS)
    header_size = comm.state_of(process_group).codec.header_size
    return max(seconds - payload_gather.seconds(header_size), 0.0)
