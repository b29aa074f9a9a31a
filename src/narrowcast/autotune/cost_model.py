"""What each compression of each shard costs a step, in seconds (CIERA, section 3.2).

    gain = Comm(S) - [Comm(payload) + T_hash + T_encode + T_decode]

for every gather of a step: the first after the optimizer, and the later ones, in which nothing has
changed. ``Comm`` is the measured curve of the link: a latency for each gather of a group, which is
the group's, and a time for each byte, which is each shard's.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from narrowcast.allgather.codec import Scheme
from narrowcast.autotune.links import Links
from narrowcast.autotune.problem import Group, Option, Shard
from narrowcast.autotune.sample_stats import ALL, COMPRESSIONS, Cost, SampleStats
from narrowcast.config import MAX_CHUNK_VALUES
from narrowcast.fsdp2 import ShardedParam
from narrowcast.telemetry.changes import shard_type
from narrowcast.wire import floats, packet

_NOISE = 0.05  # share of the current cost that a change must gain: times are never twice the same


@dataclass(frozen=True)
class Gathered:
    """A parameter group, and how it is gathered.

    Attributes:
        params: the parameters, with the elements of their padded shards.
        times: gathers a step, by number of ranks that exchange payloads and of elements.
        links: of the process group.
        hidden: share of encoding that is not on the critical path.
        host: seconds a byte to fetch a cache from host memory, and to store it there. It is
            counted in full: how much of it prefetching hides has not been measured.
        announce: seconds a step to announce the sizes of the group's payloads.
        compressions: the current ones, by parameter; empty where baseline FSDP2 gathers the group.
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


@dataclass(frozen=True)
class Site:
    """The gathers of one parameter over the same number of ranks.

    Attributes:
        world_size: how many ranks exchange payloads.
        values: of the parameter's shard on each of them.
        gathers: a step.
    """

    world_size: int
    values: float
    gathers: float

    @property
    def later(self) -> float:
        """Gathers a step after the first."""
        return max(self.gathers - 1, 0)


