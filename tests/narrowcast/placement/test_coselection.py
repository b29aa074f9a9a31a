"""Co-selection counts: plans made from them, and what they determine and what they do not."""

from pathlib import Path

import numpy as np
import pytest
import torch

from narrowcast.placement.correlation import coselection
from narrowcast.placement.coselection import CoselectionCounts, load_coselection, measure_counts
from narrowcast.placement.enumeration import all_divisions
from narrowcast.placement.metrics import measure
from narrowcast.placement.placement import from_parts
from narrowcast.placement.planning import make_plan, placement_of, plan
from narrowcast.placement.trace import RoutingTrace

LLAMA_MOE = Path(__file__).parents[2] / "data" / "llama_moe_8e_top2_layers0-15.npz"


def best_intra_share(counts_EE: torch.Tensor, num_ranks: int) -> float:
    """The largest share of pairs that share a rank, of all divisions."""
    same_NEE = all_divisions(8, num_ranks)
    same_NEE = same_NEE[:, :, None] == same_NEE[:, None, :]
    return ((counts_EE * same_NEE).sum(dim=(1, 2)).max() / counts_EE.sum()).item()


@pytest.mark.parametrize(
    ("num_ranks", "before", "best"), [(2, 0.4203, 0.7507), (4, 0.1266, 0.4999)]
)
def test_as_many_pairs_share_a_rank_as_any_division_allows(
    num_ranks: int, before: float, best: float
) -> None:
    """Of a trained LLaMA-MoE, whose experts are few enough to try all divisions."""
    counts = load_coselection(LLAMA_MOE, top_k=2)
    placement = plan(counts, num_ranks, max_load=float("inf"))
    planned = [layer.intra_share for layer in measure_counts(counts, placement)]
    optima = [best_intra_share(counts_EE, num_ranks) for counts_EE in counts.counts_LEE]
    assert planned == pytest.approx(optima)
    contiguous = measure_counts(counts, plan(counts, num_ranks, method="contiguous"))
    assert sum(layer.intra_share for layer in contiguous) / 16 == pytest.approx(before, abs=5e-4)
    assert sum(optima) / 16 == pytest.approx(best, abs=5e-4)


def test_counts_of_a_top_2_router_give_the_metrics_of_its_trace() -> None:
    generator = torch.Generator().manual_seed(0)
    ids_LTK = torch.rand(2, 3000, 12, generator=generator).square().topk(2).indices
    ids_LTK[:, ::3] = ids_LTK[:, :1000] // 6 * 6 + torch.tensor([0, 5])
    names, nothing_T = ("layers.0", "layers.1"), torch.zeros(3000)
    trace = RoutingTrace("m f", names, 12, 2, ids_LTK, *[nothing_T] * 3)
    counts_LEE = torch.stack([coselection(ids_TK, 12) for ids_TK in ids_LTK])
    counts = CoselectionCounts("m f", names, counts_LEE, top_k=2)
    part_LE = torch.stack([torch.randperm(12, generator=generator) // 3 for _ in names])
    slots = [from_parts(part_E) for part_E in part_LE]
    placement = placement_of(counts, slots, num_ranks=4, num_nodes=2, method="random")
    for by_counts, by_trace in zip(
        measure_counts(counts, placement), measure(trace, placement), strict=True
    ):
        for name, value in vars(by_trace).items():
            same = pytest.approx(value) if isinstance(value, float) else value
            assert getattr(by_counts, name) == same, name


def test_beyond_top_2_counts_determine_pairs_and_load_only(tmp_path: Path) -> None:
    ids_TK = torch.rand(3000, 12, generator=torch.Generator().manual_seed(0)).topk(4).indices
    np.savez(tmp_path / "c.npz", coselection=coselection(ids_TK, 12)[None], model="m f")
    counts = load_coselection(tmp_path / "c.npz")
    assert (counts.model, counts.layers, counts.top_k) == ("m f", ("layers.0",), None)
    placement = make_plan(counts, 4, method="pairwise").placement
    (by_counts,) = measure_counts(counts, placement)
    trace = RoutingTrace("m f", counts.layers, 12, 2, ids_TK[None], *[torch.zeros(3000)] * 3)
    (by_trace,) = measure(trace, placement)
    assert by_counts.intra_share == pytest.approx(by_trace.intra_share)
    assert by_counts.busiest_load == pytest.approx(by_trace.busiest_load)
    assert np.isnan(
        [by_counts.rows_per_token, by_counts.rows_removed, by_counts.rows_to_ranks]
    ).all()
    for top_k, named in ((None, "top_k is not known here"), (4, "top_k is 4 here")):
        counts = load_coselection(tmp_path / "c.npz", top_k)
        with pytest.raises(ValueError, match=f"{named}: give --top-k 2 if it is one, use --method"):
            make_plan(counts, 4, method="rows")


def symmetric(*, dtype: type = np.int64) -> np.ndarray:
    return (np.ones((2, 4, 4)) - np.eye(4)).astype(dtype)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"counts": symmetric()}, "has no array `coselection`: it has counts"),
        ({"coselection": symmetric()[0]}, r"has shape \(4, 4\), not \(layers, experts"),
        ({"coselection": symmetric()[:, :3]}, r"has shape \(2, 3, 4\)"),
        ({"coselection": symmetric(dtype=np.float32)}, "has dtype float32"),
        ({"coselection": -symmetric()}, "has the negative count -1"),
        ({"coselection": np.triu(symmetric())}, "is not symmetric"),
        ({"coselection": symmetric() + np.eye(4, dtype=np.int64)}, "diagonal that is not 0"),
        ({"coselection": 0 * symmetric()}, "has a layer without counts"),
        ({"coselection": symmetric(), "layers": ["a", "a"]}, "not 2 different names"),
        ({"coselection": np.array([{}], dtype=object)}, "not an .npz file of co-selection counts"),
    ],
)
def test_invalid_counts_are_refused_by_name(tmp_path: Path, arrays: dict, message: str) -> None:
    np.savez(tmp_path / "c.npz", **arrays)
    with pytest.raises(ValueError, match=rf"c\.npz.*{message}"):
        load_coselection(tmp_path / "c.npz")
