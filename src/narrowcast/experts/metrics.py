"""How good a placement of experts is, and what a router's traffic looks like, from a trace.

Names are those of the papers. `C_T` (Occult, section 2.2): the mean number of distinct ranks that a
token's experts live on, which is how many rows a token becomes where each rank is sent it once.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.experts.correlation import (
    MIN_TOKENS,
    coselection,
    first_order,
    held_out_correlation,
    most_frequent_next,
    second_order,
)
from narrowcast.experts.placement import Placement
from narrowcast.experts.routing import RoutingTrace
from narrowcast.tables import aligned

# A placement that makes the busiest rank of a layer so much busier than contiguous is warned of.
UNEVEN = 1.25

# Of all pairs of experts, the most frequent ones that Expert Coupling counts (II.B).
TOP_PAIRS = 0.008
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


@dataclass(frozen=True)
class HeldOutCorrelations:
    """How far tables of the earlier half of the tokens hold for the later one (Expert Coupling,
    VI.A); nan with fewer than `MIN_TOKENS` in either.

    Attributes:
        coselection: of the layer's experts.
        first_order: from the layer's experts to the next layer's. nan in the last layer.
        second_order: from the layer's and the previous layer's. nan in the first and the last.
    """

    coselection: float
    first_order: float
    second_order: float


@dataclass(frozen=True)
class RouterMetrics:
    """What one layer's routing looks like under no placement but the contiguous one.

    Attributes:
        layer: its name.
        load_E: (E,) int64, tokens of each expert.
        rows_per_token: C_T at each expert-parallel degree.
        top_pairs: how many pairs of experts the two shares below are of: the most frequent
            `TOP_PAIRS` of all, and at least one.
        top_pairs_share: share of co-selections that these pairs carry. nan at top-1.
        independent_share: the same if experts were selected independently of each other with the
            same loads, so that a pair's count is proportional to the product of its loads.
        next_share: median over experts of the share of its tokens that select its most frequent
            expert of the next layer. nan in the last layer, and with fewer than `MIN_TOKENS`.
        correlations: of its tables with held-out ones.
    """

    layer: str
    load_E: Tensor
    rows_per_token: dict[int, float]
    top_pairs: int
    top_pairs_share: float
    independent_share: float
    next_share: float
    correlations: HeldOutCorrelations

    @property
    def skew(self) -> float:
        """The load of the busiest expert over the mean."""
        return (self.load_E.max() / self.load_E.double().mean()).item()


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


def measure_router(trace: RoutingTrace) -> list[RouterMetrics]:
    """What a trace says of each layer's router. Expert-parallel degrees are the powers of two that
    divide the number of experts, or all divisors if none does.

    Raises:
        ValueError: there are no tokens.
    """
    if not trace.num_tokens:
        raise ValueError("the trace has no tokens: record some")
    experts, enough = trace.num_experts, trace.num_tokens >= MIN_TOKENS
    divisors = [n for n in range(2, experts + 1) if experts % n == 0]
    degrees = [n for n in divisors if n & (n - 1) == 0] or divisors
    measured = []
    for i, (layer, ids_TK) in enumerate(zip(trace.layers, trace.ids_LTK, strict=True)):
        load_E = torch.bincount(ids_TK.flatten().long(), minlength=experts)
        counts_EE = coselection(ids_TK, experts)
        next_share = math.nan
        if enough and i + 1 < len(trace.layers):
            shares_E = most_frequent_next(first_order(ids_TK, trace.ids_LTK[i + 1], experts))
            next_share = shares_E.nanquantile(0.5).item()
        pairs, share = _top_pairs(counts_EE)
        load = load_E.double()
        measured.append(
            RouterMetrics(
                layer=layer,
                load_E=load_E,
                rows_per_token={
                    degree: rows_per_token(ids_TK, torch.arange(experts) // (experts // degree))
                    for degree in degrees
                },
                top_pairs=pairs,
                top_pairs_share=share,
                independent_share=_top_pairs(load.outer(load))[1] if share == share else share,
                next_share=next_share,
                correlations=_correlations(trace, i),
            )
        )
    return measured


def _correlations(trace: RoutingTrace, layer: int) -> HeldOutCorrelations:
    """Of a layer's tables, fitted on the earlier half of the tokens and held out the later one."""
    halves = trace.split(0.5)
    if min(half.num_tokens for half in halves) < MIN_TOKENS:
        return HeldOutCorrelations(math.nan, math.nan, math.nan)
    experts, is_last = trace.num_experts, layer + 1 == len(trace.layers)
    within = [coselection(half.ids_LTK[layer], experts) for half in halves]
    first = second = math.nan
    if not is_last:
        pairs = [half.ids_LTK[layer : layer + 2] for half in halves]
        first = held_out_correlation(*(first_order(*ids, experts) for ids in pairs))
    if not is_last and layer > 0:
        triples = [half.ids_LTK[layer - 1 : layer + 2] for half in halves]
        second = held_out_correlation(*(second_order(*ids, experts) for ids in triples))
    return HeldOutCorrelations(held_out_correlation(*within), first, second)


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


