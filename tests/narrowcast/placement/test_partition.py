"""Simple divisions of the experts of a layer, and the exact cost of each swap."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from narrowcast.placement.partition import (
    RoutedSets,
    occult,
    pairwise,
    random,
    rows_sent,
)
from narrowcast.placement.problem import Problem
from narrowcast.placement.swaps import Division
from tests.narrowcast.placement.routed import clustered, coselection, sizes, swapped


def shared_weight(weight_EE: Tensor, part_E: Tensor) -> float:
    return float(weight_EE[part_E[:, None] == part_E].sum())


def test_sets_count_tokens_whatever_the_order_of_their_experts():
    ids_TK = torch.tensor([[3, 1], [0, 2], [1, 3], [1, 3]], dtype=torch.uint8)
    sets = RoutedSets.of(ids_TK, 4)
    assert sets.ids_SK.tolist() == [[0, 2], [1, 3]]
    assert sets.weight_S.tolist() == [1, 3]
    same = RoutedSets.from_coselection(coselection(ids_TK.long(), 4).long())
    assert torch.equal(same.ids_SK, sets.ids_SK)
    assert torch.equal(same.weight_S, sets.weight_S)


def test_rows_are_distinct_parts_of_every_token():
    sets = RoutedSets(torch.tensor([[0, 1, 2], [1, 2, 5]]), torch.tensor([10, 1]), 6)
    assert rows_sent(sets, torch.tensor([0, 0, 0, 1, 1, 1])) == 10 * 1 + 2
    assert rows_sent(sets, torch.tensor([0, 1, 2, 0, 1, 2])) == 10 * 3 + 2


@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_nodes", "tokens_each"),
    [(8, 4, 2, 1), (12, 12, 3, 1), (8, 4, 4, 10**6 + 1)],  # the last: more than float32 can count
)
def test_the_cost_of_every_swap_is_exact_on_both_levels(
    top_k, num_experts, num_ranks, num_nodes, tokens_each
):
    generator = torch.Generator().manual_seed(top_k)
    ids_TK = torch.rand(40, num_experts, generator=generator).topk(top_k, dim=1).indices
    sets = RoutedSets.of(torch.cat([ids_TK, ids_TK[:20]]), num_experts)
    sets = replace(sets, weight_S=sets.weight_S * tokens_each)
    per_node = num_ranks // num_nodes

    def rows(part_E: Tensor) -> float:
        return rows_sent(sets, part_E) + 2.5 * rows_sent(sets, part_E // per_node)

    levels = ((num_ranks, 1.0), (num_nodes, 2.5))
    problem = Problem.of(sets.ids_SK, sets.weight_S, sets.load_E)
    division = Division.of(problem, random(num_experts, num_ranks, 0), levels)
    constant = rows(division.part_U) - division.cost(torch.inf)[1]
    for a, b in torch.randint(num_experts, (3, 2), generator=generator).tolist():
        before_E = division.part_U.clone()
        cost_EE = division.swap_costs()
        assert torch.equal(cost_EE, cost_EE.T)
        for i, j in combinations(range(num_experts), 2):
            assert cost_EE[i, j] == rows(swapped(before_E, i, j)) - rows(before_E)
        division.swap(a, b)
        assert torch.equal(division.part_U, swapped(before_E, a, b))
        assert division.cost(torch.inf)[1] == rows(division.part_U) - constant


def test_occult_divides_a_worked_example_as_printed():
    graph_EE = torch.zeros(8, 8)
    pairs = {(1, 4): 9, (2, 5): 9, (0, 1): 5, (2, 4): 3, (1, 3): 1, (4, 5): 1, (1, 6): 2}
    pairs |= {(4, 7): 5, (0, 3): 2, (3, 6): 6, (3, 7): 6, (2, 6): 3, (5, 6): 8}
    for (i, j), count in pairs.items():
        graph_EE[i, j] = graph_EE[j, i] = count
    # 0 starts with (1, 4), the first of two best pairs. 1 starts with 3, which ties with 5 at 1,
    # and takes 6, which ties with 7 at 6. 2 starts with 2, which has 6 with all of {1, 3, 4, 6}
    # where 0 has 7 (but 0 has less with {3, 6} alone, and 5 less with {1, 4} alone), and takes 5.
    expected = [3, 0, 2, 1, 0, 2, 1, 3]
    assert occult(graph_EE, 4).tolist() == expected
    assert occult(graph_EE / 9, 4).tolist() == expected


def test_occult_fills_a_part_by_all_that_is_on_it():
    graph_EE = torch.zeros(6, 6)
    for i, j, count in [(0, 5, 9), (1, 5, 4), (2, 0, 3), (2, 5, 3), (1, 3, 8)]:
        graph_EE[i, j] = graph_EE[j, i] = count
    assert occult(graph_EE, 2).tolist() == [0, 1, 0, 1, 1, 0]


def test_occult_gives_equal_parts_where_nothing_is_selected_together():
    for num_parts in (1, 2, 3, 6):
        assert (
            sizes(occult(torch.zeros(6, 6), num_parts), num_parts) == [6 // num_parts] * num_parts
        )


def test_pairwise_only_gains_and_ends_where_no_swap_does():
    for seed in range(3):
        weight_EE = coselection(clustered(300, 12, 3, seed), 12)
        start_E = random(12, 4, seed)
        part_E = pairwise(weight_EE, start_E, 4)
        assert sizes(part_E, 4) == [3] * 4
        reached = shared_weight(weight_EE, part_E)
        assert reached > shared_weight(weight_EE, start_E)
        for a, b in combinations(range(12), 2):
            assert shared_weight(weight_EE, swapped(part_E, a, b)) <= reached
    assert torch.equal(start_E, random(12, 4, seed))
