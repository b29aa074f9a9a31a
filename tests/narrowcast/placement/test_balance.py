"""Load alone: bounds that can be reached are, and none is missed by more than EPLB's packing."""

import math

import pytest
import torch
from torch import Tensor

from narrowcast.placement.balance import greedy, limit_of, packed, part_loads
from narrowcast.placement.enumeration import all_divisions


def skewed(num_units: int, seed: int) -> Tensor:
    """Whole loads; the seed also says how unequal."""
    generator = torch.Generator().manual_seed(seed)
    spread = (0.1, 0.4, 0.8, 1.5)[seed % 4]
    return (1000 * torch.exp(spread * torch.randn(num_units, generator=generator))).round().double()


def busiest(load_U: Tensor, part_U: Tensor, num_parts: int) -> float:
    return float(part_loads(load_U, part_U, num_parts).max())


def least_possible(load_U: Tensor, num_parts: int) -> float:
    """The load of the busiest part in the best of all divisions."""
    one_hot_Q = torch.arange(num_parts)
    least = math.inf
    for part_NU in all_divisions(len(load_U), num_parts).split(50_000):
        load_NQ = ((part_NU[:, :, None] == one_hot_Q) * load_U[:, None]).sum(dim=1)
        least = min(least, float(load_NQ.amax(dim=1).min()))
    return least


@pytest.mark.parametrize("num_units", [8, 12, 16])
def test_there_are_as_many_divisions_as_combinatorics_says(num_units: int) -> None:
    for num_parts in (2, num_units // 2):
        if num_units == 16 and num_parts > 2:
            continue
        part_NU = all_divisions(num_units, num_parts)
        size = num_units // num_parts
        count = math.factorial(num_units) // math.factorial(size) ** num_parts
        assert len(part_NU.unique(dim=0)) == count // math.factorial(num_parts)
        one_hot_NUQ = part_NU[:, :, None] == torch.arange(num_parts)
        assert (one_hot_NUQ.sum(dim=1) == size).all()


@pytest.mark.parametrize(
    ("num_units", "num_parts"),
    [
        *[(8, 2), (8, 4), (10, 5), (12, 2), (12, 4), (14, 2), (15, 3), (16, 2)],
        *[
            pytest.param(units, parts, marks=pytest.mark.wide)
            for units, parts in ((12, 6), (14, 7), (15, 5), (16, 4), (16, 8))
        ],
    ],
)
def test_the_tightest_bound_that_can_be_reached_is_reached(num_units: int, num_parts: int) -> None:
    for seed in range(8):
        load_U = skewed(num_units, seed)
        least = least_possible(load_U, num_parts)
        # Asked for, or found where nothing can be reached that is asked for.
        for limit in (least, 0.0):
            part_U = packed(load_U, num_parts, limit)
            assert torch.bincount(part_U).tolist() == [num_units // num_parts] * num_parts
            assert busiest(load_U, part_U, num_parts) == least


@pytest.mark.parametrize(("num_units", "num_parts"), [(64, 8), (128, 64), (256, 64), (24, 8)])
def test_a_packing_is_never_worse_than_the_greedy_one_whatever_is_asked(
    num_units: int, num_parts: int
) -> None:
    better = 0
    for seed in range(4):
        load_U = skewed(num_units, seed)
        most = busiest(load_U, greedy(load_U, num_parts), num_parts)
        for max_load in (1.0, 1.02, 1.2):
            limit = limit_of(load_U, num_parts, max_load)
            found = busiest(load_U, packed(load_U, num_parts, limit), num_parts)
            assert found <= max(most, limit)
            better += found < most
    assert better or num_units == 2 * num_parts  # of two units greedy is the best there is


def test_the_greedy_packing_gives_each_unit_to_the_least_loaded_part_with_room() -> None:
    # 9 to part 0; 5 to 1, 4 to 1, which is full then; 3 to 0, though it has more.
    assert greedy(torch.tensor([3, 9, 4, 5]), 2).tolist() == [0, 0, 1, 1]


def test_a_limit_is_a_whole_load() -> None:
    load_U = torch.tensor([3, 4, 5, 6])
    assert limit_of(load_U, 2, 1.0) == 9
    assert limit_of(load_U, 2, 1.1) == 9
    assert limit_of(load_U, 2, 10 / 9) == 10
    assert limit_of(load_U, 2, math.inf) == limit_of(load_U, 2, None) == math.inf
