"""Any routing trace and any placement is read from its file as it was saved."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.placement.placement import Placement, load_placement
from narrowcast.placement.trace import RoutingTrace, load_trace
from tests.narrowcast.placement.test_placement import assert_same as assert_same_placement
from tests.narrowcast.placement.test_trace import assert_same as assert_same_trace
from tests.strategies import settings

names = st.text("az.0_ é漢😀'\"\\{}", min_size=1, max_size=12)
layer_names = st.lists(names, min_size=1, max_size=3, unique=True).map(tuple)
scores = st.floats(allow_nan=False, allow_infinity=False, width=32)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples."""
    return tmp_path_factory.mktemp("files") / "file"


@st.composite
def traces(draw: st.DrawFn) -> RoutingTrace:
    num_experts = draw(st.sampled_from([1, 2, 8, 256, 257, 1000]))
    top_k = draw(st.integers(1, min(num_experts, 4)))
    layers, num_tokens = draw(layer_names), draw(st.integers(1, 6))
    shape = (len(layers), num_tokens, top_k)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    order = torch.rand(len(layers), num_tokens, num_experts, generator=generator).argsort()
    counts = st.lists(st.integers(0, 2**31 - 1), min_size=num_tokens, max_size=num_tokens)
    numel = len(layers) * num_tokens * top_k
    drawn = st.lists(scores, min_size=numel, max_size=numel)
    divisors = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
    num_groups = draw(st.none() | st.sampled_from(divisors))
    limited = st.none() if num_groups is None else st.none() | st.integers(1, num_groups)
    return RoutingTrace(
        model=draw(names),
        layers=layers,
        num_experts=num_experts,
        num_ranks=draw(st.integers(1, num_experts)),
        ids_LTK=order[..., :top_k],
        step_T=torch.tensor(sorted(max(n, 1) for n in draw(counts))),
        rank_T=torch.tensor(draw(counts)),
        position_T=torch.tensor(draw(counts)),
        scores_LTK=torch.tensor(draw(drawn)).view(shape) if draw(st.booleans()) else None,
        num_groups=num_groups,
        num_limited_groups=draw(limited),
    )


@settings(max_examples=40)
@given(trace=traces())
def test_any_trace_is_read_as_it_was_saved(file: Path, trace: RoutingTrace) -> None:
    trace.save(file)
    assert_same_trace(trace, load_trace(file))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_nodes, per_node, per_rank = (draw(st.integers(1, 4)) for _ in range(3))
    num_ranks, layers = num_nodes * per_node, draw(layer_names)
    experts = range(num_ranks * per_rank)
    orders = [draw(st.permutations(experts)) for _ in layers]
    return Placement(draw(names), layers, num_ranks, num_nodes, draw(names), torch.tensor(orders))


@settings(max_examples=25)
@given(placement=placements())
def test_any_placement_is_read_as_it_was_saved(file: Path, placement: Placement) -> None:
    placement.save(file)
    assert_same_placement(placement, load_placement(file))
