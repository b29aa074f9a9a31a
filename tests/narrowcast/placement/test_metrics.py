"""Metrics of placements and routers: worked by hand, and against a count token by token."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from narrowcast.placement.metrics import (
    measure,
    measure_layer,
    placement_table,
    rows_bounds,
    rows_per_token,
)
from narrowcast.placement.placement import Placement, contiguous
from narrowcast.placement.routers import measure_router
from narrowcast.placement.trace import RoutingTrace
from narrowcast.util import aligned

# Two experts a rank, ranks 0 and 1 on the first node.
RANK_E = torch.arange(8) // 2


def routes(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices


def trace_of(ids_LTK: Tensor, num_experts: int) -> RoutingTrace:
    layers, tokens, _ = ids_LTK.shape
    token = torch.arange(tokens)
    names = tuple(f"layers.{i}.moe" for i in range(layers))
    return RoutingTrace("m", names, num_experts, 1, ids_LTK, token * 0 + 1, token * 0, token)


def test_metrics_of_four_tokens_are_those_worked_by_hand():
    # Ranks 0 0; 0 1; 0 3; 2 3. Nodes 0 0; 0 0; 0 1; 1 1.
    ids_TK = torch.tensor([[0, 1], [1, 2], [0, 6], [4, 7]], dtype=torch.uint8)
    m = measure_layer("a", ids_TK, RANK_E, 4, 2, home_T=torch.tensor([0, 2, 1, 3]))
    assert m.layer == "a"
    assert m.rows_per_token == (1 + 2 + 2 + 2) / 4
    assert m.rows_bounds == (1, 2)
    assert m.rows_removed == 1 - 7 / 8
    assert m.intra_share == 1 / 4
    assert m.nodes_per_token == (1 + 1 + 2 + 1) / 4
    assert m.local_share == (2 + 0 + 0 + 1) / 8
    assert m.rows_to_ranks == (0 + 2 + 2 + 1) / 4
    assert m.rows_to_nodes == (0 + 2 + 1 + 0) / 4
    # Assignments 4 1 1 2 and rows 3 1 1 2.
    assert m.busiest_load == 4 / 2
    assert m.busiest_rows == 3 / (7 / 4)


def test_metrics_are_those_counted_token_by_token():
    experts, ranks, nodes, top_k = 300, 12, 3, 5
    generator = torch.Generator().manual_seed(1)
    rank_E = torch.randperm(experts, generator=generator) // (experts // ranks)
    home_T = torch.randint(ranks, (200,), generator=generator)
    ids_TK = routes(200, experts, top_k)
    sent, local, intra, to_ranks, to_nodes, node_count = 0, 0, 0, 0, 0, 0
    for ids, home in zip(ids_TK.tolist(), home_T.tolist(), strict=True):
        of = [int(rank_E[i]) for i in ids]
        sent += len(set(of))
        local += of.count(home)
        intra += sum(of[a] == of[b] for a in range(top_k) for b in range(a))
        to_ranks += len(set(of) - {home})
        to_nodes += sum(rank // 4 != home // 4 for rank in set(of))
        node_count += len({rank // 4 for rank in of})
    m = measure_layer("", ids_TK.to(torch.int16), rank_E, ranks, nodes, home_T)
    found = [m.rows_per_token, m.local_share, m.intra_share, m.rows_to_ranks, m.rows_to_nodes]
    expected = [sent, local / top_k, intra / 10, to_ranks, to_nodes]
    assert [*found, m.nodes_per_token] == pytest.approx([x / 200 for x in [*expected, node_count]])
    assert m.rows_per_token == rows_per_token(ids_TK.to(torch.int16), rank_E)


def test_without_homes_each_rank_is_as_likely_a_tokens_own():
    ids_TK = routes(40, 8, 3)
    by_home = [
        measure_layer("", ids_TK, RANK_E, 4, 2, torch.full((40,), rank)) for rank in range(4)
    ]
    expected = measure_layer("", ids_TK, RANK_E, 4, 2)
    for name in ("local_share", "rows_to_ranks", "rows_to_nodes"):
        mean = sum(getattr(m, name) for m in by_home) / 4
        assert getattr(expected, name) == pytest.approx(mean)


@pytest.mark.parametrize(
    ("top_k", "num_experts", "num_ranks", "bounds"),
    [
        (8, 64, 4, (1, 4)),
        (2, 8, 8, (2, 2)),
        (6, 8, 2, (2, 2)),
        (3, 8, 4, (2, 3)),
        (1, 4, 1, (1, 1)),
    ],
)
def test_bounds_are_those_of_equation_5_and_no_placement_leaves_them(
    top_k, num_experts, num_ranks, bounds
):
    assert rows_bounds(top_k, num_experts, num_ranks) == bounds
    rank_E = torch.randperm(num_experts) // (num_experts // num_ranks)
    assert bounds[0] <= rows_per_token(routes(99, num_experts, top_k), rank_E) <= bounds[1]


def test_on_one_rank_all_is_local_and_nothing_is_sent():
    m = measure_layer("", routes(9, 4, 2), torch.zeros(4, dtype=torch.int64), 1, 1, torch.zeros(9))
    assert (m.rows_per_token, m.rows_removed, m.intra_share, m.local_share) == (1, 0.5, 1, 1)
    assert (m.rows_to_ranks, m.rows_to_nodes, m.busiest_load, m.busiest_rows) == (0, 0, 1, 1)


def test_at_top_1_there_are_no_pairs_and_no_rows_to_remove():
    m = measure_layer("", routes(9, 8, 1), RANK_E, 4)
    assert (m.rows_per_token, m.rows_removed) == (1, 0)
    assert math.isnan(m.intra_share)


def test_no_tokens_and_uneven_nodes_are_refused():
    with pytest.raises(ValueError, match="no tokens"):
        measure_layer("", torch.empty(0, 2, dtype=torch.uint8), RANK_E, 4)
    with pytest.raises(ValueError, match="4 ranks do not divide over 3 nodes"):
        measure_layer("", routes(9, 8, 2), RANK_E, 4, 3)


def test_every_layer_is_judged_by_its_own_placement_and_the_tokens_own_rank():
    pairs_TK = torch.tensor([[0, 2], [1, 3]])
    trace = replace(trace_of(torch.stack([pairs_TK, pairs_TK]), 4), rank_T=torch.tensor([2, 3]))
    experts_LE = torch.tensor([[0, 1, 2, 3], [0, 2, 1, 3]])
    placement = Placement("m", trace.layers, 2, 1, "rows", experts_LE)
    split, together = measure(trace, placement)
    assert (split.layer, split.rows_per_token, split.local_share) == ("layers.0.moe", 2, 0.5)
    # Homes 2 and 3 of a recorded run are ranks 0 and 1 of these two.
    assert (together.layer, together.rows_per_token, together.local_share) == ("layers.1.moe", 1, 1)


def test_a_placement_of_another_model_is_refused():
    trace = trace_of(routes(9, 4, 2)[None], 4)
    with pytest.raises(ValueError, match="another model: other there, m here"):
        measure(trace, contiguous("other", trace.layers, 4, 2))


def test_router_metrics_of_a_small_trace_are_those_worked_by_hand():
    # Of 6 pairs, 0 1 has 3 of 4 co-selections. Loads are 3 3 1 1.
    ids_TK = torch.tensor([[0, 1], [1, 0], [0, 1], [2, 3]], dtype=torch.uint8)
    (layer,) = measure_router(trace_of(ids_TK[None], 4))
    assert layer.load_E.tolist() == [3, 3, 1, 1]
    assert layer.skew == 3 / 2
    assert layer.rows_per_token == {2: 1, 4: 2}
    assert (layer.top_pairs, layer.top_pairs_share) == (1, 3 / 4)
    # Products of loads: 9, four times 3, and 1.
    assert layer.independent_share == pytest.approx(9 / 22)
    assert math.isnan(layer.correlations.coselection)
    assert math.isnan(layer.next_share)


def test_a_routers_correlations_are_of_its_halves_and_its_next_layer():
    first_TK = routes(2048, 8, 2, 0)
    # Experts 0 and 1 never occur in the second layer, and no expert from 6 in the first.
    first_TK = first_TK[(first_TK < 6).all(dim=1)].repeat(3, 1)[:2048]
    next_TK = first_TK + 2
    # 0 with 1 in the earlier half, and 2 with 3 in the later.
    drifting_TK = torch.arange(2048)[:, None] // 1024 * 2 + torch.arange(2)
    ids_LTK = torch.stack([first_TK, next_TK, drifting_TK]).byte()
    first, _, drifting = measure_router(trace_of(ids_LTK, 8))
    assert first.load_E[6:].tolist() == [0, 0]
    assert first.next_share == 1
    assert math.isnan(drifting.next_share)
    assert drifting.correlations.coselection < 0
    assert first.correlations.coselection > 0.9
    assert first.correlations.first_order > 0.9
    assert math.isnan(drifting.correlations.first_order)
    assert math.isnan(first.correlations.second_order)


@pytest.mark.parametrize(
    ("num_experts", "degrees"), [(12, [2, 4]), (256, [2**n for n in range(1, 9)])]
)
def test_c_t_is_given_at_every_power_of_two_that_divides_the_experts(num_experts, degrees):
    ids_TK = routes(20, num_experts, 4)
    (layer,) = measure_router(trace_of(ids_TK.byte()[None], num_experts))
    assert list(layer.rows_per_token) == degrees
    for degree, rows in layer.rows_per_token.items():
        distinct = [len({i * degree // num_experts for i in ids}) for ids in ids_TK.tolist()]
        assert rows == pytest.approx(sum(distinct) / 20)


def test_independent_selection_carries_no_more_than_loads_explain():
    """Of selection drawn by unequal loads, the top pairs' share is near what is predicted."""
    generator = torch.Generator().manual_seed(0)
    weight_E = torch.linspace(1, 3, 32)
    ids_TK = torch.multinomial(weight_E.expand(20_000, -1), 2, generator=generator)
    (layer,) = measure_router(trace_of(ids_TK[None], 32))
    assert layer.top_pairs == 4
    assert layer.top_pairs_share == pytest.approx(layer.independent_share, rel=0.15)
    assert layer.independent_share > 1.5 * 4 / 496


