"""The quality of a placement of experts, measured on a trace.

Names are those of the papers. ``C_T`` (Occult, section 2.2) is the mean number of distinct ranks of
the experts of a token, which is the number of rows that it becomes if each rank is sent it once.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowcast.placement.balance import part_loads
from narrowcast.placement.placement import Placement
from narrowcast.placement.trace import RoutingTrace
from narrowcast.util import aligned, number, percent

UNEVEN = 1.25
"""A placement whose busiest rank has more than this times the load that it has in contiguous causes
a warning."""

WIDTH = 100
"""Width of printed text, in characters."""


@dataclass(frozen=True)
class PlacementMetrics:
    """The metrics of a placement for the routing of one layer.

    Attributes:
        layer: name of the layer.
        rows_per_token: C_T, the distinct ranks of the experts of a token.
        rows_bounds: the lower and the upper bound of C_T (Occult, equation 5).
        rows_removed: 1 - C_T / K, the share of rows saved compared with one row for each expert
            (Expert Coupling).
        intra_share: share of co-selected pairs of experts that are on one rank (Occult, table 1);
            at top-2 the share of tokens whose experts share a rank (Expert Coupling, section II.B).
            The rest is the inter share. It is nan at top-1.
        nodes_per_token: the distinct nodes of the experts of a token.
        local_share: share of (token, expert) assignments whose expert is on the rank of the token.
        rows_to_ranks: rows for each token that leave its rank.
        rows_to_nodes: rows for each token that leave its node.
        busiest_load: assignments of the busiest rank over the mean.
        busiest_rows: rows of the busiest rank over the mean, those of its own tokens included.
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
    """Return C_T, the mean number of distinct ranks of a token's experts (Occult, section 2.2).

    Args:
        ids_TK: (T, K) experts of each token.
        rank_E: (E,) rank of each expert.
    """
    return _distinct(rank_E[ids_TK.long()]).double().mean().item()


