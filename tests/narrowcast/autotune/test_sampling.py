"""Samples of shards in training show what happened to them, and training is not changed."""

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.allgather import codec
from narrowcast.allgather.codec import Scheme
from narrowcast.autotune import sampling
from narrowcast.autotune.sample_stats import ALL, COMPRESSIONS, Cost, SampleStats, sum_over_ranks
from narrowcast.autotune.sampling import ChunkPlace, Sampler
from narrowcast.autotune.timed_gather import sample_chunk
from narrowcast.fsdp2 import param_groups
from narrowcast.telemetry.changes import Changes, count_changes
from narrowcast.wire import floats
from narrowcast.wire.coders import find_coder
from tests.narrowcast.training import Setup, build, same_bits, state_of, train

CODER = find_coder("zstd")
SCHEMES = {
    "exponent_delta": Scheme("delta", "delta", 64),
    "blocks": Scheme("delta", "blocks", 64),
    "hashes": Scheme("delta", "blocks", 64, "hash"),
}
OPTIONS = {"exponent_coding": "delta", "block_size": 64, "block_check": "compare"}


def before_and_after(dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    """Bits of weights before and after a small step."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, generator=generator)
    step = 1e-3 * torch.randn(size, generator=generator)
    bits = floats.LAYOUTS[dtype].bits
    return weight.to(dtype).view(bits), (weight + step).to(dtype).view(bits)


@pytest.mark.parametrize("dtype", floats.LAYOUTS)
@pytest.mark.parametrize("check", SCHEMES)
def test_bytes_and_changes_are_those_of_a_gather(dtype: torch.dtype, check: str) -> None:
    layout, size = floats.LAYOUTS[dtype], 10_001
    old, new = before_and_after(dtype, size)
    stats = sample_chunk(old, new, layout, SCHEMES[check], CODER)
    assert stats.changes == count_changes(new, old, layout, 64)
    assert 0 < stats.changes.changed_exponents < stats.changes.changed_values <= size
    first_bytes = {}
    for compression, cost in zip(COMPRESSIONS, stats.costs, strict=True):
        scheme = replace(SCHEMES[check], compression=compression)
        first, later = (
            codec.encode(
                new, codec.sender_cache(cached, scheme, layout), scheme, layout, CODER
            ).size
            for cached in (old, new)
        )
        assert (cost.first_bytes, cost.later_bytes) == (first, later), compression
        first_bytes[compression] = cost.first_bytes
        assert stats.per_value(compression).first_bytes == pytest.approx(first / size)
    assert list(first_bytes.values()) == sorted(first_bytes.values())
    assert len(set(first_bytes.values())) == 4
    assert first_bytes["none"] == size * dtype.itemsize
    assert stats.costs[COMPRESSIONS.index("delta")].later_bytes == 0


class Clock:
    """A clock that the test moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def slowed(self, name: str, seconds: float) -> Any:
        """Makes a function of ``codec`` take so long."""
        function = getattr(codec, name)

        def slow(*args: Any) -> Any:
            self.now += seconds
            return function(*args)

        return patch.object(codec, name, slow)


@pytest.mark.parametrize("check", SCHEMES)
def test_times_are_those_of_a_gather(check: str) -> None:
    layout, clock = floats.LAYOUTS[torch.bfloat16], Clock()
    with (
        patch.object(sampling, "time", clock),
        patch("narrowcast.util.time", clock),
        clock.slowed("changed_blocks", 1),
        clock.slowed("block_hashes", 1),
        clock.slowed("encode", 4),
        clock.slowed("decode", 7),
    ):
        stats = sample_chunk(*before_and_after(torch.bfloat16, 1000), layout, SCHEMES[check], CODER)
    for compression, cost in zip(COMPRESSIONS, stats.costs, strict=True):
        # A sender that caches hashes computes them to encode, and again of what it has sent.
        times = {"exponent_delta": 0, "blocks": 1, "hashes": 2}
        hashing = times[check] if compression == "exponent" else 0
        assert (cost.first_hashing, cost.later_hashing) == (hashing, hashing), compression
        assert (cost.first_encoding, cost.later_encoding) == (4, 4), compression
        assert (cost.first_decoding, cost.later_decoding) == (7, 7), compression


def test_stats_travel_as_numbers() -> None:
    costs = (Cost(*range(1, 9)), Cost(0.25), Cost(), Cost(later_decoding=3.5))
    stats = SampleStats(Changes(10, 20, 3, 4, 5, 6), costs)
    assert SampleStats.from_numbers(stats.to_numbers()) == stats
    both = SampleStats.from_numbers([2 * number for number in stats.to_numbers()])
    assert both == stats + stats


def _sampler(model: Any, **changes: Any) -> Sampler:
    groups = param_groups(model)
    names = {param.name for group in groups for param in group.params}
    return Sampler(groups, changes.pop("names", names), **OPTIONS, coder=CODER, **changes)


def _whole_shards(sampler: Sampler) -> dict[str, Tensor]:
    return {
        param.name: group.piece(index, 0, group.numels[index])
        for group in sampler._groups
        for index, param in enumerate(group.params)
    }


def _sampled_around_a_pause(setup: Setup) -> list[int]:
    """How many parameters were sampled after each of five steps, the third of which is skipped."""
    model, optimizer = build(setup)
    sampler = _sampler(model, share=math.inf)
    sampled: list[int] = []

    def after_step(*_: Any) -> None:
        if len(sampled) == 2:
            sampler.pause()
        sampled.append(0 if len(sampled) == 2 else len(sampler.after_step()))

    optimizer.register_step_post_hook(after_step)
    train(setup, model, optimizer)
    return sampled


def test_a_step_is_compared_only_with_the_one_before(ranks) -> None:
    for first, second, _, after_pause, last in ranks(2).run(
        _sampled_around_a_pause, Setup(steps=5)
    ):
        assert first == after_pause == 0
        assert second == last > 10


def _sums_and_brute_force(
    setup: Setup,
) -> tuple[list[str], dict[str, SampleStats], dict[str, Changes]]:
    """What differs from brute force on this rank, the samples of all ranks, and all changes."""
    model, optimizer = build(setup)
    sampler = _sampler(model, share=math.inf)
    expected: dict[str, Changes] = {}
    shards: dict[str, Tensor] = {}
    unlike = []

    def after_step(*_: Any) -> None:
        nonlocal shards
        before, shards = shards, _whole_shards(sampler)
        changes = sampler.after_step()
        counted = {}
        for name, old in before.items():
            layout = floats.LAYOUTS.get(old.dtype)
            if layout is not None:
                new = shards[name].view(layout.bits)
                counted[name] = count_changes(new, old.view(layout.bits), layout, 64)
                expected[name] = expected.get(name, Changes()) + counted[name]
        if changes != counted:
            unlike.append(f"step {len(unlike)}: {changes} for {counted}")

    optimizer.register_step_post_hook(after_step)
    train(setup, model, optimizer)
    device = torch.device("cpu")
    samples = sum_over_ranks(sampler.samples, [ALL, *shards], device)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, expected)
    totals = {
        name: sum((counts.get(name, Changes()) for counts in gathered), Changes())
        for name in shards
    }
    sampler.clear()
    assert sampler.samples == {}
    return unlike, samples, totals


