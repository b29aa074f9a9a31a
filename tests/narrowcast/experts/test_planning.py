"""Plans made of traces: of any routing, and how good they are on real ones."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from narrowcast.experts.benchmark import METHODS, held_out_rows, kahypar_rows, made_up
from narrowcast.experts.metrics import measure
from narrowcast.experts.planning import HELD_OUT, plan
from narrowcast.experts.routing import RoutingTrace, load_trace

DATA = Path(__file__).parents[2] / "data"


def a_trace(ids_LTK: torch.Tensor, num_experts: int = 16, **described: object) -> RoutingTrace:
    nothing_T = torch.zeros(ids_LTK.shape[1], dtype=torch.int64)
    layers = tuple(f"layers.{i}.moe" for i in range(len(ids_LTK)))
    return RoutingTrace("m f", layers, num_experts, 2, ids_LTK, *[nothing_T] * 3, **described)


def clustered(num_tokens: int = 2048, **described: object) -> RoutingTrace:
    ids_LTK = torch.stack([made_up(num_tokens, 16, 4, seed) for seed in range(2)])
    return a_trace(ids_LTK, **described)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_every_slot_an_expert(method: str) -> None:
    trace = clustered()
    placement = plan(trace, 4, method=method, restarts=4)
    described = (placement.model, placement.layers, placement.num_ranks, placement.num_nodes)
    assert described == ("m f", trace.layers, 4, 1)
    assert placement.method == method
    assert torch.equal(placement.experts_LE.sort().values, torch.arange(16).expand(2, -1))
    again = plan(trace, 4, method=method, restarts=4)
    assert torch.equal(placement.experts_LE, again.experts_LE)
    # Each layer has routing of its own, and gets a plan of its own.
    same = torch.equal(*placement.experts_LE)
    assert same == (method == "contiguous")


@pytest.mark.parametrize("method", ["pairwise", "occult", "rows"])
def test_no_layer_is_worse_than_contiguous_on_tokens_that_it_was_not_fitted_on(method: str) -> None:
    """Random routing has no pattern to learn: what was fitted to noise is not used."""
    generator = torch.Generator().manual_seed(0)
    ids_LTK = torch.rand(12, 1280, 16, generator=generator).topk(4).indices
    trace = a_trace(ids_LTK)
    later = trace.split(HELD_OUT)[1]
    planned = measure(later, plan(trace, 4, method=method, restarts=2))
    contiguous = measure(later, plan(trace, 4, method="contiguous"))
    moved = 0
    for ours, theirs in zip(planned, contiguous, strict=True):
        assert ours.rows_per_token <= theirs.rows_per_token
        moved += ours != theirs
    assert 0 < moved < 12


@pytest.mark.parametrize("weight", [None, 10.0])
def test_a_plan_of_fewer_nodes_is_kept_where_no_rank_is_saved(weight: float | None) -> None:
    """Every token is on two ranks either way: of two nodes as they are, of one as planned."""
    ids_TK = torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7]]).repeat(1024, 1)
    trace = a_trace(ids_TK[None], num_experts=8)
    (planned,) = measure(trace, plan(trace, 4, num_nodes=2, cross_node_weight=weight))
    assert (planned.rows_per_token, planned.nodes_per_token) == (2, 1)


def test_the_load_of_the_busiest_rank_is_bounded() -> None:
    """Two experts that are always selected together, by most tokens, are torn apart."""
    ids_LTK = made_up(4096, 16, 2, seed=1)[None].clone()
    ids_LTK[0, ::3] = torch.tensor([0, 5])
    trace = a_trace(ids_LTK)
    fitted = trace.split(HELD_OUT)[0]
    (free,) = measure(fitted, plan(trace, 4, max_load=math.inf))
    (bounded,) = measure(fitted, plan(trace, 4, max_load=1.25))
    assert free.busiest_load > 1.4
    assert bounded.busiest_load <= 1.25
    assert bounded.rows_per_token > free.rows_per_token


def test_groups_of_a_node_limited_router_stay_on_one_node() -> None:
    trace = clustered(num_groups=8, num_limited_groups=2)
    placement = plan(trace, 4, num_nodes=2)
    nodes_LE = placement.ranks_LE // 2
    assert torch.equal(nodes_LE[:, ::2], nodes_LE[:, 1::2])
    free = plan(clustered(), 4, num_nodes=2)
    assert not torch.equal((free.ranks_LE // 2)[:, ::2], (free.ranks_LE // 2)[:, 1::2])


@pytest.mark.parametrize(
    ("num_tokens", "arguments", "message"),
    [
        (1023, {"num_ranks": 4}, "the trace holds 1023 tokens: a placement takes at least 1024"),
        (1024, {"num_ranks": 3}, "16 experts do not divide over 3 ranks"),
        (1024, {"num_ranks": 0}, "16 experts do not divide over 0 ranks"),
        (1024, {"num_ranks": 4, "num_nodes": 3}, "4 ranks do not divide over 3 nodes"),
        (1024, {"num_ranks": 4, "max_load": 0.9}, "max_load = 0.9"),
        (1024, {"num_ranks": 4, "max_load": 1.1, "method": "occult"}, "max_load = 1.1 works with"),
        (1024, {"num_ranks": 4, "cross_node_weight": 3.0}, "takes more than one node"),
        (1024, {"num_ranks": 4, "num_nodes": 2, "cross_node_weight": -3.0}, "at least 0"),
        (1024, {"num_ranks": 4, "num_nodes": 2, "cross_node_weight": math.nan}, "at least 0"),
        (1024, {"num_ranks": 4, "restarts": -3}, "restarts = -3"),
        (1024, {"num_ranks": 4, "seconds": 0.0}, "seconds = 0.0: give a number above 0"),
        (1024, {"num_ranks": 4, "seconds": math.inf}, "seconds = inf"),
        (1024, {"num_ranks": 4, "max_load": math.nan}, "max_load = nan"),
        (1024, {"num_ranks": 4, "method": "greedy"}, "method = 'greedy': there are"),
    ],
)
def test_what_cannot_be_planned_is_refused(num_tokens: int, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(clustered(num_tokens), **arguments)


@pytest.mark.parametrize("top_k", [2, 4, 8])
def test_real_routing_is_placed_as_well_as_by_a_hypergraph_partitioner(top_k: int) -> None:
    """Of the MoE of train_configs/experts.toml: 51,200 tokens, 32 experts in 4 layers."""
    trace = load_trace(DATA / f"routing_trace_top{top_k}.safetensors")
    assert (trace.num_tokens, trace.top_k, trace.num_experts) == (51200, top_k, 32)
    if top_k == 8:  # of which the partitioner takes its time
        trace = replace(trace, layers=trace.layers[::2], ids_LTK=trace.ids_LTK[::2])
    rows = {
        name: held_out_rows(trace, plan(trace, 8, method=name, seconds=0.5)) for name in METHODS
    }
    assert rows["rows"] <= 1.01 * kahypar_rows(trace, 8, seeds=1)
    assert rows["rows"] <= 0.98 * rows["occult"]
    assert rows["rows"] == min(rows.values())
