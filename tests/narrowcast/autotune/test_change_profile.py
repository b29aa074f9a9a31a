"""Changes from step to step are counted exactly, and put together as if on one rank."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from narrowcast.autotune import change_profile
from narrowcast.autotune.change_profile import (
    BLOCK_SIZES,
    FACTORS,
    ChangeRecorder,
    check_seconds,
    count,
    merged,
    sizes,
)
from narrowcast.fsdp2 import ShardedParam
from narrowcast.telemetry.changes import count_changes
from narrowcast.wire import floats

BF16 = floats.LAYOUTS[torch.bfloat16]


def drifted(numel: int, seed: int) -> tuple[Tensor, Tensor]:
    """A bf16 shard before and after a step, with NaN, infinities and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    old_N = torch.randn(numel, generator=generator)
    new_N = old_N * (1 + 0.01 * torch.randn(numel, generator=generator))
    odd = torch.tensor([float("nan"), 0.0, -0.0, float("inf")])[: min(numel, 4)]
    old_N[: len(odd)], new_N[: len(odd)] = odd, odd.flip(0)
    return old_N.bfloat16(), new_N.bfloat16()


@pytest.mark.parametrize("numel", [1, 3, 63, 64, 1000, 4097])
@pytest.mark.parametrize("block_size", [7, 512])
def test_counts_are_those_of_a_loop_over_values(numel: int, block_size: int) -> None:
    old_N, new_N = (x.view(torch.int16) for x in drifted(numel, seed=numel))
    changed = [
        (a >> 7) & 255 != (b >> 7) & 255
        for a, b in zip(old_N.tolist(), new_N.tolist(), strict=True)
    ]
    old_exponents = floats.exponents(old_N, BF16)
    counts = count(floats.exponents(new_N, BF16) != old_exponents, block_size).tolist()

    def parts_of(size: int) -> list[bool]:
        return [any(changed[start : start + size]) for start in range(0, numel, size)]

    parts = [parts_of(-(-numel // factor)) for factor in FACTORS]
    expected = [parts_of(size) for size in (1, block_size, *BLOCK_SIZES)] + parts
    assert counts == [sum(flags) for flags in expected]
    assert sizes(numel, block_size)[1:] == [len(flags) for flags in expected[1:]]
    changes = count_changes(new_N, old_exponents, BF16, block_size)
    assert counts[:2] == [changes.changed_exponents, changes.changed_blocks]


@dataclass
class Group:
    """As much of a parameter group as a recorder asks for."""

    place: int
    names: tuple[str, ...]
    shards: list[Tensor]
    ranks: int = 2
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    @property
    def params(self) -> list[ShardedParam]:
        sizes = zip(self.names, self.numels, strict=True)
        return [ShardedParam(n, size, self.dtypes.get(n, torch.bfloat16)) for n, size in sizes]

    @property
    def numels(self) -> list[int]:
        return [shard.numel() for shard in self.shards]

    @property
    def process_group(self) -> SimpleNamespace:
        return SimpleNamespace(rank=lambda: self.place)

    def piece(self, index: int, start: int, stop: int) -> Tensor:
        return self.shards[index][start:stop].clone()


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: [0, 1])


NAMES = ("norm.weight", "attention.wq.weight")


def profiled(steps_of: list[list[Tensor]], sample: int = 1 << 20, settled_after: int = 2) -> dict:
    """The merged profile of two ranks, each with its half of two parameters.

    Args:
        steps_of: the whole parameters, by step and parameter.
    """
    recorded = []
    for place in range(2):
        group = Group(place, NAMES, [])
        recorder = None
        for step, whole in enumerate(steps_of, start=1):
            group.shards = [x.chunk(2)[place] for x in whole]
            recorder = recorder or ChangeRecorder([group], block_size=512, sample=sample)
            recorder.after_step(step, settled=step > settled_after)
        recorded.append(recorder.recorded())
    return merged(recorded)


def training(num_steps: int) -> list[list[Tensor]]:
    """A norm whose second half changes in one step, and a matrix that drifts."""
    generator = torch.Generator().manual_seed(0)
    norm, matrix = torch.ones(100), torch.randn(6000, generator=generator)
    steps = []
    for step in range(1, num_steps + 1):
        if step == 4:
            norm = norm.clone()
            norm[77] = 0.25
        matrix = matrix * (1 + 0.01 * torch.randn(6000, generator=generator))
        steps.append([norm.bfloat16(), matrix.bfloat16()])
    return steps


def changed(steps: list[list[Tensor]], step: int, param: int, before: int = 1) -> Tensor:
    pair = (steps[step - 1][param], steps[step - 1 - before][param])
    new_N, old_N = (floats.exponents(x.view(torch.int16), BF16) for x in pair)
    return new_N != old_N


def test_rates_of_all_ranks_are_those_of_the_whole_parameters() -> None:
    steps = training(5)
    profile = profiled(steps)
    by_step = profile["exponent_change_by_step"]
    assert [entry["step"] for entry in by_step] == [2, 3, 4, 5]
    for entry in by_step:
        norm, matrix = (changed(steps, entry["step"], param) for param in range(2))
        assert entry["rates"] == {
            "all": (norm.sum() + matrix.sum()).item() / 6100,
            "norm": norm.sum().item() / 100,
            "attention": matrix.sum().item() / 6000,
        }
    # After the steps of the warm-up: of three, one changes half of the norm.
    by_type = profile["block_change_by_shard_type"]["shards"]
    assert (by_type["norm"]["shards"], by_type["norm"]["least"]) == (2, 0)
    assert by_type["norm"]["most"] == 1 / 3
    rates = profile["block_change_by_block_size"]["rates"]
    assert len(rates["attention"]) == len(BLOCK_SIZES)
    # The last block of a shard ends with it.
    of_512 = [
        changed(steps, step, 1)[start : min(start + 512, half + 3000)].any().item()
        for step in (3, 4, 5)
        for half in (0, 3000)
        for start in range(half, half + 3000, 512)
    ]
    assert rates["attention"][BLOCK_SIZES.index(512)] == sum(of_512) / len(of_512)


def test_rates_of_other_world_sizes_are_those_of_sharding_over_them() -> None:
    steps = training(5)
    points = profiled(steps)["shard_change_by_world_size"]
    assert [(p["world_size"], p["how"]) for p in points] == [
        (1, "joined"),
        (2, "measured"),
        *((2 * factor, "projected") for factor in FACTORS),
    ]
    for point in points:
        flags = [
            shard.any().item()
            for step in (3, 4, 5)
            for param in range(2)
            for half in changed(steps, step, param).chunk(2)
            for shard in half.chunk(max(point["world_size"] // 2, 1))
        ]
        if point["how"] == "joined":
            flags = [changed(steps, s, p).any().item() for s in (3, 4, 5) for p in range(2)]
        assert point["rate"] == sum(flags) / len(flags)


def test_intervals_compare_with_the_exponents_of_so_many_steps_before() -> None:
    steps = training(6)
    given = profiled(steps, settled_after=4)["exponent_change_by_interval"]
    assert given["sampled_share"] == 1
    for interval, rate in zip(given["intervals"], given["rates"], strict=True):
        pairs = [step for step in (5, 6) if step > interval]
        flags = [changed(steps, s, p, interval) for s in pairs for p in range(2)]
        expected = torch.cat(flags).double().mean().item() if flags else None
        assert rate == pytest.approx(expected)


def test_a_sample_is_of_every_shard_and_bounded() -> None:
    given = profiled(training(4), sample=100)["exponent_change_by_interval"]
    # Of 50 and 3000 values on each rank, every 31st.
    assert given["sampled_share"] == (2 + 97) / 3050
    assert given["rates"][0] > 0


def test_empty_shards_and_other_dtypes_are_left_out() -> None:
    group = Group(0, NAMES, [torch.zeros(0, dtype=torch.bfloat16), torch.zeros(5)])
    group.dtypes = {NAMES[1]: torch.int64}
    recorder = ChangeRecorder([group], block_size=512)
    recorder.after_step(1, settled=True)
    recorder.after_step(2, settled=True)
    profile = merged([recorder.recorded()])
    assert profile["shard_change_by_world_size"] == []
    assert profile["exponent_change_by_interval"]["rates"][0] is None
    assert profile["block_change_by_shard_type"]["shards"] == {}


def test_both_checks_are_timed_on_every_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    for name in ("changed_blocks", "block_hashes"):
        original = getattr(change_profile.codec, name)

        def recorded(x_N: Tensor, *rest: object, name: str = name, call=original) -> Tensor:
            checked.append((name, x_N.numel()))
            # Cached exponents lie in memory of their own.
            assert not any(isinstance(y, Tensor) and y.data_ptr() == x_N.data_ptr() for y in rest)
            return call(x_N, *rest)

        monkeypatch.setattr(change_profile.codec, name, recorded)
    shards = [x.chunk(2)[0] for x in training(1)[0]]
    seconds = check_seconds([Group(0, NAMES, shards)], block_size=64)
    assert all(s > 0 for s in seconds.values())
    assert seconds.keys() == {"hash", "compare"}
    assert set(checked) == {(n, m) for n in ("changed_blocks", "block_hashes") for m in (50, 3000)}