def test_a_table_has_the_mean_and_the_worst_of_each_column():
    ids_LTK = torch.tensor([[[0, 1], [0, 1]], [[0, 2], [1, 3]]])
    trace = trace_of(ids_LTK, 4)
    metrics = measure(trace, contiguous("m", trace.layers, 4, 2))
    table = placement_table({"before": metrics, "after": metrics[::-1]}).splitlines()
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in table}
    # C_T, removed, intra, local, nodes, to ranks, to nodes, load, rows.
    assert rows["layers.0.moe", "before"][:4] == ["1.00", "50.0%", "100.0%", "50.0%"]
    assert rows["layers.1.moe", "before"][:4] == ["2.00", "0.0%", "0.0%", "50.0%"]
    assert rows["mean", "before"][:4] == ["1.50", "25.0%", "50.0%", "50.0%"]
    assert rows["worst", "before"] == [
        *("2.00", "0.0%", "0.0%", "50.0%", "1.00", "1.00", "0.00", "2.00", "2.00")
    ]
    assert rows["mean", "after"] == rows["mean", "before"]
    assert max(map(len, table)) <= 100


def test_columns_of_words_are_flush_left_and_those_of_numbers_right():
    assert aligned([["a", "n"], ["bcd", "100"]], words=1) == "a      n\nbcd  100"
