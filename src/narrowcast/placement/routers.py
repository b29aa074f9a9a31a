"""The traffic of the router of each layer, measured on a trace."""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowcast.placement import parallel
from narrowcast.placement.correlation import (
    MIN_TOKENS,
    CrossLayerTable,
    coselection,
    first_order,
    held_out_correlation,
    most_frequent_next,
    second_order,
)
from narrowcast.placement.metrics import WIDTH, Column, as_object, rows_per_token
from narrowcast.placement.trace import RoutingTrace
from narrowcast.util import aligned, number, percent

TOP_PAIRS = 0.008
"""The share of all pairs of experts, the most frequent ones, that Expert Coupling counts (section
II.B)."""

_three_digits = partial(number, digits=3)


@dataclass(frozen=True)
class HeldOutCorrelations:
    """The correlation of tables of the earlier half of the tokens with those of the later half
    (Expert Coupling, section VI.A). It is nan with fewer than ``MIN_TOKENS`` in either.

    Attributes:
        coselection: co-selection of the experts of the layer.
        first_order: from the experts of the layer to those of the next. nan in the last layer.
        second_order: from those of the layer and of the previous one to those of the next. nan in
            the first and in the last layer.
    """

    coselection: float
    first_order: float
    second_order: float


@dataclass(frozen=True)
class RouterMetrics:
    """The metrics of the routing of one layer, whose experts are contiguous.

    Attributes:
        layer: name of the layer.
        load_E: (E,) int64, tokens of each expert.
        rows_per_token: C_T at each expert-parallel degree.
        top_pairs: the number of pairs of experts that the two shares below refer to: the most
            frequent ``TOP_PAIRS`` of all, and at least one.
        top_pairs_share: share of co-selections that these pairs have. nan at top-1.
        independent_share: the same if experts were selected independently of each other with the
            same loads, so that the count of a pair is proportional to the product of its loads.
        next_share: median over experts of the share of their tokens that select the most frequent
            expert of the next layer. nan in the last layer, and with fewer than ``MIN_TOKENS``.
        correlations: correlations of the tables with held-out ones.
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

    @property
    def least(self) -> float:
        """The load of the least loaded expert over the mean."""
        return (self.load_E.min() / self.load_E.double().mean()).item()


def measure_router(
    trace: RoutingTrace,
    layers: Sequence[str] | None = None,
    *,
    processes: int | None = 1,
    progress: bool = False,
) -> list[RouterMetrics]:
    """Return the metrics of the router of each layer of a trace.

    Expert-parallel degrees are the powers of two that divide the number of experts, or all divisors
    if there are none.

    Args:
        trace: a trace of at least one token.
        layers: names of the layers to measure, in any order; by default all.
        processes: processes that share the layers: see ``parallel.each``.
        progress: show a progress bar on stderr.

    Raises:
        ValueError: there are no tokens.
    """
    if not trace.num_tokens:
        raise ValueError("the trace has no tokens: record some")
    chosen = [i for i, name in enumerate(trace.layers) if layers is None or name in layers]
    # Tables from pairs of experts to those of the next layer, of two halves, and their tokens.
    pairs = min(trace.num_experts**2, trace.num_tokens * trace.top_k**2)
    entries = 4 * pairs * trace.num_experts + 8 * trace.num_tokens * trace.top_k**2
    return parallel.each(
        _measure_router_layer,
        (_Router.of(trace, i) for i in chosen),
        len(chosen),
        processes=processes,
        bytes_each=8 * entries,
        description="routers",
        progress=progress,
    )


@dataclass(frozen=True)
class _Router:
    """The experts of the tokens in one layer, and in the layers before and after it if any."""

    layer: str
    num_experts: int
    before_TK: Tensor | None
    ids_TK: Tensor
    next_TK: Tensor | None

    @classmethod
    def of(cls, trace: RoutingTrace, index: int) -> "_Router":
        """Return copies: a view would be sent to a process with the whole storage."""
        ids = {i: trace.ids_LTK[i].clone() for i in range(len(trace.layers)) if abs(i - index) < 2}
        name = trace.layers[index]
        return cls(name, trace.num_experts, ids.get(index - 1), ids[index], ids.get(index + 1))


def _measure_router_layer(router: _Router) -> RouterMetrics:
    experts, ids_TK = router.num_experts, router.ids_TK
    divisors = [n for n in range(2, experts + 1) if experts % n == 0]
    degrees = [n for n in divisors if n & (n - 1) == 0] or divisors
    load_E = torch.bincount(ids_TK.flatten().long(), minlength=experts)
    next_share = math.nan
    if len(ids_TK) >= MIN_TOKENS and router.next_TK is not None:
        shares_E = most_frequent_next(first_order(ids_TK, router.next_TK, experts))
        next_share = shares_E.nanquantile(0.5).item()
    pairs, share = _top_pairs(coselection(ids_TK, experts))
    load = load_E.double()
    return RouterMetrics(
        layer=router.layer,
        load_E=load_E,
        rows_per_token={
            degree: rows_per_token(ids_TK, torch.arange(experts) // (experts // degree))
            for degree in degrees
        },
        top_pairs=pairs,
        top_pairs_share=share,
        independent_share=_top_pairs(load.outer(load))[1] if share == share else share,
        next_share=next_share,
        correlations=_correlations(router),
    )


def _correlations(router: _Router) -> HeldOutCorrelations:
    """Return the correlations of the tables of the earlier half of the tokens with the later."""
    num_tokens, experts = len(router.ids_TK), router.num_experts
    cut = num_tokens - round(num_tokens * 0.5)
    if min(cut, num_tokens - cut) < MIN_TOKENS:
        return HeldOutCorrelations(math.nan, math.nan, math.nan)

    def between_halves(table: Callable[..., Tensor | CrossLayerTable], *ids: Tensor) -> float:
        halves = [table(*(ids_TK[part] for ids_TK in ids), experts) for part in parts]
        return held_out_correlation(*halves)

    parts = (slice(None, cut), slice(cut, None))
    before_TK, ids_TK, next_TK = router.before_TK, router.ids_TK, router.next_TK
    first = second = math.nan
    if next_TK is not None:
        first = between_halves(first_order, ids_TK, next_TK)
    if next_TK is not None and before_TK is not None:
        second = between_halves(second_order, before_TK, ids_TK, next_TK)
    return HeldOutCorrelations(between_halves(coselection, ids_TK), first, second)


COLUMNS = (
    Column("least", "least_expert_load_over_mean", lambda layer: layer.least),
    Column("skew", "busiest_expert_load_over_mean", lambda layer: layer.skew),
    Column("top pairs", "top_pairs_fraction", lambda layer: layer.top_pairs_share, percent),
    Column(
        "independent",
        "top_pairs_fraction_if_independent",
        lambda layer: layer.independent_share,
        percent,
    ),
    Column("next layer", "most_frequent_next_fraction", lambda layer: layer.next_share, percent),
    Column(
        "pairs",
        "coselection_correlation",
        lambda layer: layer.correlations.coselection,
        _three_digits,
    ),
    Column(
        "first",
        "first_order_correlation",
        lambda layer: layer.correlations.first_order,
        _three_digits,
    ),
    Column(
        "second",
        "second_order_correlation",
        lambda layer: layer.correlations.second_order,
        _three_digits,
    ),
)


def router_objects(layers: Sequence[RouterMetrics]) -> list[dict[str, Any]]:
    """Return the rows of ``router_table`` as objects for JSON, one for each layer, with the tokens
    of every expert."""
    return [
        {
            "layer": layer.layer,
            **as_object(layer, COLUMNS),
            "num_top_pairs": layer.top_pairs,
            "rows_per_token_by_ep_degree": layer.rows_per_token,
            "tokens_by_expert": layer.load_E.tolist(),
        }
        for layer in layers
    ]


def router_table(layers: Sequence[RouterMetrics]) -> str:
    """Return a table of the metrics of each router, and one of C_T of contiguous placements."""
    traffic = [["layer", *(column.title for column in COLUMNS)]]
    traffic += [[layer.layer, *(c.shown(c.of(layer)) for c in COLUMNS)] for layer in layers]
    ranks = [["layer", *(f"EP {degree}" for degree in layers[0].rows_per_token)]]
    ranks += [
        [layer.layer, *(f"{rows:.2f}" for rows in layer.rows_per_token.values())]
        for layer in layers
    ]
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


def _top_pairs(counts_EE: Tensor) -> tuple[int, float]:
    """Return the number of the most frequent ``TOP_PAIRS`` of all pairs, and their share."""
    first_P, second_P = torch.triu_indices(*counts_EE.shape, offset=1)
    counts_P = counts_EE[first_P, second_P].double().sort(descending=True).values
    top = max(1, round(TOP_PAIRS * len(counts_P)))
    return top, (counts_P[:top].sum() / counts_P.sum()).item()