def router_table(layers: Sequence[RouterMetrics]) -> str:
    """What a trace says of each layer's router, and C_T of contiguous placements."""
    traffic = [["layer", "least", "skew", "top pairs", "independent", "next layer"]]
    traffic[0] += ["pairs", "first", "second"]
    degrees = list(layers[0].rows_per_token)
    ranks = [["layer", *(f"EP {degree}" for degree in degrees)]]
    for layer in layers:
        load_E = layer.load_E.double()
        traffic.append(
            [
                layer.layer,
                f"{load_E.min() / load_E.mean():.2f}",
                f"{layer.skew:.2f}",
                _percent(layer.top_pairs_share),
                _percent(layer.independent_share),
                _percent(layer.next_share),
                _number(layer.correlations.coselection, 3),
                _number(layer.correlations.first_order, 3),
                _number(layer.correlations.second_order, 3),
            ]
        )
        ranks.append([layer.layer, *(f"{rows:.2f}" for rows in layer.rows_per_token.values())])
    pairs = math.comb(len(layers[0].load_E), 2)
    legend = (
        "least, skew: tokens of the least and of the most loaded expert over the mean. top pairs: "
        f"co-selections in the {layers[0].top_pairs} most frequent of {pairs} pairs of experts. "
        "independent: the same if selection were independent, with the same loads. next layer: "
        "tokens of an expert that go to its most frequent expert there, median. pairs, first, "
        "second: correlation of tables of the earlier and of the later half of the tokens: of "
        "co-selection, and of the next layer's experts given one and two layers' before. EP: "
        "C_T, distinct ranks of a token's experts, at this expert-parallel degree, contiguous."
    )
    tables = f"{aligned(traffic, words=1)}\n\n{aligned(ranks, words=1)}"
    return f"{textwrap.fill(legend, WIDTH, break_on_hyphens=False)}\n\n{tables}"


# Places among `_figures` of the shares, of which more is better.
_SHARES = (1, 2, 3)


def _figures(m: PlacementMetrics) -> list[float]:
    shares = [m.rows_removed, m.intra_share, m.local_share]
    rows = [m.nodes_per_token, m.rows_to_ranks, m.rows_to_nodes]
    return [m.rows_per_token, *shares, *rows, m.busiest_load, m.busiest_rows]


def _cells(figures: Sequence[float]) -> list[str]:
    return [_percent(x) if i in _SHARES else _number(x, 2) for i, x in enumerate(figures)]


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _mean(hit_TR: Tensor) -> float:
    """Hits a token."""
    return hit_TR.sum(dim=1).double().mean().item()


def _distinct(values_TK: Tensor) -> Tensor:
    """(T,) how many different values a row has."""
    return 1 + (values_TK.sort(dim=1).values.diff(dim=1) != 0).sum(dim=1)


def _top_pairs(counts_EE: Tensor) -> tuple[int, float]:
    """How many the most frequent `TOP_PAIRS` of all pairs are, and the share of counts in them."""
    first_P, second_P = torch.triu_indices(*counts_EE.shape, offset=1)
    counts_P = counts_EE[first_P, second_P].double().sort(descending=True).values
    top = max(1, round(TOP_PAIRS * len(counts_P)))
    return top, (counts_P[:top].sum() / counts_P.sum()).item()
