"""Placement search: known optima, bounds on load, nodes and groups."""

from itertools import permutations
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
from narrowcast.placement.search import search
from tests.narrowcast.placement.routed import (
    busiest,
    clustered,
    coselection,
    divisions,
    optimum,
    planted,
    sizes,
)

LLAMA_MOE = Path(__file__).parents[2] / "data" / "llama_moe_8e_top2_layers0-15.npz"


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


def test_a_bound_that_holds_anyway_changes_nothing():
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
