"""How good a placement of experts is, from a trace.

Names are those of the papers. `C_T` (Occult, section 2.2): the mean number of distinct ranks that a
token's experts live on, which is how many rows a token becomes where each rank is sent it once.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowcast.placement.balance import part_loads
from narrowcast.placement.placement import Placement
from narrowcast.placement.trace import RoutingTrace
from narrowcast.util import aligned, number, percent

# A placement that makes the busiest rank of a layer so much busier than contiguous is warned of.
UNEVEN = 1.25

# Of text, in characters.
WIDTH = 100


@dataclass(frozen=True)
class PlacementMetrics:
    """What a placement makes of one layer's routing.

    Attributes:
        layer: its name.
        rows_per_token: C_T, the distinct ranks of a token's experts.
        rows_bounds: the least and the most that C_T can be (Occult, equation 5).
        rows_removed: 1 - C_T / K, the share of rows saved over one row an expert (Expert Coupling).
        intra_share: share of co-selected pairs of experts that one rank holds (Occult, table 1);
            at top-2 the share of tokens whose experts share a rank (Expert Coupling, II.B). The
            rest is the inter share. nan at top-1.
        nodes_per_token: the distinct nodes of a token's experts.
        local_share: share of token-expert assignments served on the token's own rank.
        rows_to_ranks: rows a token that leave its own rank.
        rows_to_nodes: rows a token that leave its own node.
        busiest_load: assignments of the busiest rank over their mean.
        busiest_rows: rows of the busiest rank, its own tokens' too, over their mean.
    """

    layer: str
    rows_per_token: float
    rows_bounds: tuple[int, int]
    rows_removed: float
    intra_share: float
    nodes_per_token: float
    local_share: float
    rows_to_ranks: float
    rows_to_nodes: float
    busiest_load: float
    busiest_rows: float


def rows_per_token(ids_TK: Tensor, rank_E: Tensor) -> float:
    """C_T: the mean number of distinct ranks of a token's experts (Occult, section 2.2).

    Args:
        ids_TK: (T, K) experts of each token.
        rank_E: (E,) rank of each expert.
    """
    return _distinct(rank_E[ids_TK.long()]).double().mean().item()


def rows_bounds(top_k: int, num_experts: int, num_ranks: int) -> tuple[int, int]:
    """The least and the most that C_T can be (Occult, equation 5)."""
    return -(-top_k * num_ranks // num_experts), min(top_k, num_ranks)


def measure_layer(
    layer: str,
    ids_TK: Tensor,
    rank_E: Tensor,
    num_ranks: int,
    num_nodes: int = 1,
    home_T: Tensor | None = None,
) -> PlacementMetrics:
    """Judge where one layer's experts live.

    Args:
        layer: name for the result.
        ids_TK: (T, K) experts of each token.
        rank_E: (E,) rank of each expert.
        num_ranks: R.
        num_nodes: that the ranks are spread over, consecutive ones on the same node.
        home_T: (T,) each token's own rank. By default what is to be expected of tokens that are
            equally likely on any rank: a local share of 1 / R.

    Raises:
        ValueError: there are no tokens, or ranks do not divide over nodes.
    """
    if not len(ids_TK):
        raise ValueError("there are no tokens to judge a placement by: record more")
    if num_ranks % num_nodes:
        raise ValueError(f"{num_ranks} ranks do not divide over {num_nodes} nodes")
    top_k = ids_TK.shape[1]
    rank_TK = rank_E[ids_TK.long()]
    node_R = torch.arange(num_ranks) // (num_ranks // num_nodes)
    counts_TR = torch.zeros(len(ids_TK), num_ranks, dtype=torch.int16)
    counts_TR.scatter_add_(1, rank_TK, torch.ones_like(rank_TK, dtype=torch.int16))
    sent_TR = counts_TR > 0
    rows_R = sent_TR.sum(dim=0).double()
    load_R = counts_TR.sum(dim=0).double()
    rows = _mean(sent_TR)
    if home_T is None:
        local_share = 1 / num_ranks
        to_ranks, to_nodes = rows * (1 - 1 / num_ranks), rows * (1 - 1 / num_nodes)
    else:
        home_T = home_T.long()
        local_share = counts_TR.gather(1, home_T[:, None]).double().mean().item() / top_k
        to_ranks = _mean(sent_TR & (torch.arange(num_ranks) != home_T[:, None]))
        to_nodes = _mean(sent_TR & (node_R != node_R[home_T][:, None]))
    # Of n experts on a rank, n * (n - 1) ordered pairs share it.
    together = counts_TR.int().square().sum(dim=1).double().mean().item() - top_k
    return PlacementMetrics(
        layer=layer,
        rows_per_token=rows,
        rows_bounds=rows_bounds(top_k, len(rank_E), num_ranks),
        rows_removed=1 - rows / top_k,
        intra_share=together / (top_k * (top_k - 1)) if top_k > 1 else math.nan,
        nodes_per_token=_distinct(node_R[rank_TK]).double().mean().item(),
        local_share=local_share,
        rows_to_ranks=to_ranks,
        rows_to_nodes=to_nodes,
        busiest_load=(load_R.max() / load_R.mean()).item(),
        busiest_rows=(rows_R.max() / rows_R.mean()).item(),
    )


def measure(trace: RoutingTrace, placement: Placement) -> list[PlacementMetrics]:
    """Judge a placement by a trace, layer by layer. A token's own rank is `rank_T % R`, or any of
    them alike where the trace was recorded on fewer than R ranks.

    Raises:
        ValueError: the placement is for another model, or see `measure_layer`.
    """
    placement.check(
        model=trace.model,
        layers=trace.layers,
        num_experts=trace.num_experts,
        num_ranks=placement.num_ranks,
    )
    placement = placement.in_order(trace.layers)
    ranks, nodes = placement.num_ranks, placement.num_nodes
    layers = zip(trace.layers, trace.ids_LTK, placement.ranks_LE, strict=True)
    home_T = trace.rank_T % ranks
    if len(home_T.unique()) < ranks:  # recorded on fewer ranks: what is to be expected
        home_T = None
    return [measure_layer(name, ids, rank_E, ranks, nodes, home_T) for name, ids, rank_E in layers]


def with_loads_of(
    trace: RoutingTrace, placement: Placement, measured: Sequence[PlacementMetrics]
) -> list[PlacementMetrics]:
    """Metrics of some of a trace's tokens, with the load of the busiest rank of all of them."""
    replaced = []
    for m, ids_TK, rank_E in zip(measured, trace.ids_LTK, placement.ranks_LE, strict=True):
        load_E = torch.bincount(ids_TK.flatten(), minlength=trace.num_experts)
        load_R = part_loads(load_E, rank_E, placement.num_ranks)
        replaced.append(replace(m, busiest_load=(load_R.max() / load_R.mean()).item()))
    return replaced