def rows_bounds(top_k: int, num_experts: int, num_ranks: int) -> tuple[int, int]:
    """Return the lower and the upper bound of C_T (Occult, equation 5)."""
    return -(-top_k * num_ranks // num_experts), min(top_k, num_ranks)


def measure_layer(
    layer: str,
    ids_TK: Tensor,
    rank_E: Tensor,
    num_ranks: int,
    num_nodes: int = 1,
    home_T: Tensor | None = None,
) -> PlacementMetrics:
    """Return the metrics of the placement of one layer.

    Args:
        layer: name of the layer.
        ids_TK: (T, K) experts of each token.
        rank_E: (E,) rank of each expert.
        num_ranks: R.
        num_nodes: number of nodes of the ranks. Consecutive ranks are on one node.
        home_T: (T,) the rank of each token. By default the metrics are expected values for tokens
            that are equally likely on any rank, with a local share of 1 / R.

    Raises:
        ValueError: there are no tokens, or the ranks do not divide over the nodes.
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
    return PlacementMetrics(
        layer=layer,
        rows_per_token=rows,
        rows_bounds=rows_bounds(top_k, len(rank_E), num_ranks),
        rows_removed=1 - rows / top_k,
        intra_share=_intra_share(counts_TR, top_k),
        nodes_per_token=_distinct(node_R[rank_TK]).double().mean().item(),
        local_share=local_share,
        rows_to_ranks=to_ranks,
        rows_to_nodes=to_nodes,
        busiest_load=(load_R.max() / load_R.mean()).item(),
        busiest_rows=(rows_R.max() / rows_R.mean()).item(),
    )


def measure(trace: RoutingTrace, placement: Placement) -> list[PlacementMetrics]:
    """Return the metrics of a placement for each layer of a trace.

    The rank of a token is ``rank_T % R``, or unknown if the trace was recorded on fewer than R
    ranks.

    Raises:
        ValueError: the placement is for another model, or ``measure_layer`` raises it.
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
    if len(home_T.unique()) < ranks:
        home_T = None
    return [measure_layer(name, ids, rank_E, ranks, nodes, home_T) for name, ids, rank_E in layers]


def with_loads_of(
    trace: RoutingTrace, placement: Placement, measured: Sequence[PlacementMetrics]
) -> list[PlacementMetrics]:
    """Return metrics that were measured on some tokens of a trace, with the load of the busiest
    rank by all of its tokens."""
    replaced = []
    for m, ids_TK, rank_E in zip(measured, trace.ids_LTK, placement.ranks_LE, strict=True):
        load_E = torch.bincount(ids_TK.flatten(), minlength=trace.num_experts)
        load_R = part_loads(load_E, rank_E, placement.num_ranks)
        replaced.append(replace(m, busiest_load=(load_R.max() / load_R.mean()).item()))
    return replaced


_two_digits = partial(number, digits=2)


@dataclass(frozen=True)
class Column:
    """A column of numbers in a table of layers.

    Attributes:
        title: head of the column in print.
        key: its key in JSON, which names the unit.
        of: gets the number from a layer's metrics. nan is printed as "-" and is null in JSON.
        shown: formats the number in print.
        worst: ``max`` or ``min``, the worse of several.
    """

    title: str
    key: str
    of: Callable[[Any], float]
    shown: Callable[[float], str] = _two_digits
    worst: Callable[[Sequence[float]], float] = max


def _share(title: str, key: str, of: Callable[[Any], float]) -> Column:
    """Return a column of fractions, which are better the larger they are."""
    return Column(title, key, of, percent, min)


COLUMNS = (
    Column("C_T", "rows_per_token", lambda m: m.rows_per_token),
    _share("removed", "rows_removed_fraction", lambda m: m.rows_removed),
    _share("intra", "intra_rank_pairs_fraction", lambda m: m.intra_share),
    _share("local", "local_assignments_fraction", lambda m: m.local_share),
    Column("nodes", "nodes_per_token", lambda m: m.nodes_per_token),
    Column("to ranks", "rows_to_other_ranks_per_token", lambda m: m.rows_to_ranks),
    Column("to nodes", "rows_to_other_nodes_per_token", lambda m: m.rows_to_nodes),
    Column("load", "busiest_rank_load_over_mean", lambda m: m.busiest_load),
    Column("rows", "busiest_rank_rows_over_mean", lambda m: m.busiest_rows),
)


def as_object(layer: Any, columns: Sequence[Column]) -> dict[str, float | None]:
    """Return the numbers of a layer's metrics as an object for JSON."""
    numbers = {column.key: column.of(layer) for column in columns}
    return {key: None if math.isnan(value) else value for key, value in numbers.items()}


def placement_objects(
    placements: Mapping[str, Sequence[PlacementMetrics]],
) -> list[dict[str, Any]]:
    """Return the rows of ``placement_table`` that are of a layer, as objects for JSON."""
    return [
        {"layer": m.layer, "placement": name, **as_object(m, COLUMNS)}
        for of_layer in zip(*placements.values(), strict=True)
        for name, m in zip(placements, of_layer, strict=True)
    ]


def placement_table(placements: Mapping[str, Sequence[PlacementMetrics]]) -> str:
    """Return a table of the same layers under several placements, with their mean and worst."""
    rows = [["layer", "placement", *(column.title for column in COLUMNS)]]
    for of_layer in zip(*placements.values(), strict=True):
        for name, m in zip(placements, of_layer, strict=True):
            rows.append([m.layer, name, *(c.shown(c.of(m)) for c in COLUMNS)])
    for label in ("mean", "worst"):
        for name, layers in placements.items():
            rows.append([label, name])
            for column in COLUMNS:
                values = [column.of(m) for m in layers]
                summary = (
                    math.fsum(values) / len(values) if label == "mean" else column.worst(values)
                )
                rows[-1].append(column.shown(summary))
    least, most = next(iter(placements.values()))[0].rows_bounds
    legend = (
        f"C_T: distinct ranks of a token's experts, between {least} and {most}. removed: rows "
        "saved over one row an expert. intra: pairs of a token's experts that share a rank. local: "
        "assignments on the token's own rank. nodes: distinct nodes of a token's experts. to "
        "ranks, to nodes: rows a token that leave its rank, its node. load, rows: assignments "
        "and rows of the busiest rank over the mean. The worst is of each column."
    )
    return f"{textwrap.fill(legend, WIDTH, break_on_hyphens=False)}\n\n{aligned(rows, words=2)}"


def _intra_share(counts_TR: Tensor, top_k: int) -> float:
    """Return the share of the pairs of a token's experts that share a rank, given (T, R) the
    experts of each token on each rank."""
    if top_k == 1:
        return math.nan
    # Of n experts on a rank, n * (n - 1) ordered pairs share it.
    together = counts_TR.int().square().sum(dim=1).double().mean().item() - top_k
    return together / (top_k * (top_k - 1))


def _mean(hit_TR: Tensor) -> float:
    """Return the mean number of hits in a row."""
    return hit_TR.sum(dim=1).double().mean().item()


def _distinct(values_TK: Tensor) -> Tensor:
    """Return (T,) the number of distinct values in each row."""
    return 1 + (values_TK.sort(dim=1).values.diff(dim=1) != 0).sum(dim=1)