@dataclass(frozen=True)
class CostModel:
    """The cost of one compression of one shard. Its methods are the terms of the formula, in
    seconds a step.

    Attributes:
        stats: samples of the shard, or of others that stand for it.
        scheme: how exponents are encoded; its own compression does not matter.
        horizon: steps until the next choice, in which a cold cache must be repaid.
        coding_scale: ratio of coding times measured in training to those of the samples.
    """

    group: Gathered
    param: ShardedParam
    compression: str
    stats: SampleStats
    scheme: Scheme
    horizon: int
    coding_scale: float

    def option(self) -> Option:
        """All terms together."""
        return Option(
            link=self.comm(),
            hashing=self.hashing(),
            encoding=self.encoding(),
            decoding=self.decoding(),
            fetching=self.fetching(),
            switching=self.switching(),
            bits=8 * self.per_value.first_bytes,
            cache_bytes=self.cache_bytes(),
        )

    def comm(self) -> float:
        """Comm(payload), the bytes of it: compressed in the first gather, and unchanged in later
        ones."""
        cost = self.per_value
        return sum(
            self._per_byte * site.values * (cost.first_bytes + site.later * cost.later_bytes)
            for site in self._sites()
        )

    def hashing(self) -> float:
        """T_hash. It is never hidden."""
        cost = self.per_value
        return self.coding_scale * sum(
            site.values * (cost.first_hashing + site.later * cost.later_hashing)
            for site in self._sites()
        )

    def encoding(self) -> float:
        """T_encode, without the share that goes on after the call has returned."""
        cost = self.per_value
        seconds = sum(
            site.values * (cost.first_encoding + site.later * cost.later_encoding)
            for site in self._sites()
        )
        return seconds * self.coding_scale * (1 - self.group.hidden)

    def decoding(self) -> float:
        """T_decode, of the shards of all ranks, with what gathers of whole shards take beyond their
        chunks, which fit a core's cache."""
        cost = self.per_value
        return self.coding_scale * sum(
            site.world_size * site.values * (cost.first_decoding + site.later * cost.later_decoding)
            + site.gathers * site.values * self._beyond_chunks(site.world_size)
            for site in self._sites()
        )

    def fetching(self) -> float:
        """To fetch caches from host memory for every gather, and to store them once."""
        from_host, to_host = self.group.host
        return sum(
            self._cache_bytes_at(site) * (site.gathers * from_host + to_host)
            for site in self._sites()
        )

    def switching(self) -> float:
        """To fill a cold cache by a gather of ``entropy`` shards, spread over the horizon."""
        if not self._starts_cold():
            return 0.0
        cold_bytes = self.stats.per_value("entropy").first_bytes
        seconds = sum(
            self._per_byte * site.values * (cold_bytes - self.per_value.first_bytes)
            for site in self._sites()
        )
        return max(seconds, 0.0) / self.horizon

    def cache_bytes(self) -> int:
        """Memory of the caches on a rank, in bytes."""
        return sum(self._cache_bytes_at(site) for site in self._sites())

    @property
    def per_value(self) -> Cost:
        """Bytes and seconds of a value. An uncompressed one is as large as it is, sampled or
        not."""
        has_layout = self.param.dtype in floats.LAYOUTS
        cost = self.stats.per_value(self.compression) if has_layout else Cost()
        if self.compression == "none":
            itemsize = self.param.dtype.itemsize
            cost = replace(cost, first_bytes=itemsize, later_bytes=itemsize)
        return cost

    @property
    def _per_byte(self) -> float:
        return self.group.links.payload_gather.seconds_per_byte

    def _sites(self) -> Iterator[Site]:
        return sites(self.group, self.param)

    def _beyond_chunks(self, world_size: int) -> float:
        """Seconds a value that narrowed gathers of whole shards take beyond those of chunks."""
        links = self.group.links
        of_a_rank = links.unchanged_per_byte / links.payloads
        whole = of_a_rank * world_size * self.param.dtype.itemsize
        chunks = self.stats.per_value("delta")
        return max(whole - chunks.later_encoding - world_size * chunks.later_decoding, 0.0)

    def _cache_bytes_at(self, site: Site) -> int:
        """The paper's W - 1 shards, and what the sender caches of its own, as ``comm`` does."""
        values = round(site.values)
        if self.compression == "delta":
            return site.world_size * values * self.param.dtype.itemsize
        if self.compression != "exponent":
            return 0
        if self.scheme.exponent_coding == "blocks" and self.scheme.block_check == "hash":
            return (site.world_size - 1) * values + 16 * -(-values // self.scheme.block_size)
        return site.world_size * values

    def _starts_cold(self) -> bool:
        """Whether the compression would find nothing cached. Exponents can be taken from cached
        values."""
        current = self.group.compressions.get(self.param.name)
        takes_exponents = not replace(self.scheme, compression="exponent").caches_hashes
        usable = {
            "delta": ("delta",),
            "exponent": ("delta", "exponent") if takes_exponents else ("exponent",),
        }
        return self.compression in usable and current not in usable[self.compression]


def sites(group: Gathered, param: ShardedParam) -> Iterator[Site]:
    """The gathers of one parameter of a group."""
    # Elements are bytes where the parameters of the group differ in dtype.
    mixed = len({one.dtype for one in group.params}) > 1
    whole = sum(one.numel * (one.dtype.itemsize if mixed else 1) for one in group.params)
    for (world_size, numel), gathers in group.times.items():
        yield Site(world_size, param.numel * numel / max(whole, 1), gathers)


def make_problem(
    groups: Sequence[Gathered],
    samples: Mapping[str, SampleStats],
    scheme: Scheme,
    horizon: int,
    coding_scale: float = 1.0,
) -> list[Group]:
    """What there is to choose from.

    Args:
        samples: by parameter. One that was not sampled goes by the mean of its type of shard, or
            of all.
        scheme: how exponents are encoded; its compression does not matter.
        horizon: steps until the next choice, in which a cold cache must be repaid.
        coding_scale: ratio of coding times measured in training to those of the samples.
    """
    means = _means(groups, samples)
    return [
        _group(
            group,
            tuple(
                _shard(group, param, means[param.name], scheme, horizon, coding_scale)
                for param in group.params
            ),
        )
        for group in groups
    ]


def _means(
    groups: Sequence[Gathered], samples: Mapping[str, SampleStats]
) -> dict[str, SampleStats]:
    """The samples of every parameter, or of its type of shard, or else of all. Times are those of
    all: the time of one chunk depends more on what else the machine did than on the shard."""
    by_kind: dict[str, SampleStats] = {}
    of_all = SampleStats()
    names = [param.name for group in groups for param in group.params]
    for name in names:
        stats = samples.get(name, SampleStats())
        by_kind[shard_type(name)] = by_kind.get(shard_type(name), SampleStats()) + stats
        of_all += stats
    timed = samples.get(ALL, of_all)
    means = {}
    for name in names:
        choices = (samples.get(name, SampleStats()), by_kind[shard_type(name)], of_all)
        stats = next((one for one in choices if one.changes.values), SampleStats())
        means[name] = stats.with_times_of(timed)
    return means


def _group(group: Gathered, shards: tuple[Shard, ...]) -> Group:
    plain, payload = group.links.all_gather, group.links.payload_gather
    num_gathers = sum(group.times.values())
    num_chunks = -(-sum(param.numel for param in group.params) // MAX_CHUNK_VALUES)
    header_bytes = packet.header_size(num_chunks)
    overhead = num_gathers * (
        payload.latency + group.links.gather_overhead + header_bytes * payload.seconds_per_byte
    )
    return Group(
        name=group.label,
        shards=shards,
        plain_latency=num_gathers * plain.latency,
        overhead=overhead + group.announce,
        is_current=bool(group.compressions),
    )


def _shard(
    group: Gathered,
    param: ShardedParam,
    stats: SampleStats,
    scheme: Scheme,
    horizon: int,
    coding_scale: float,
) -> Shard:
    can_compress = (
        param.dtype in floats.LAYOUTS
        and param.name in group.compressible
        and stats.changes.values > 0
    )
    options = {
        compression: CostModel(
            group, param, compression, stats, scheme, horizon, coding_scale
        ).option()
        for compression in (COMPRESSIONS if can_compress else ("none",))
    }
    current = options.get(group.compressions.get(param.name, ""))
    if current is not None:
        noise = _NOISE * current.steady
        options = {
            name: one if one is current else replace(one, switching=one.switching + noise)
            for name, one in options.items()
        }
    per_byte = group.links.all_gather.seconds_per_byte
    plain = sum(site.gathers * per_byte * site.values for site in sites(group, param))
    return Shard(
        name=param.name,
        kind=shard_type(param.name),
        values=param.numel,
        plain=plain * param.dtype.itemsize,
        options=options,
    )


def merged_times(counts: Counter[tuple[str, int, int]]) -> dict[tuple[int, int], float]:
    """Gathers by number of ranks and elements, whatever the process group is called."""
    times: dict[tuple[int, int], float] = {}
    for (_, world_size, numel), count in counts.items():
        times[world_size, numel] = times.get((world_size, numel), 0) + count
    return times