def placement_table(placements: Mapping[str, Sequence[PlacementMetrics]]) -> str:
    """Metrics of the same layers under several placements, with their mean and their worst."""
    rows = [["layer", "placement", "C_T", "removed", "intra", "local", "nodes"]]
    rows[0] += ["to ranks", "to nodes", "load", "rows"]
    for layer in zip(*placements.values(), strict=True):
        rows += [
            [m.layer, name, *_cells(_figures(m))] for name, m in zip(placements, layer, strict=True)
        ]
    figures = {name: [_figures(m) for m in of] for name, of in placements.items()}
    for name, of_layers in figures.items():
        mean = [math.fsum(column) / len(column) for column in zip(*of_layers, strict=True)]
        rows.append(["mean", name, *_cells(mean)])
    for name, of_layers in figures.items():
        columns = enumerate(zip(*of_layers, strict=True))
        rows.append(
            ["worst", name, *_cells([(min if i in _SHARES else max)(c) for i, c in columns])]
        )
    least, most = next(iter(placements.values()))[0].rows_bounds
    legend = (
        f"C_T: distinct ranks of a token's experts, between {least} and {most}. removed: rows "
        "saved over one row an expert. intra: pairs of a token's experts that share a rank. local: "
        "assignments on the token's own rank. nodes: distinct nodes of a token's experts. to "
        "ranks, to nodes: rows a token that leave its rank, its node. load, rows: assignments "
        "and rows of the busiest rank over the mean. The worst is of each column."
    )
    return f"{textwrap.fill(legend, WIDTH, break_on_hyphens=False)}\n\n{aligned(rows, words=2)}"


# Places among `_figures` of the shares, of which more is better.
_SHARES = (1, 2, 3)


def _figures(m: PlacementMetrics) -> list[float]:
    shares = [m.rows_removed, m.intra_share, m.local_share]
    rows = [m.nodes_per_token, m.rows_to_ranks, m.rows_to_nodes]
    return [m.rows_per_token, *shares, *rows, m.busiest_load, m.busiest_rows]


def _cells(figures: Sequence[float]) -> list[str]:
    return [percent(x) if i in _SHARES else number(x, 2) for i, x in enumerate(figures)]


def _mean(hit_TR: Tensor) -> float:
    """Hits a token."""
    return hit_TR.sum(dim=1).double().mean().item()


def _distinct(values_TK: Tensor) -> Tensor:
    """(T,) how many different values a row has."""
    return 1 + (values_TK.sort(dim=1).values.diff(dim=1) != 0).sum(dim=1)
