"""Plans made of traces: of any routing, and how good they are on real ones."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from narrowcast.placement import planning
from narrowcast.placement.effort import SECONDS, Effort
from narrowcast.placement.metrics import measure
from narrowcast.placement.placement import Placement
from narrowcast.placement.planning import HELD_OUT, make_plan, plan
from narrowcast.placement.trace import RoutingTrace, load_trace
from torchtitan_ext.benchmarks.placement import METHODS, held_out_rows, kahypar_rows, made_up

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
    for planned_layer, contiguous_layer in zip(planned, contiguous, strict=True):
        assert planned_layer.rows_per_token <= contiguous_layer.rows_per_token
        moved += planned_layer != contiguous_layer
    assert 0 < moved < 12


@pytest.mark.parametrize("weight", [None, 10.0])
def test_a_plan_of_fewer_nodes_is_used_where_no_rank_is_saved(weight: float | None) -> None:
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
        (1023, {"num_ranks": 4}, "the trace holds 1023 tokens: a placement needs at least 1024"),
        (1024, {"num_ranks": 3}, "16 experts do not divide over 3 ranks"),
        (1024, {"num_ranks": 0}, "16 experts do not divide over 0 ranks"),
        (1024, {"num_ranks": 4, "num_nodes": 3}, "4 ranks do not divide over 3 nodes"),
        (1024, {"num_ranks": 4, "max_load": 0.9}, "max_load = 0.9"),
        (1024, {"num_ranks": 4, "max_load": 1.1, "method": "occult"}, "max_load = 1.1 works with"),
        (1024, {"num_ranks": 4, "cross_node_weight": 3.0}, "needs more than one node"),
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


def loads(trace: RoutingTrace, placement: Placement) -> list[float]:
    """The busiest rank's load over the mean, of all tokens, layer by layer."""
    return [layer.busiest_load for layer in measure(trace, placement)]


def drifting() -> RoutingTrace:
    """Later tokens, and every second one before, load the experts in other ways."""
    trace = clustered(4096)
    ids_LTK = trace.ids_LTK.clone()
    ids_LTK[:, 1:3276:2] = (ids_LTK[:, 1:3276:2] + 5) % 16
    ids_LTK[:, 3276:] = (ids_LTK[:, 3276:] // 2) + 8 * (torch.arange(4) % 2)
    return replace(trace, ids_LTK=ids_LTK)


def test_a_bound_holds_for_all_tokens_and_not_for_those_that_were_fitted_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = drifting()
    # Every second of the earlier tokens is fitted on.
    monkeypatch.setattr(planning.Effort, "of", lambda *_: Effort(1638, 4))
    for max_load in (1.1, 1.04):
        assert max(loads(trace, plan(trace, 4, max_load=max_load))) <= max_load
    fitted = trace.tokens(slice(0, 3276, 2))
    assert max(loads(fitted, plan(trace, 4, max_load=1.04))) > 1.04


def test_without_a_bound_no_rank_gets_busier_than_a_tenth_above_the_mean_or_as_contiguous() -> None:
    trace = drifting()
    made = make_plan(trace, 4, restarts=4)
    contiguous = loads(trace, plan(trace, 4, method="contiguous"))
    for planned_layer, contiguous_layer in zip(
        loads(trace, made.placement), contiguous, strict=True
    ):
        assert planned_layer <= max(1.1, contiguous_layer) + 1e-9
    # Which is not what rows alone lead to; and what that would save is known.
    assert loads(trace, made.free) > loads(trace, made.placement)
    assert held_out_rows(trace, made.free) < held_out_rows(trace, made.placement)
    lifted = plan(trace, 4, restarts=4, max_load=math.inf)
    assert held_out_rows(trace, lifted) == held_out_rows(trace, made.free)


def test_within_a_bound_no_layer_is_worse_than_contiguous_on_tokens_that_it_was_not_fitted_on() -> (
    None
):
    generator = torch.Generator().manual_seed(0)
    ids_LTK = torch.rand(12, 1280, 16, generator=generator).topk(4).indices
    trace = a_trace(ids_LTK)
    later = trace.split(HELD_OUT)[1]
    contiguous = plan(trace, 4, method="contiguous")
    planned = plan(trace, 4, max_load=1.06, restarts=2)
    moved = 0
    for before, after, load_before, load_after in zip(
        measure(later, contiguous),
        measure(later, planned),
        loads(trace, contiguous),
        loads(trace, planned),
        strict=True,
    ):
        assert load_after <= 1.06
        if load_before <= 1.06:  # else the bound comes first
            assert after.rows_per_token <= before.rows_per_token
        moved += after != before
    assert 0 < moved < 12


def test_plans_do_not_depend_on_processes() -> None:
    trace = clustered()
    alone = make_plan(trace, 4, restarts=4)
    shared = make_plan(trace, 4, restarts=4, processes=2)
    assert torch.equal(alone.placement.experts_LE, shared.placement.experts_LE)
    assert torch.equal(alone.free.experts_LE, shared.free.experts_LE)


def test_seconds_buy_tokens_first_and_then_restarts() -> None:
    efforts = [Effort.of(seconds, 256, 10**6) for seconds in (0.001, 2.0, 4.0, 40.0, 400.0)]
    tokens, restarts = zip(*((e.tokens, e.restarts) for e in efforts), strict=True)
    assert tokens[0] == 1024
    assert tokens[0] < tokens[1] < tokens[2] < tokens[3] == tokens[4] == 10**6
    assert restarts[:3] == (4, 4, 4)
    assert 4 < restarts[3] <= restarts[4] == 64
    # What could not be had of a trace of 256 experts before.
    assert Effort.of(SECONDS, 256).tokens > 7 * 6554
    assert Effort.of(SECONDS, 256, num_nodes=2).tokens < Effort.of(SECONDS, 256).tokens
    used = make_plan(clustered(), 4, seconds=0.001).effort
    assert (used.tokens, used.restarts) == (1024, 4)
