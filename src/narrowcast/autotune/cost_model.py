"""What each compression of each shard costs a step, in seconds (CIERA, section 3.2).

    gain = Comm(S) - [Comm(payload) + T_hash + T_encode + T_decode]

for every gather of a step: the first after the optimizer, and the later ones, in which nothing has
changed. ``Comm`` is the measured curve of the link, a latency for each gather of a group and a time
for each byte. The latency is the group's; the time for bytes is each shard's. Encoding counts where
it is on the critical path: the share of it that the calibration saw going on after the call
returned is hidden. Decoding is done for the shards of all W ranks, and has in it what gathers of
whole shards take beyond their pieces, which fit a core's cache.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from narrowcast.allgather.codec import Scheme
from narrowcast.autotune.calibration import Links
from narrowcast.autotune.problem import Group, Option, Shard
from narrowcast.autotune.sampling import ALL, COMPRESSIONS, Cost, SampleStats
from narrowcast.config import MAX_CHUNK_VALUES
from narrowcast.fsdp2 import ShardedParam
from narrowcast.telemetry.changes import shard_type
from narrowcast.wire import floats, packet

_NOISE = 0.05  # of the cost in force: what a change must gain, since times are never twice the same


@dataclass(frozen=True)
class Gathered:
    """A parameter group, and how it is gathered.

    Attributes:
        params: the parameters, with the elements of their padded shards.
        times: how many gathers a step has, by number of ranks and elements.
        links: of the process group.
        hidden: share of encoding that is not on the critical path.
        host: seconds a byte to bring a cache from host memory, and back to it. Counted in full,
            since it has not been measured how much of it fetching ahead hides.
        announce: seconds a step to announce the sizes of the group's payloads.
        compressions: in force, by parameter; empty where the group is gathered as by plain FSDP2.
        compressible: names of the parameters that may be compressed.
    """

    label: str
    params: tuple[ShardedParam, ...]
    times: Mapping[tuple[int, int], float]
    links: Links
    hidden: float
    host: tuple[float, float]
    announce: float
    compressions: Mapping[str, str]
    compressible: frozenset[str]


def problem(
    groups: Sequence[Gathered],
    seen: Mapping[str, SampleStats],
    scheme: Scheme,
    horizon: int,
    coding_scale: float = 1.0,
) -> list[Group]:
    """What there is to choose from.

    Args:
        seen: by parameter. One that was not seen goes by the mean of its kind, or of all.
        scheme: how exponents are exchanged; its compression does not matter.
        horizon: steps until the choice is looked at again: those in which a cold cache must pay.
        coding_scale: times measured in training over those of the pieces that were looked at.
    """
    means = _means(groups, seen)
    return [_group(group, means, scheme, horizon, coding_scale) for group in groups]


def _means(groups: Sequence[Gathered], seen: Mapping[str, SampleStats]) -> dict[str, SampleStats]:
    """What was seen of every parameter, or of its kind, or else of all. Times are those of all: the
    time of one piece says more of what else the machine did than of the shard."""
    of_kind: dict[str, SampleStats] = {}
    of_all = SampleStats()
    names = [param.name for group in groups for param in group.params]
    for name in names:
        one = seen.get(name, SampleStats())
        of_kind[shard_type(name)] = of_kind.get(shard_type(name), SampleStats()) + one
        of_all += one
    timed = seen.get(ALL, of_all)
    means = {}
    for name in names:
        choices = (seen.get(name, SampleStats()), of_kind[shard_type(name)], of_all)
        one = next((one for one in choices if one.changes.values), SampleStats())
        means[name] = one.at_the_speed_of(timed)
    return means


def _group(
    group: Gathered,
    means: Mapping[str, SampleStats],
    scheme: Scheme,
    horizon: int,
    coding_scale: float,
) -> Group:
    curve = group.links.all_gather
    num_gathers = sum(group.times.values())
    num_chunks = -(-sum(param.numel for param in group.params) // MAX_CHUNK_VALUES)
    header_bytes = packet.header_size(num_chunks)
    overhead = num_gathers * (
        curve.latency + group.links.gather_overhead + header_bytes * curve.seconds_per_byte
    )
    return Group(
        name=group.label,
        shards=tuple(
            _shard(group, index, means, scheme, horizon, coding_scale)
            for index in range(len(group.params))
        ),
        plain_latency=num_gathers * curve.latency,
        overhead=overhead + group.announce,
        is_current=bool(group.compressions),
    )


def _shard(
    group: Gathered,
    index: int,
    means: Mapping[str, SampleStats],
    scheme: Scheme,
    horizon: int,
    coding_scale: float,
) -> Shard:
    param = group.params[index]
    numel = param.numel
    codes = param.dtype in floats.LAYOUTS
    may_be_compressed = param.name in group.compressible
    options = {}
    for compression in COMPRESSIONS if codes else ("none",):
        cost = means[param.name].a_value(compression) if codes else Cost()
        if compression == "none":
            itemsize = param.dtype.itemsize  # whatever was seen
            cost = replace(cost, first_bytes=itemsize, later_bytes=itemsize)
        elif not (may_be_compressed and means[param.name].changes.values):
            continue
        options[compression] = _option(
            group, numel, param, compression, cost, means[param.name], scheme, horizon, coding_scale
        )
    is_current = options.get(group.compressions.get(param.name, ""))
    if is_current is not None:
        options = {
            compression: option
            if option is is_current
            else replace(option, switching=option.switching + _NOISE * is_current.steady)
            for compression, option in options.items()
        }
    plain = sum(
        times * group.links.all_gather.seconds_per_byte * _scaled(group, numel, site)
        for site, times in group.times.items()
    )
    return Shard(
        name=param.name,
        kind=shard_type(param.name),
        values=numel,
        plain=plain * param.dtype.itemsize,
        options=options,
    )


def _scaled(group: Gathered, numel: int, site: tuple[int, int]) -> float:
    """Elements of a parameter's shard where the group is gathered by so many ranks and elements;
    these are bytes where its parameters differ in dtype."""
    dtypes = {param.dtype for param in group.params}
    whole = sum(
        param.numel * (param.dtype.itemsize if len(dtypes) > 1 else 1) for param in group.params
    )
    return numel * site[1] / max(whole, 1)


def _option(
    group: Gathered,
    numel: int,
    param: ShardedParam,
    compression: str,
    cost: Cost,
    seen: SampleStats,
    scheme: Scheme,
    horizon: int,
    coding_scale: float,
) -> Option:
    link = hashing = encoding = decoding = cold = hosted = 0.0
    from_host, to_host = group.host
    cache_bytes = 0
    coded = seen.a_value("entropy")
    per_byte = group.links.all_gather.seconds_per_byte
    for site, times in group.times.items():
        world_size, values = site[0], _scaled(group, numel, site)
        later = max(times - 1, 0)
        link += per_byte * values * (cost.first_bytes + later * cost.later_bytes)
        hashing += values * (cost.first_hashing + later * cost.later_hashing)
        encoding += values * (cost.first_encoding + later * cost.later_encoding)
        decoding += world_size * values * (cost.first_decoding + later * cost.later_decoding)
        decoding += times * values * _beyond_pieces(group, param, seen, world_size)
        cold += per_byte * values * (coded.first_bytes - cost.first_bytes)
        cache_at_site = _cache_bytes(compression, world_size, values, param, scheme)
        hosted += cache_at_site * (times * from_host + to_host)
        cache_bytes += cache_at_site
    return Option(
        link=link,
        hashing=hashing * coding_scale,
        encoding=encoding * coding_scale * (1 - group.hidden),
        decoding=decoding * coding_scale,
        fetching=hosted,
        switching=max(cold, 0.0) / horizon
        if _starts_cold(compression, group, param, scheme)
        else 0.0,
        bits=8 * cost.first_bytes,
        cache_bytes=cache_bytes,
    )


def _beyond_pieces(
    group: Gathered, param: ShardedParam, seen: SampleStats, world_size: int
) -> float:
    """Seconds a value that narrowed gathers of whole shards take beyond those of their pieces."""
    of_a_rank = group.links.unchanged_per_byte / len(group.links.ranks)
    whole = of_a_rank * world_size * param.dtype.itemsize
    pieces = seen.a_value("delta")
    return max(whole - pieces.later_encoding - world_size * pieces.later_decoding, 0.0)


def _cache_bytes(
    compression: str, world_size: int, values: float, param: ShardedParam, scheme: Scheme
) -> int:
    """The paper's (W - 1) shards, and what the sender keeps of its own. As ``comm`` keeps it."""
    values = round(values)
    if compression == "delta":
        return world_size * values * param.dtype.itemsize
    if compression != "exponent":
        return 0
    if scheme.exponent_coding == "blocks" and scheme.block_check == "hash":
        return (world_size - 1) * values + 16 * -(-values // scheme.block_size)
    return world_size * values


def _starts_cold(compression: str, group: Gathered, param: ShardedParam, scheme: Scheme) -> bool:
    """Whether the compression would find nothing cached. Exponents can be made of cached values."""
    before = group.compressions.get(param.name)
    makes_exponents = not replace(scheme, compression="exponent").caches_hashes
    keeps = {
        "delta": ("delta",),
        "exponent": ("delta", "exponent") if makes_exponents else ("exponent",),
    }
    return compression in keeps and before not in keeps[compression]


def merged_times(counts: Counter[tuple[str, int, int]]) -> dict[tuple[int, int], float]:
    """Gathers by number of ranks and elements, whatever the process group is called."""
    times: dict[tuple[int, int], float] = {}
    for (_, world_size, numel), count in counts.items():
        times[world_size, numel] = times.get((world_size, numel), 0) + count
    return times