def test_every_whole_shard_is_sampled_at_every_step_where_that_is_wanted(ranks) -> None:
    setup = Setup(gathered=None, dtype=torch.bfloat16, frozen=(torch.int64, torch.float32))
    results = ranks(2).run(_sums_and_brute_force, setup)
    (_, sums, totals), (_, others, _) = results
    assert [unlike for unlike, *_ in results] == [[], []]
    assert sums == others  # times too
    assert {name: one.changes for name, one in sums.items() if name != ALL} == totals
    experts = totals["0.experts.w1_EFD"]
    assert (experts.values, experts.changed_values > 0) == (3 * 6 * 48 * 24, True)
    assert totals["0.table_torch_float32"].changed_values == 0
    assert totals["0.table_torch_int64"] == Changes()
    # Times are of long chunks: those of the largest shards, here the experts'.
    largest = [totals[f"{block}.experts.{name}"] for block in "01" for name in ("w1_EFD", "w2_EDF")]
    assert sums[ALL].changes == sum(largest, Changes())


LENGTH = 100  # of a chunk
STEP_SECONDS, COST = (3.0, 2.0), (0.02, 0.05)  # of either rank


def _chunks_per_step(share: float) -> tuple[float, list[int], set[ChunkPlace], float]:
    """How many chunks there is time for, how many were sampled step by step, which ones were first,
    and how long they took together."""
    model, _ = build(Setup())
    clock = Clock()

    def sample_chunk(*_: Any) -> SampleStats:
        clock.now += COST[dist.get_rank()]
        return SampleStats(Changes(values=1))

    with (
        patch.object(sampling, "time", clock),
        patch("narrowcast.util.time", clock),
        patch.object(sampling, "sample_chunk", sample_chunk),
        patch.object(sampling, "MAX_CHUNK_VALUES", LENGTH),
    ):
        sampler = _sampler(model, share=share)
        sampled, first = [], set()
        for step in range(9):
            # The first steps are slow, and must not count.
            clock.now += STEP_SECONDS[dist.get_rank()] if step == 2 else 1000.0
            changes = sampler.after_step()
            sampled.append(sum(counted.values for counted in changes.values()))
            first = first or {place for place, _ in sampler._copies}
        return sampler.chunks_per_step, sampled, first, sampler.seconds


