"""Counts of experts selected together, by hand, and against a count token by token."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from narrowcast.placement.correlation import (
    MIN_TOKENS,
    coselection,
    first_order,
    held_out_correlation,
    most_frequent_next,
    normalized,
    second_order,
)

# Each row of a hand-worked example stands for so many tokens, or there would be too few.
REPEATS = 512


def routes(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices


def repeated(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8).repeat(REPEATS, 1)


def test_a_pair_counts_the_tokens_that_selected_both():
    ids_TK = torch.tensor([[0, 1, 2], [2, 0, 1], [3, 0, 1]])
    assert coselection(ids_TK, 5).tolist() == [
        [0, 3, 2, 1, 0],
        [3, 0, 2, 1, 0],
        [2, 2, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(256, torch.uint8), (300, torch.int16)], ids=["uint8", "int16"]
)
def test_ids_of_every_dtype_and_weights_are_counted_as_token_by_token(num_experts, dtype):
    ids_TK = routes(50, num_experts, 6)
    weight_T = torch.arange(50)
    counted_EE = torch.zeros(num_experts, num_experts, dtype=torch.int64)
    for ids, weight in zip(ids_TK.tolist(), weight_T.tolist(), strict=True):
        for i, j in itertools.permutations(ids, 2):
            counted_EE[i, j] += weight
    assert torch.equal(coselection(ids_TK.to(dtype), num_experts, weight_T), counted_EE)


def test_the_graph_is_the_counts_over_the_largest():
    counts_EE = torch.tensor([[0, 4, 1], [4, 0, 0], [1, 0, 0]])
    assert normalized(counts_EE).tolist() == [[0, 1, 0.25], [1, 0, 0], [0.25, 0, 0]]


def test_without_pairs_counts_and_graph_are_zero():
    counts_EE = coselection(routes(8, 4, 1), 4)
    assert counts_EE.dtype == torch.int64
    assert not counts_EE.any()
    assert not normalized(counts_EE).any()


def test_a_first_order_row_has_the_next_experts_of_an_experts_tokens():
    table = first_order(
        repeated([[0, 1], [0, 1], [0, 2], [0, 2]]), repeated([[3, 1], [3, 2], [1, 2], [3, 0]]), 4
    )
    assert table.keys_NQ.tolist() == [[0], [1], [2], [3]]
    assert (table.support_N / REPEATS).tolist() == [4, 2, 2, 0]
    assert (table.counts_NE / REPEATS).tolist() == [
        [1, 2, 2, 3],
        [0, 1, 1, 2],
        [1, 1, 1, 1],
        [0, 0, 0, 0],
    ]
    assert table.probabilities_NE[0].tolist() == [0.25, 0.5, 0.5, 0.75]
    shares = most_frequent_next(table).tolist()
    assert shares[:3] == [0.75, 1, 0.5]
    assert math.isnan(shares[3])


def test_a_second_order_row_exists_for_each_pair_that_was_seen():
    before, previous, after = repeated([[2], [0], [2]]), repeated([[1], [1], [1]]), [[0], [1], [2]]
    table = second_order(before, previous, repeated(after), 3)
    assert table.keys_NQ.tolist() == [[0, 1], [2, 1]]
    assert (table.support_N / REPEATS).tolist() == [1, 2]
    assert table.probabilities_NE.tolist() == [[0, 1, 0], [0.5, 0, 0.5]]


def test_second_order_counts_are_those_of_token_by_token():
    before, previous, after = (routes(MIN_TOKENS, 9, 3, seed) for seed in range(3))
    counted: dict[tuple[int, int], list[int]] = {}
    for a, b, c in zip(before.tolist(), previous.tolist(), after.tolist(), strict=True):
        for key in itertools.product(a, b):
            row = counted.setdefault(key, [0] * 9)
            for expert in c:
                row[expert] += 1
    table = second_order(before, previous, after, 9)
    rows = zip(table.keys_NQ.tolist(), table.counts_NE.tolist(), strict=True)
    assert {tuple(key): row for key, row in rows} == counted
    assert torch.equal(table.counts_NE.sum(dim=1), 3 * table.support_N)


def test_too_few_tokens_are_refused_with_their_number_and_the_cure():
    few = routes(MIN_TOKENS - 1, 4, 2)
    with pytest.raises(ValueError, match=r"1023 tokens are too few.*at least 1024"):
        first_order(few, few, 4)
    with pytest.raises(ValueError, match=r"1023 tokens are too few.*at least 1024"):
        second_order(few, few, few, 4)


def test_held_out_correlation_is_pearsons_of_each_pair_once():
    x_EE = torch.tensor([[0, 1, 2], [1, 0, 3], [2, 3, 0]])
    y_EE = torch.tensor([[0, 2, 1], [2, 0, 3], [1, 3, 0]])
    # Of (1, 2, 3) and (2, 1, 3); zeros of the diagonal would make it 0.83.
    assert held_out_correlation(x_EE, y_EE) == pytest.approx(0.5)
    assert held_out_correlation(x_EE, 7 * x_EE) == pytest.approx(1)


def test_held_out_correlation_of_first_order_tables_is_of_all_counts():
    one, other = (
        first_order(repeated([[0], [0], [1]]), repeated([[a], [a], [b]]), 2)
        for a, b in ((0, 1), (1, 1))
    )
    # Of (2, 0, 0, 1) and (0, 2, 0, 1), deviations from 3/4: -5/4 over 11/4.
    assert held_out_correlation(one, other) == pytest.approx(-5 / 11)


def test_held_out_correlation_of_second_order_tables_has_rows_that_one_lacks_as_zero() -> None:
    one, other = (
        second_order(*(repeated([[expert] for expert in row]) for row in rows), 2)
        for rows in (([0, 0, 0], [0, 0, 0], [0, 0, 1]), ([0, 0, 1], [0, 0, 0], [0, 0, 0]))
    )
    assert (len(one.keys_NQ), len(other.keys_NQ)) == (1, 2)
    # Of (2, 1, 0, 0) and (2, 0, 1, 0): deviations from 3/4.
    assert held_out_correlation(one, other) == pytest.approx(7 / 11)


def test_held_out_correlation_with_a_constant_table_is_nan():
    constant_EE = torch.ones(3, 3, dtype=torch.int64)
    assert math.isnan(held_out_correlation(constant_EE, coselection(routes(9, 3, 2), 3)))


def test_routes_that_follow_each_other_are_found_and_hold_for_other_tokens():
    """Unlike routes drawn independently of the layer before."""
    previous, unrelated = routes(4 * MIN_TOKENS, 16, 2, 0), routes(4 * MIN_TOKENS, 16, 2, 1)
    following = (previous + 3) % 16
    halves = [slice(None, 2 * MIN_TOKENS), slice(2 * MIN_TOKENS, None)]
    found, none = (
        held_out_correlation(*(first_order(previous[h], after[h], 16) for h in halves))
        for after in (following, unrelated)
    )
    assert found > 0.95
    assert abs(none) < 0.3
    assert most_frequent_next(first_order(previous, following, 16)).eq(1).all()
