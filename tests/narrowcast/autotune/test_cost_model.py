"""What a compression costs a step, by numbers that can be checked by hand, and what it caches."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowcast.allgather.codec import Scheme
from narrowcast.autotune import cost_model
from narrowcast.autotune.cost_model import Gathered, make_problem
from narrowcast.autotune.curves import Curve
from narrowcast.autotune.links import Links
from narrowcast.autotune.problem import Group, Option
from narrowcast.autotune.sample_stats import ALL, COMPRESSIONS, Cost, SampleStats
from narrowcast.autotune.solver import choose
from narrowcast.fsdp2 import ShardedParam
from narrowcast.telemetry.changes import Changes
from narrowcast.wire import packet
from tests.narrowcast.training import Setup, build, narrow, train

BF16 = torch.bfloat16
DELTA = Scheme("delta", "delta")
CURVE = Curve(latency=7.0, seconds_per_byte=10.0, error=0.0, nbytes=(), measured=())
LINKS = Links(
    (0, 1, 2, 3), CURVE, CURVE, CURVE, gather_overhead=3.0, unchanged_per_byte=0.0, announce=0.0
)
# A value, in the first gather of a step and in a later one: bytes, and seconds.
COSTS = {
    "delta": Cost(0.5, 0, 0, 0, 3, 1, 2, 1),
    "exponent": Cost(1.25, 1, 4, 2, 5, 3, 3, 2),
    "entropy": Cost(1.5, 1.5, 0, 0, 6, 6, 4, 4),
    "none": Cost(2, 2, 0, 0, 1, 1, 1, 1),
}


def sampled(values: int = 8, faster: float = 1.0, smaller: float = 1.0) -> SampleStats:
    """Stats of so many values, with the costs above, but for other times and bytes."""
    costs = []
    for compression in COMPRESSIONS:
        cost = COSTS[compression]
        sizes = {"first_bytes": cost.first_bytes / smaller, "later_bytes": cost.later_bytes}
        costs.append(replace(cost.scaled(1 / faster), **sizes).scaled(values))
    return SampleStats(Changes(values=values), tuple(costs))


def gathered(*numels: int, dtype: torch.dtype = BF16, **changes: Any) -> Gathered:
    """Parameters ``w0``, ``w1``, .. over four ranks, gathered twice a step."""
    names = [f"w{i}" for i in range(len(numels))]
    whole = Gathered(
        label="group",
        params=tuple(ShardedParam(*of, dtype) for of in zip(names, numels, strict=True)),
        times={(4, sum(numels)): 2.0},
        links=LINKS,
        hidden=0.0,
        host=(0.0, 0.0),
        announce=0.0,
        compressions={},
        compressible=frozenset(names),
    )
    return replace(whole, **changes)


def options(group: Gathered, scheme: Scheme = DELTA, **arguments: Any) -> dict[str, Option]:
    """The options of the first shard of a group all of whose shards were sampled."""
    samples = {param.name: sampled() for param in group.params}
    (one,) = make_problem([group], samples, scheme, arguments.pop("horizon", 100), **arguments)
    return one.shards[0].options


def test_every_term_of_the_gain_is_counted_for_every_gather_of_a_step() -> None:
    found = options(gathered(1000))
    assert {name: option.link for name, option in found.items()} == {
        "delta": 10 * 1000 * 0.5,  # nothing in the later gather
        "exponent": 10 * 1000 * (1.25 + 1),
        "entropy": 10 * 1000 * 2 * 1.5,
        "none": 10 * 1000 * 2 * 2,
    }
    assert {name: option.hashing for name, option in found.items()} == {
        **{"delta": 0, "entropy": 0, "none": 0},
        "exponent": 1000 * (4 + 2),
    }
    assert {name: option.encoding for name, option in found.items()} == {
        "delta": 1000 * (3 + 1),
        "exponent": 1000 * (5 + 3),
        "entropy": 1000 * 2 * 6,
        "none": 1000 * 2 * 1,
    }
    assert {name: option.decoding for name, option in found.items()} == {
        "delta": 4 * 1000 * (2 + 1),  # the shards of all ranks
        "exponent": 4 * 1000 * (3 + 2),
        "entropy": 4 * 1000 * 2 * 4,
        "none": 4 * 1000 * 2 * 1,
    }
    assert {name: option.bits for name, option in found.items()} == {
        **{"delta": 4, "exponent": 10, "entropy": 12, "none": 16}
    }
    assert {name: option.cache_bytes for name, option in found.items()} == {
        **{"delta": 4 * 1000 * 2, "exponent": 4 * 1000, "entropy": 0, "none": 0}
    }


def test_what_whole_shards_take_beyond_their_chunks_is_counted_for_every_compression() -> None:
    """In an unchanged gather a value takes 1 to encode and 4 x 1 to decode, by its chunks."""
    for world_size, unchanged, more in ((4, 10.0, 2 * 10 - 5), (2, 10.0, 10 - 3), (4, 2.0, 0)):
        times = {(world_size, 1000): 2.0}
        plain = options(gathered(1000, times=times))
        slow = replace(LINKS, unchanged_per_byte=unchanged)
        for name, option in options(gathered(1000, links=slow, times=times)).items():
            assert option.decoding == plain[name].decoding + 2 * 1000 * more


def test_three_gathers_a_step_are_one_first_and_two_later_ones() -> None:
    option = options(gathered(1000, times={(4, 1000): 3.0}))["exponent"]
    assert option.link == 10 * 1000 * (1.25 + 2 * 1)
    assert option.decoding == 4 * 1000 * (3 + 2 * 2)


def test_hidden_encoding_costs_nothing_and_hashing_and_decoding_are_never_hidden() -> None:
    option = options(gathered(1000, hidden=0.75), coding_scale=2.0)["exponent"]
    assert (option.hashing, option.encoding) == (6000 * 2, 8000 * 2 / 4)
    assert option.decoding == 4 * 5000 * 2


def test_caches_in_host_memory_cost_a_copy_to_the_device_and_back() -> None:
    on_device = options(gathered(1000), coding_scale=2.0)
    on_host = options(gathered(1000, host=(0.5, 0.25)), coding_scale=2.0)
    more = {name: on_host[name].seconds - on_device[name].seconds for name in on_host}
    # From it for both gathers, and to it once.
    assert more == {
        **{"delta": 8000 * (2 * 0.5 + 0.25), "exponent": 4000 * (2 * 0.5 + 0.25)},
        **{"entropy": 0, "none": 0},
    }


def test_plain_and_narrowed_gathers_differ_by_headers_handling_and_announced_sizes() -> None:
    group = gathered(1000, 400_000, announce=11.0)  # two chunks
    (one,) = make_problem([group], {"w0": sampled(), "w1": sampled()}, DELTA, 100)
    narrowed = replace(group, compressions={"w0": "delta", "w1": "none"})
    (is_current,) = make_problem([narrowed], {"w0": sampled(), "w1": sampled()}, DELTA, 100)
    assert (one.is_current, is_current.is_current) == (False, True)
    assert [shard.plain for shard in one.shards] == [2 * 10 * 2 * 1000, 2 * 10 * 2 * 400_000]
    assert one.plain_latency == 2 * 7
    assert one.overhead == 2 * (7 + 3 + 10 * packet.header_size(2)) + 11
    assert [shard.values for shard in one.shards] == [1000, 400_000]


COLD = {"delta": 10 * 1000 * (1.5 - 0.5) / 100, "exponent": 10 * 1000 * (1.5 - 1.25) / 100}


@pytest.mark.parametrize(
    ("is_current", "cold"),
    [
        (None, {"delta", "exponent"}),
        ("none", {"delta", "exponent"}),
        ("entropy", {"delta", "exponent"}),
        ("exponent", {"delta"}),
        ("delta", set()),  # exponents are taken from the values
    ],
)
def test_a_change_costs_a_cold_cache_and_must_gain_more_than_noise(
    is_current: str | None, cold: set[str]
) -> None:
    found = options(gathered(1000, compressions={"w0": is_current} if is_current else {}))
    noise = 0.05 * found[is_current].steady if is_current else 0
    for compression, option in found.items():
        expected = COLD[compression] if compression in cold else 0
        expected += noise if compression != is_current else 0
        assert option.switching == pytest.approx(expected), compression


def test_hashes_cannot_be_taken_from_cached_values() -> None:
    hashes = Scheme("delta", "blocks", block_check="hash")
    found = options(gathered(1000, compressions={"w0": "delta"}), hashes)
    noise = 0.05 * found["delta"].steady
    assert found["exponent"].switching == pytest.approx(COLD["exponent"] + noise)


def test_a_cold_cache_is_never_a_gain() -> None:
    # Where everything changes, entropy coding sends less than deltas.
    samples = {"w0": sampled(smaller=0.25)}
    costs = [*samples["w0"].costs]
    costs[COMPRESSIONS.index("entropy")] = Cost(first_bytes=8.0)
    samples = {"w0": replace(samples["w0"], costs=tuple(costs))}
    (one,) = make_problem([gathered(1000)], samples, DELTA, 1)
    assert one.shards[0].options["delta"].switching == 0


def test_integers_and_parameters_left_out_are_sent_uncompressed() -> None:
    integers = options(gathered(1000, dtype=torch.int64))
    assert integers.keys() == {"none"}
    assert (integers["none"].bits, integers["none"].link) == (64, 10 * 1000 * 2 * 8)
    uncompressed = options(gathered(1000, 5, compressible=frozenset(["w1"])))
    assert uncompressed.keys() == {"none"}
    assert uncompressed["none"].link == 10 * 1000 * 2 * 2


def test_an_uncompressed_shard_is_as_large_as_the_baselines_though_nothing_was_sampled() -> None:
    for dtype in (BF16, torch.float32):
        (one,) = make_problem([gathered(1000, dtype=dtype)], {}, DELTA, 100)
        assert one.shards[0].options.keys() == {"none"}
        assert one.shards[0].options["none"].link == one.shards[0].plain
        assert choose([one], None).compressions == {}


def test_shards_that_were_not_sampled_go_by_their_type_and_then_by_all() -> None:
    names = ("a.norm", "b.norm", "c.norm", "a.router")
    params = tuple(ShardedParam(name, 10, BF16) for name in names)
    group = gathered(10, 10, 10, 10, params=params, compressible=frozenset(names))
    of_two = {"a.norm": sampled(values=8), "b.norm": sampled(values=24, smaller=2)}
    (one,) = make_problem([group], of_two, DELTA, 100)
    bits = [shard.options["delta"].bits for shard in one.shards]
    assert bits == [4, 2, (8 * 4 + 24 * 2) / 32, (8 * 4 + 24 * 2) / 32]
    router = {"a.router": sampled(values=32, smaller=4)}
    (one,) = make_problem([group], {**of_two, **router}, DELTA, 100)
    assert [shard.options["delta"].bits for shard in one.shards] == [4, 2, 2.5, 1]
    (one,) = make_problem([group], router, DELTA, 100)
    assert [shard.options["delta"].bits for shard in one.shards] == [1, 1, 1, 1]


@pytest.mark.parametrize("pooled", [{}, {ALL: sampled(values=8, faster=4)}])
def test_times_are_those_of_all_shards_and_bytes_the_shards_own(
    pooled: dict[str, SampleStats],
) -> None:
    of_both = {"w0": sampled(values=8), "w1": sampled(values=24, faster=2, smaller=4)}
    (one,) = make_problem([gathered(100, 100)], {**of_both, **pooled}, DELTA, 100)
    first, second = (shard.options["delta"] for shard in one.shards)
    a_value = 2 / 4 if pooled else (8 * 2 + 24 * 1) / 32
    assert first.decoding == second.decoding == 4 * 100 * a_value * (2 + 1) / 2
    assert (first.bits, second.bits) == (4, 1)


def test_gathers_over_smaller_groups_have_a_first_one_and_caches_of_their_own() -> None:
    # Over 4 ranks in forward; then over pairs, of which each rank holds twice as much.
    found = options(gathered(1000, 3000, times={(4, 4000): 1.0, (2, 8000): 1.0}))
    assert found["delta"].link == 10 * (1000 + 2000) * 0.5
    assert found["delta"].encoding == (1000 + 2000) * 3
    assert found["delta"].decoding == (4 * 1000 + 2 * 2000) * 2
    assert found["delta"].cache_bytes == 2 * (4 * 1000 + 2 * 2000)
    assert found["exponent"].cache_bytes == 4 * 1000 + 2 * 2000
    (one,) = make_problem([gathered(10, times={(4, 10): 1.0, (2, 20): 1.0})], {}, DELTA, 100)
    assert one.shards[0].plain == 10 * 2 * (10 + 20)


SCHEMES = {
    "delta": {"compression": "delta"},
    "exponent": {"compression": "exponent"},
    "blocks": {"compression": "exponent", "exponent_coding": "blocks", "block_size": 64},
    "blocks-hash": {
        **{"compression": "exponent", "exponent_coding": "blocks", "block_size": 64},
        "block_check": "hash",
    },
}


def _cache_bytes(setup: Setup, narrows: dict[str, dict]) -> dict[str, list[tuple[int, int, int]]]:
    """By scheme, for every parameter group: bytes cached, bytes predicted, and how many hashes the
    prediction may be off by."""
    found = {}
    for name, arguments in narrows.items():
        model, optimizer = build(setup)
        handle, _ = narrow(replace(setup, narrow=arguments), model, optimizer)
        train(setup, model, optimizer)
        scheme = Scheme(**arguments)
        found[name] = []
        for comm in handle._comms:
            group = Gathered(
                label=comm.group.name,
                params=comm.group.params,
                times={
                    s: n / setup.steps
                    for s, n in cost_model.merged_times(comm.telemetry.gathers).items()
                },
                links=LINKS,
                hidden=0.0,
                host=(0.0, 0.0),
                announce=0.0,
                compressions={},
                compressible=frozenset(param.name for param in comm.group.params),
            )
            samples = {param.name: sampled() for param in group.params}
            (one,) = make_problem([group], samples, scheme, 100)
            predicted = _caches(one, scheme.compression)
            found[name].append((comm.cache_bytes, predicted, len(comm.states) * len(one.shards)))
        handle.remove()
    return found


def _caches(group: Group, compression: str) -> int:
    chosen = (s.options.get(compression, s.options["none"]) for s in group.shards)
    return sum(option.cache_bytes for option in chosen)


MIXED = {"frozen": (torch.int64, torch.float32), "gathered": None, "dtype": BF16}


@pytest.mark.parametrize(
    ("world_size", "setup"),
    [
        (2, Setup(steps=1, **MIXED)),
        (4, Setup(steps=1, reshard=2)),
    ],
    ids=["mixed dtypes", "resharded to pairs"],
)
def test_caches_take_what_was_predicted(ranks, world_size: int, setup: Setup) -> None:
    for found in ranks(world_size).run(_cache_bytes, setup, SCHEMES):
        for name, groups in found.items():
            assert len(groups) == 3
            for cached, predicted, hashes in groups:
                assert cached > 0
                # Of blocks that hold values of two parameters there is one hash.
                spare = 16 * hashes if name == "blocks-hash" else 0
                assert cached <= predicted <= cached + spare, name