def test_all_ranks_sample_as_many_chunks_as_the_slowest_rank_and_the_shortest_step_allow(
    ranks,
) -> None:
    first, second = ranks(2).run(_chunks_per_step, 0.0625)
    assert first[0] == second[0] == pytest.approx(0.0625 * 2 / 0.05)  # 2.5
    # Copied from the third step on, and compared a step later.
    assert first[1] == second[1] == [0, 0, 0, 2, 3, 2, 3, 2, 3]
    assert first[3] == pytest.approx(15 * 0.02)
    assert second[3] == pytest.approx(15 * 0.05)
    assert not first[2] & second[2]


def test_a_chunk_now_and_then_where_there_is_time_for_less_than_one(ranks) -> None:
    for chunks_per_step, sampled, *_ in ranks(2).run(_chunks_per_step, 0.0125):
        assert chunks_per_step == pytest.approx(0.5)
        assert sampled == [0, 0, 0, 0, 1, 0, 1, 0, 1]


def _sampled_values(share: float) -> tuple[set, set, int]:
    """Sampled values (their parameter and index), those that there are, and the longest chunk, in
    as many steps as it takes to sample each once."""
    model, _ = build(Setup())
    sampled: list[tuple[str, int, int]] = []
    with patch.object(sampling, "MAX_CHUNK_VALUES", LENGTH):
        sampler = _sampler(model, share=share, names={"0.router.weight", "1.experts.w2_EDF"})
        sampler.chunks_per_step = 5.0
        for _ in range(-(-len(sampler._places) // 5)):
            sampler.after_step()
            for place, old_N in sampler._copies:
                name = sampler._groups[place.group].params[place.param].name
                sampled.append((name, place.start, old_N.numel()))
    sizes = {
        name: shard.numel()
        for name, shard in _whole_shards(sampler).items()
        if name in ("0.router.weight", "1.experts.w2_EDF")
    }
    values = {(name, start + i) for name, start, size in sampled for i in range(size)}
    there = {(name, i) for name, size in sizes.items() for i in range(size)}
    return values, there, max(size for *_, size in sampled)


def test_in_time_every_value_is_sampled(ranks) -> None:
    for values, there, longest in ranks(2).run(_sampled_values, 0.01):
        assert values == there
        assert longest == LENGTH


def _trained(setup: Setup, samples: bool) -> tuple[list[float], list[Tensor]]:
    model, optimizer = build(setup)
    torch.manual_seed(dist.get_rank())
    if samples:
        sampler = _sampler(model, share=math.inf)
        optimizer.register_step_post_hook(lambda *_: sampler.after_step())
    losses = train(setup, model, optimizer)
    return losses, [*state_of(model, optimizer), torch.get_rng_state()]


def _differs(setup: Setup) -> list[str]:
    plain, sampled = _trained(setup, samples=False), _trained(setup, samples=True)
    found = [] if plain[0] == sampled[0] else ["losses"]
    return found if same_bits(plain[1], sampled[1]) else [*found, "state"]


@pytest.mark.parametrize(
    "setup",
    [Setup(steps=2), Setup(steps=2, gathered=None, dtype=torch.bfloat16)],
    ids=["mixed precision", "bf16 masters"],
)
def test_training_is_not_changed_by_sampling(ranks, setup: Setup) -> None:
    """Nor are random numbers, as of dropout."""
    assert ranks(2).run(_differs, setup) == [[], []]


def _wrong_pieces(setup: Setup) -> list[str]:
    """What is wrong with copies of parts of a group's shards."""
    model, optimizer = build(setup)
    wrong = []
    for group in param_groups(model):
        pieces = [group.piece(i, 0, numel) for i, numel in enumerate(group.numels)]
        whole = torch.cat([piece.view(torch.uint8) for piece in pieces])
        if not torch.equal(whole, group.shard()):
            wrong.append(f"{group.name}: not what is gathered")
        if not torch.equal(group.piece(0, 3, 10), pieces[0][3:10]):
            wrong.append(f"{group.name}: another part")
        for piece in pieces:
            piece.zero_()
        if not torch.equal(whole, group.shard()):
            wrong.append(f"{group.name}: parameters change with a piece")
    (group,) = (group for group in param_groups(model) if group.name == "0")
    index = [param.name for param in group.params].index("0.experts.w1_EFD")
    piece = group.piece(index, 0, group.numels[index])
    before = piece.clone()
    train(replace(setup, steps=1), model, optimizer)
    if not torch.equal(piece, before):
        wrong.append("a piece changes with the parameters")
    if torch.equal(group.piece(index, 0, group.numels[index]), before):
        wrong.append("nothing was trained")
    return wrong


@pytest.mark.parametrize("gathered", [torch.bfloat16, None])
def test_a_piece_is_a_copy_of_what_is_gathered(ranks, gathered: torch.dtype | None) -> None:
    setup = Setup(gathered=gathered, dtype=torch.bfloat16 if gathered is None else torch.float32)
    assert ranks(2).run(_wrong_pieces, setup) == [[], []]
