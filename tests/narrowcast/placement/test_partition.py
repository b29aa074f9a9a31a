"""Dividing the experts of a layer: exact costs, known optima, and what each search promises."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowcast.placement import enumeration
from narrowcast.placement.balance import greedy, packed, part_loads
from narrowcast.placement.enumeration import all_divisions
from narrowcast.placement.partition import (
    RoutedSets,
    contiguous,
    occult,
    pairwise,
    random,
    rows_sent,
)
from narrowcast.placement.problem import Problem
from narrowcast.placement.search import search
from narrowcast.placement.swaps import Division

LLAMA_MOE = Path(__file__).parents[2] / "data" / "llama_moe_8e_top2_layers0-15.npz"


def clustered(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Tensor:
    """(T, K) ids of tokens that prefer the experts of one of a few topics; loads are skewed."""
    generator = torch.Generator().manual_seed(seed)
    favours = torch.rand(10, num_experts, generator=generator) < 0.2
    popular = torch.randn(num_experts, generator=generator)
    topic_T = torch.randint(10, (num_tokens,), generator=generator)
    noise = -torch.log(-torch.log(torch.rand(num_tokens, num_experts, generator=generator)))
    return (2.5 * favours[topic_T] + 0.4 * popular + noise).topk(top_k, dim=1).indices


def planted(num_experts: int, block: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids of 500 tokens that stay within shuffled blocks of experts, and the block of each."""
    generator = torch.Generator().manual_seed(seed)
    block_E = random(num_experts, num_experts // block, seed)
    chosen_T = torch.randint(num_experts // block, (500,), generator=generator)
    score = torch.rand(500, num_experts, generator=generator) + (block_E == chosen_T[:, None])
    return score.topk(top_k, dim=1).indices, block_E


def divisions(experts: list[int], size: int) -> Iterator[list[tuple[int, ...]]]:
    """All ways to divide the experts into sets of `size`."""
    if not experts:
        yield []
        return
    first, *others = experts
    for fellows in combinations(others, size - 1):
        left = [e for e in others if e not in fellows]
        yield from ([(first, *fellows), *rest] for rest in divisions(left, size))


def optimum(sets: RoutedSets, num_parts: int, max_load: float = torch.inf) -> int:
    """The fewest rows of any division, by trying all."""
    fewest = torch.inf
    for parts in divisions(list(range(sets.num_experts)), sets.num_experts // num_parts):
        part_E = torch.empty(sets.num_experts, dtype=torch.int64)
        for number, experts in enumerate(parts):
            part_E[list(experts)] = number
        if busiest(sets, part_E, num_parts) <= max_load:
            fewest = min(fewest, rows_sent(sets, part_E))
    return fewest


def shared_weight(weight_EE: Tensor, part_E: Tensor) -> float:
    return float(weight_EE[part_E[:, None] == part_E].sum())


def swapped(part_E: Tensor, a: int, b: int) -> Tensor:
    part_E = part_E.clone()
    part_E[[a, b]] = part_E[[b, a]]
    return part_E


def sizes(part_E: Tensor, num_parts: int) -> list[int]:
    return torch.bincount(part_E, minlength=num_parts).tolist()


def busiest(sets: RoutedSets, part_E: Tensor, num_parts: int) -> float:
    """Load of the busiest part over the mean."""
    weight_SK = sets.weight_S[:, None].expand_as(sets.ids_SK).double()
    load_Q = torch.bincount(part_E[sets.ids_SK].reshape(-1), weight_SK.reshape(-1), num_parts)
    return float(load_Q.max() / load_Q.mean())


def coselection(ids_TK: Tensor, num_experts: int) -> Tensor:
    hold_TE = torch.zeros(len(ids_TK), num_experts, dtype=torch.float64).scatter_(1, ids_TK, 1)
    return (hold_TE.T @ hold_TE).fill_diagonal_(0)


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


@pytest.mark.parametrize("num_parts", [2, 4])
def test_the_search_finds_the_optimum_of_every_layer_of_llama_moe(num_parts):
    for counts_EE in np.load(LLAMA_MOE)["coselection"]:
        sets = RoutedSets.from_coselection(torch.from_numpy(counts_EE))
        part_E = search(sets, num_parts)
        assert sizes(part_E, num_parts) == [8 // num_parts] * num_parts
        assert rows_sent(sets, part_E) == optimum(sets, num_parts)


def test_the_search_finds_the_optimum_of_rows_where_pairs_mislead():
    misled = 0
    for seed in range(4):
        ids_TK = clustered(400, 8, 4, seed)
        sets = RoutedSets.of(ids_TK, 8)
        best = optimum(sets, 2)
        assert rows_sent(sets, search(sets, 2)) == best
        by_pairs_E = pairwise(coselection(ids_TK, 8), contiguous(8, 2), 2)
        misled += rows_sent(sets, by_pairs_E) > best
    assert misled


@pytest.mark.parametrize(("top_k", "num_ranks"), [(2, 8), (4, 8), (8, 4)])
def test_the_search_beats_what_it_is_compared_with(top_k, num_ranks):
    ids_TK = clustered(2000, 32, top_k)
    sets, graph_EE = RoutedSets.of(ids_TK, 32), coselection(ids_TK, 32)
    part_E = search(sets, num_ranks)
    assert sizes(part_E, num_ranks) == [32 // num_ranks] * num_ranks
    rows = rows_sent(sets, part_E)
    assert rows <= rows_sent(sets, pairwise(graph_EE, contiguous(32, num_ranks), num_ranks))
    assert rows < 0.98 * rows_sent(sets, occult(graph_EE, num_ranks))
    assert rows < 0.94 * rows_sent(sets, contiguous(32, num_ranks))


@pytest.mark.parametrize("restarts", [0, 3])
def test_no_search_is_worse_than_contiguous(restarts):
    # Contiguous is the best there is: tokens stay on one rank.
    ids_TK = torch.arange(16).view(8, 2)
    ids_TK = torch.cat([ids_TK, torch.tensor([[1, 2], [7, 8]])])
    sets = RoutedSets.of(ids_TK, 16)
    part_E = search(sets, 8, num_nodes=2, restarts=restarts)
    assert rows_sent(sets, part_E) <= rows_sent(sets, contiguous(16, 8))
    assert rows_sent(sets, part_E // 4) <= rows_sent(sets, contiguous(16, 2))


def test_whole_groups_are_not_worse_than_contiguous_either():
    # Nodes come first, but here rows to them cost nothing, and contiguous has fewer to ranks.
    generator = torch.Generator().manual_seed(26)
    first_T = 2 * (torch.randint(8, (30,), generator=generator) // 2)
    other_T = (first_T + 2 + torch.randint(6, (30,), generator=generator)) % 8
    ids_TK = torch.stack([first_T, first_T + 1, other_T], dim=1)
    noise_TK = torch.rand(20, 8, generator=generator).topk(3, dim=1).indices
    sets = RoutedSets.of(torch.cat([ids_TK, noise_TK]), 8)
    part_E = search(sets, 4, num_nodes=2, num_groups=8, cross_node_weight=0.0)
    assert rows_sent(sets, part_E) <= rows_sent(sets, contiguous(8, 4))


def test_equal_arguments_give_equal_divisions():
    sets = RoutedSets.of(clustered(500, 16, 4), 16)
    options = {"num_nodes": 2, "cross_node_weight": 1.0, "max_load": 1.1, "restarts": 2, "seed": 5}
    first_E = search(sets, 4, **options)
    torch.rand(3)
    assert torch.equal(search(sets, 4, **options), first_E)
    assert torch.equal(random(16, 4, 1), random(16, 4, 1))
    assert not torch.equal(random(16, 4, 1), random(16, 4, 2))
    assert sizes(random(16, 4, 1), 4) == [4] * 4


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


def test_a_bound_on_the_load_comes_before_rows():
    sets = RoutedSets.of(clustered(1000, 32, 4), 32)
    free_E = search(sets, 8, restarts=2)
    assert busiest(sets, free_E, 8) > 1.3
    fewest = rows_sent(sets, free_E)
    for num_nodes, bound in ((1, 1.2), (1, 1.05), (2, 1.1)):
        bound_E = search(sets, 8, num_nodes=num_nodes, max_load=bound, restarts=2)
        assert sizes(bound_E, 8) == [4] * 8
        assert busiest(sets, bound_E, 8) <= bound
        assert fewest < rows_sent(sets, bound_E) < rows_sent(sets, contiguous(32, 8))


def test_the_search_finds_the_optimum_within_a_bound():
    for seed in (2, 3, 5, 16, 33, 53):  # of the last three, swaps find none
        sets = RoutedSets.of(clustered(400, 8, 3, seed), 8)
        best = optimum(sets, 4, max_load=1.15)
        assert optimum(sets, 4) < best < torch.inf
        part_E = search(sets, 4, max_load=1.15)
        assert busiest(sets, part_E, 4) <= 1.15
        assert rows_sent(sets, part_E) == best


def weighed_rows(sets: RoutedSets, part_E: Tensor, weight: float | None) -> tuple[float, ...]:
    """What a search over four ranks on two nodes minimises within a bound."""
    ranks, nodes = rows_sent(sets, part_E), rows_sent(sets, part_E // 2)
    return (nodes, ranks) if weight is None else (ranks + weight * nodes,)


@pytest.mark.parametrize("weight", [None, 0.0, 2.5])
def test_the_search_finds_the_optimum_of_nodes_and_a_bound_together(weight: float | None):
    numbers = [
        torch.tensor([parts.index(part) for e in range(8) for part in parts if e in part])
        for ordered in divisions(list(range(8)), 2)
        for parts in permutations(ordered)
        if parts[0] < parts[1] and parts[2] < parts[3] and parts[0] < parts[2]
    ]
    for seed in range(3):
        sets = RoutedSets.of(clustered(400, 8, 3, seed), 8)
        costs = [(busiest(sets, e, 4), *weighed_rows(sets, e, weight)) for e in numbers]
        for max_load in (1.0, 1.02, 1.1, 1.3):
            best = min((max(max_load, load), *rows) for load, *rows in costs)
            part_E = search(sets, 4, num_nodes=2, cross_node_weight=weight, max_load=max_load)
            load = max(max_load, busiest(sets, part_E, 4))
            assert (load, *weighed_rows(sets, part_E, weight)) == pytest.approx(best)


@pytest.mark.parametrize("max_load", [1.0, 1.05, 1.3])
@pytest.mark.parametrize(
    ("num_nodes", "num_groups"), [(1, None), (2, None), (4, 8)], ids=["flat", "nodes", "groups"]
)
def test_no_bound_however_tight_is_missed_by_more_than_a_greedy_packing_misses_it(
    max_load: float, num_nodes: int, num_groups: int | None
):
    """Whole groups on each node leave the greedy packing less to choose from, too."""
    generator = torch.Generator().manual_seed(1)
    popularity = torch.exp(torch.randn(64, generator=generator) * 0.6)
    sets = RoutedSets.of(torch.multinomial(popularity.expand(300, 64), 4, generator=generator), 64)
    if num_groups is None:
        greedy_E = greedy(sets.load_E, 16)
    else:
        node_G = greedy(sets.load_E.view(8, 8).sum(dim=1), num_nodes)
        node_E, greedy_E = node_G.repeat_interleave(8), torch.empty(64, dtype=torch.int64)
        for node in range(num_nodes):
            here_M = node_E == node
            greedy_E[here_M] = 4 * node + greedy(sets.load_E[here_M], 4)
    options = {"num_nodes": num_nodes, "num_groups": num_groups, "restarts": 1}
    part_E = search(sets, 16, max_load=max_load, **options)
    assert sizes(part_E, 16) == [4] * 16
    assert busiest(sets, part_E, 16) <= max(max_load, busiest(sets, greedy_E, 16))


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_swaps_reach_the_tightest_bound_too_where_there_are_too_many_divisions_to_try(
    num_nodes, monkeypatch
):
    for seed in range(2):
        sets = RoutedSets.of(clustered(300, 12, 3, seed), 12)
        part_NE = all_divisions(12, 4)
        least = min(float(part_loads(sets.load_E, part_E, 4).max()) for part_E in part_NE.unbind())
        monkeypatch.setattr(enumeration, "_MAX_COUNTED", 0)
        part_E = search(sets, 4, num_nodes=num_nodes, max_load=1.0)
        assert float(part_loads(sets.load_E, part_E, 4).max()) == least
        monkeypatch.undo()


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_search_of_sixteen_experts_is_as_even_as_any_division_where_that_is_asked(num_nodes):
    """The packing is: see test_balance."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        popularity = torch.exp(torch.randn(16, generator=generator) * 0.6)
        ids_TK = torch.multinomial(popularity.expand(1000, 16), 4, generator=generator)
        sets = RoutedSets.of(ids_TK, 16)
        least = float(part_loads(sets.load_E, packed(sets.load_E, 4, 0), 4).max())
        part_E = search(sets, 4, num_nodes=num_nodes, max_load=1.0, restarts=1)
        assert float(part_loads(sets.load_E, part_E, 4).max()) == least


def test_loads_are_of_the_tokens_that_are_given_and_not_of_those_that_are_fitted_on():
    sets = RoutedSets.of(clustered(500, 16, 4), 16)
    load_E = torch.tensor([900, 800, 700, 600, *[100] * 12])
    part_E = search(sets, 4, load_E=load_E, max_load=1.35)
    assert float(part_loads(load_E, part_E, 4).max()) <= 1.35 * 4200 / 4
    by_sets_E = search(sets, 4, max_load=1.35)
    assert float(part_loads(load_E, by_sets_E, 4).max()) > 1.35 * 4200 / 4


def test_a_bound_that_is_kept_anyway_changes_nothing():
    sets = RoutedSets.of(clustered(500, 16, 4), 16)
    assert torch.equal(search(sets, 4, max_load=4.0), search(sets, 4))


def test_a_bound_out_of_reach_is_approached():
    ids_TK = torch.tensor([[0]] * 60 + [[1]] * 20 + [[2]] * 10 + [[3]] * 10)
    sets = RoutedSets.of(ids_TK, 4)
    part_E = search(sets, 2, max_load=1.0)
    assert busiest(sets, part_E, 2) == 1.4


def test_planted_ranks_and_nodes_are_found():
    ids_TK, block_E = planted(16, block=4, top_k=3)
    sets = RoutedSets.of(ids_TK, 16)
    together_EE = block_E[:, None] == block_E
    for weight in (None, 0.0, 1.0):
        node_E = search(sets, 8, num_nodes=4, cross_node_weight=weight, restarts=2) // 2
        assert torch.equal(node_E[:, None] == node_E, together_EE)
    rank_E = search(sets, 4)
    assert torch.equal(rank_E[:, None] == rank_E, together_EE)


def test_the_weight_of_a_node_trades_rows_between_nodes_for_rows_within():
    sets = RoutedSets.of(clustered(1000, 24, 4, seed=3), 24)

    def rows(weight: float | None) -> tuple[int, int]:
        part_E = search(sets, 12, num_nodes=4, cross_node_weight=weight, restarts=2)
        return rows_sent(sets, part_E // 3), rows_sent(sets, part_E)

    nodes_first, both, ranks_only = rows(None), rows(1.0), rows(0.0)
    assert nodes_first[0] < ranks_only[0]
    assert nodes_first[1] > ranks_only[1]
    assert sum(both) <= min(sum(nodes_first), sum(ranks_only))
    assert ranks_only[1] <= rows_sent(sets, search(sets, 12, restarts=2))


@pytest.mark.parametrize("weight", [None, 1.0])
def test_groups_stay_whole_on_nodes_where_they_can(weight):
    # Tokens stay within blocks that cut across the groups: whole groups cost rows.
    ids_TK, _ = planted(16, block=4, top_k=3)
    sets = RoutedSets.of(ids_TK, 16)
    options = {"num_nodes": 4, "cross_node_weight": weight, "restarts": 2}
    whole_E = search(sets, 8, num_groups=8, max_load=1.5, **options)
    assert sizes(whole_E, 8) == [2] * 8
    node_GE = (whole_E // 2).view(8, 2)
    assert torch.equal(node_GE[:, 0], node_GE[:, 1])
    # Two groups cannot stay whole on four nodes.
    free_E = search(sets, 8, num_groups=2, **options)
    assert rows_sent(sets, free_E // 2) == 500 < rows_sent(sets, whole_E // 2)


def test_groups_that_go_together_share_a_node():
    group_T = torch.randint(4, (400,), generator=torch.Generator().manual_seed(0))
    # Groups g and g + 4 of 8, each of two experts, are selected together.
    ids_TK = torch.stack([2 * group_T, 2 * group_T + 1, 2 * group_T + 8, 2 * group_T + 9], dim=1)
    sets = RoutedSets.of(ids_TK, 16)
    part_E = search(sets, 8, num_nodes=4, num_groups=8)
    assert rows_sent(sets, part_E // 2) == 400
    assert rows_sent(sets, part_E) == 800


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("num_tokens", [0, 50])
@pytest.mark.parametrize("num_ranks", [1, 4, 16])
def test_where_nothing_can_be_gained_experts_stay_contiguous(top_k, num_tokens, num_ranks):
    sets = RoutedSets.of(clustered(num_tokens, 16, top_k), 16)
    part_E = search(sets, num_ranks)
    assert sizes(part_E, num_ranks) == [16 // num_ranks] * num_ranks
    if top_k == 1 or num_tokens == 0 or num_ranks in (1, 16):
        assert torch.equal(part_E, contiguous(16, num_ranks))
        assert sizes(search(sets, num_ranks, max_load=1.1), num_ranks) == sizes(part_E, num_ranks)


def test_what_does_not_divide_evenly_is_refused_with_both_numbers():
    sets = RoutedSets.of(clustered(10, 12, 2), 12)
    with pytest.raises(ValueError, match="12 experts do not divide evenly over 5"):
        search(sets, 5)
    with pytest.raises(ValueError, match="6 ranks do not divide evenly over 4 nodes"):
        search(sets, 6, num_nodes=4)
    with pytest.raises(ValueError, match="12 experts do not divide evenly into 5 groups"):
        search(sets, 6, num_nodes=2, num_groups=5)
    with pytest.raises(ValueError, match="over 0 parts"):
        contiguous(12, 0)
    with pytest.raises(ValueError, match="over 5 parts"):
        occult(torch.zeros(12, 12), 5)
