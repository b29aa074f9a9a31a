"""Plans a placement from a routing trace or from co-selection counts.

Each layer is planned on its own: fitted on earlier tokens, and judged on later ones.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from narrowcast.placement import parallel, partition
from narrowcast.placement.balance import limit_of, part_loads
from narrowcast.placement.correlation import MIN_TOKENS, coselection, normalized
from narrowcast.placement.coselection import CoselectionCounts
from narrowcast.placement.effort import SECONDS, Effort
from narrowcast.placement.placement import Placement, from_parts
from narrowcast.placement.problem import excess
from narrowcast.placement.recording import evenly_spaced
from narrowcast.placement.search import Searched, searched
from narrowcast.placement.trace import RoutingTrace

Method = Literal["contiguous", "random", "occult", "pairwise", "rows"]

HELD_OUT = 0.2
"""The share of a trace, its later tokens, that a plan is judged on."""

DEFAULT_MAX_LOAD = 1.1
"""The bound on load of method "rows", unless contiguous exceeds it or another bound is given."""


@dataclass(frozen=True)
class Plan:
    """A placement, and how it was found.

    Attributes:
        placement: within the bound on load, or as little beyond it as was found.
        free: without a bound; equal to ``placement`` where the bound costs no rows.
        effort: what the search of each layer was allowed. The trace may have had fewer tokens.
    """

    placement: Placement
    free: Placement
    effort: Effort


@dataclass(frozen=True)
class LayerPlan:
    """One layer of ``Plan.placement`` and of ``Plan.free``: (E,) int64, the expert in each slot."""

    experts_E: Tensor
    free_E: Tensor


@dataclass(frozen=True)
class LayerRouting:
    """What the plan of one layer is fitted on, and judged by.

    Attributes:
        layer: index of the layer.
        num_groups: groups of a node-limited router, or None.
        load_E: (E,) assignments to each expert, of all tokens.
        fitted_TK: (T, K) experts of the tokens to fit on.
        judged_TK: (T, K) experts of the tokens to judge by.
        weight_T: (T,) how many tokens each row of both stands for; None for one each.
    """

    layer: int
    num_groups: int | None
    load_E: Tensor
    fitted_TK: Tensor
    judged_TK: Tensor
    weight_T: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.load_E)

    @property
    def sets(self) -> partition.RoutedSets:
        """The sets of experts of the tokens to fit on."""
        if self.weight_T is None:
            return partition.RoutedSets.of(self.fitted_TK, self.num_experts)
        return partition.RoutedSets(self.fitted_TK, self.weight_T, self.num_experts)

    @property
    def graph_EE(self) -> Tensor:
        """(E, E) int64 co-selections of the tokens to fit on."""
        return coselection(self.fitted_TK, self.num_experts, self.weight_T)

    def rows(self, part_E: Tensor) -> int:
        """Return the rows of the tokens to judge by, given (E,) the part of each expert."""
        weight_T = self.weight_T
        if weight_T is None:
            weight_T = torch.ones(len(self.judged_TK), dtype=torch.int64)
        judged = partition.RoutedSets(self.judged_TK.long(), weight_T, self.num_experts)
        return partition.rows_sent(judged, part_E)


def plan(trace: RoutingTrace | CoselectionCounts, num_ranks: int, **options: Any) -> Placement:
    """Return the placement that ``make_plan`` finds. It takes the same arguments."""
    return make_plan(trace, num_ranks, **options).placement


def make_plan(
    trace: RoutingTrace | CoselectionCounts,
    num_ranks: int,
    *,
    num_nodes: int = 1,
    method: Method = "rows",
    max_load: float | None = None,
    cross_node_weight: float | None = None,
    seconds: float = SECONDS,
    restarts: int | None = None,
    seed: int = 0,
    processes: int | None = 1,
    progress: bool = False,
) -> Plan:
    """Plan the placement of the experts of every layer that sends the fewest rows.

    Args:
        trace: a trace of at least 1,024 tokens. Or co-selection counts, all of which are then both
            fitted on and judged by; "rows" needs counts of a top-2 router.
        num_ranks: expert-parallel degree, a divisor of the number of experts.
        num_nodes: number of nodes of the ranks. Consecutive ranks are on one node.
        method: "contiguous"; "random"; "occult", algorithm 1 of Occult; "pairwise", the local
            search of Expert Coupling (section V.A); "rows", a search on the number of rows itself.
        max_load: bound on the assignments of the busiest rank over the mean, of all tokens of the
            trace, for method "rows". It comes before rows. The default is 1.1, or the load of
            contiguous where that is larger; ``math.inf`` removes the bound.
        cross_node_weight: cost of each further node of a token, in rows, for method "rows". None
            minimizes nodes first, then ranks within each.
        seconds: for each layer, for method "rows": see ``Effort``.
        restarts: random starts of method "rows"; by default as many as ``seconds`` allow.
        seed: seed of "random" and of the restarts. Equal arguments give equal plans.
        processes: processes that share the layers: see ``parallel.each``.
        progress: show a progress bar on stderr.

    Raises:
        ValueError: there are too few tokens, numbers do not divide, an option is out of range, or
            the counts do not determine rows.
    """
    check(trace, num_ranks, num_nodes)
    _check_options(method, num_nodes, max_load, cross_node_weight, seconds, restarts)
    effort = _effort(trace, seconds, num_nodes, restarts)
    search = functools.partial(
        plan_layer,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        method=method,
        max_load=max_load,
        cross_node_weight=cross_node_weight,
        restarts=effort.restarts,
        seed=seed,
    )
    layers = parallel.each(
        search,
        _routings(trace, method, effort),
        len(trace.layers),
        processes=processes,
        bytes_each=effort.bytes(trace.num_experts),
        description="placement",
        progress=progress,
    )
    of = functools.partial(placement_of, trace, num_ranks=num_ranks, num_nodes=num_nodes)
    return Plan(
        placement=of([layer.experts_E for layer in layers], method=method),
        free=of([layer.free_E for layer in layers], method=method),
        effort=effort,
    )


def _effort(
    trace: RoutingTrace | CoselectionCounts, seconds: float, num_nodes: int, restarts: int | None
) -> Effort:
    """Return the effort for each layer."""
    num_fitted = 0
    if isinstance(trace, RoutingTrace):
        num_fitted = trace.num_tokens - round(trace.num_tokens * HELD_OUT)
    effort = Effort.of(seconds, trace.num_experts, num_fitted, num_nodes)
    return effort if restarts is None else replace(effort, restarts=restarts)


def _routings(
    trace: RoutingTrace | CoselectionCounts, method: Method, effort: Effort
) -> Iterator[LayerRouting]:
    """Return the routing of every layer."""
    if isinstance(trace, RoutingTrace):
        return routings_of(trace, effort.tokens)
    if method == "rows":
        trace.check_determines_rows()
    return _routings_of_counts(trace)


def plan_layer(
    routing: LayerRouting,
    *,
    num_ranks: int,
    num_nodes: int = 1,
    method: Method = "rows",
    max_load: float | None = None,
    cross_node_weight: float | None = None,
    restarts: int = 4,
    seed: int = 0,
) -> LayerPlan:
    """Plan one layer. The arguments are those of ``make_plan``, after ``check``.

    The bound on load comes first. Within it, or equally far beyond it, a layer stays contiguous
    unless the fitted division is better for the tokens to judge by: by nodes a token and then by
    ranks a token, or by their weighted sum.
    """
    contiguous_E = partition.contiguous(routing.num_experts, num_ranks)
    if method == "rows":
        if max_load is None:
            max_load = _default_max_load(routing.load_E, contiguous_E, num_ranks)
        found = searched(
            routing.sets,
            num_ranks,
            load_E=routing.load_E,
            num_nodes=num_nodes,
            num_groups=routing.num_groups,
            cross_node_weight=cross_node_weight,
            max_load=max_load,
            restarts=restarts,
            seed=seed,
        )
    else:
        rank_E = _unbounded(routing, method, num_ranks, num_nodes, seed)
        found = Searched(rank_E, rank_E)
    if method in ("contiguous", "random"):  # For comparison: they are not judged.
        return LayerPlan(from_parts(found.rank_E), from_parts(found.free_E))
    limit = limit_of(routing.load_E, num_ranks, max_load)

    def sent(rank_E: Tensor) -> tuple[float, float]:
        ranks, nodes = routing.rows(rank_E), routing.rows(rank_E // (num_ranks // num_nodes))
        if cross_node_weight is None:
            return nodes, ranks
        return ranks + cross_node_weight * nodes, 0.0

    def cost(rank_E: Tensor) -> tuple[float, float, float]:
        return excess(part_loads(routing.load_E, rank_E, num_ranks), limit), *sent(rank_E)

    rank_E = min(contiguous_E, found.rank_E, key=cost)
    free_E = min(rank_E, contiguous_E, found.free_E, key=sent)
    return LayerPlan(from_parts(rank_E), from_parts(free_E))


def _default_max_load(load_E: Tensor, contiguous_E: Tensor, num_ranks: int) -> float:
    """Return the default bound on load, given the rank of each expert without a placement."""
    load_R = part_loads(load_E, contiguous_E, num_ranks)
    return max(DEFAULT_MAX_LOAD, float(load_R.max() / load_R.mean()))


def _unbounded(
    routing: LayerRouting, method: Method, num_ranks: int, num_nodes: int, seed: int
) -> Tensor:
    """Return (E,) the rank of each expert by a method without a bound on load."""
    match method:
        case "contiguous":
            return partition.contiguous(routing.num_experts, num_ranks)
        case "random":
            return partition.random(routing.num_experts, num_ranks, seed + routing.layer)
        case "occult":
            return partition.occult(normalized(routing.graph_EE), num_ranks)
        case "pairwise":
            return _pairwise(routing.graph_EE, num_ranks, num_nodes)
    raise AssertionError(method)


def _pairwise(weight_EE: Tensor, num_ranks: int, num_nodes: int) -> Tensor:
    """Return (E,) the rank of each expert: nodes are filled first, then the ranks of each (Expert
    Coupling, section V.A)."""
    nodes_E = partition.contiguous(len(weight_EE), num_nodes)
    node_E = partition.pairwise(weight_EE, nodes_E, num_nodes)
    per_node = num_ranks // num_nodes
    rank_E = torch.empty_like(node_E)
    for node in range(num_nodes):
        here_M = (node_E == node).nonzero()[:, 0]
        start_M = partition.contiguous(len(here_M), per_node)
        rank_M = partition.pairwise(weight_EE[here_M][:, here_M], start_M, per_node)
        rank_E[here_M] = node * per_node + rank_M
    return rank_E


def placement_of(
    trace: RoutingTrace | CoselectionCounts,
    experts_by_layer: Sequence[Tensor],
    num_ranks: int,
    num_nodes: int,
    method: str,
) -> Placement:
    """Return the placement of all layers, given (E,) the expert in each slot of each layer."""
    return Placement(
        model=trace.model,
        layers=trace.layers,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        method=method,
        experts_LE=torch.stack(list(experts_by_layer)),
    )


def routings_of(trace: RoutingTrace, num_fitted: int) -> Iterator[LayerRouting]:
    """Yield the routing of each layer: loads of the whole trace, ``num_fitted`` of its earlier
    tokens, evenly spaced, to fit on, and all of its later ones to judge by."""
    earlier, later = trace.split(HELD_OUT)
    fitted = earlier.tokens(evenly_spaced(earlier.num_tokens, num_fitted))
    for layer, ids_TK in enumerate(trace.ids_LTK):
        load_E = torch.bincount(ids_TK.flatten(), minlength=trace.num_experts)
        yield LayerRouting(
            layer=layer,
            num_groups=trace.num_groups,
            load_E=load_E,
            # Copies: a view would be sent to a process with the whole storage.
            fitted_TK=fitted.ids_LTK[layer].clone(),
            judged_TK=later.ids_LTK[layer].clone(),
        )


def _routings_of_counts(counts: CoselectionCounts) -> Iterator[LayerRouting]:
    """Yield the routing of each layer, with pairs of experts in the place of tokens. At top-2 a
    token is a pair."""
    for layer, counts_EE in enumerate(counts.counts_LEE):
        sets = partition.RoutedSets.from_coselection(counts_EE)
        yield LayerRouting(
            layer=layer,
            num_groups=None,
            load_E=counts.load_LE[layer],
            fitted_TK=sets.ids_SK,
            judged_TK=sets.ids_SK,
            weight_T=sets.weight_S,
        )


def check(trace: RoutingTrace | CoselectionCounts, num_ranks: int, num_nodes: int) -> None:
    """Raise a ``ValueError`` if no placement can be planned from the trace for these ranks."""
    if isinstance(trace, RoutingTrace) and trace.num_tokens < MIN_TOKENS:
        raise ValueError(
            f"the trace holds {trace.num_tokens} tokens: a placement needs at least {MIN_TOKENS}. "
            "Record more steps"
        )
    if num_ranks < 1 or trace.num_experts % num_ranks:
        raise ValueError(
            f"{trace.num_experts} experts do not divide over {num_ranks} ranks: give an "
            "expert-parallel degree that divides them"
        )
    if num_nodes < 1 or num_ranks % num_nodes:
        raise ValueError(
            f"{num_ranks} ranks do not divide over {num_nodes} nodes: give a number of nodes that "
            "divides them"
        )


def _check_options(
    method: str,
    num_nodes: int,
    max_load: float | None,
    cross_node_weight: float | None,
    seconds: float,
    restarts: int | None,
) -> None:
    """Raise a ``ValueError`` for an option that is out of range, or would be ignored."""
    if method not in get_args(Method):
        raise ValueError(f"method = {method!r}: there are {', '.join(get_args(Method))}")
    if restarts is not None and restarts < 0:
        raise ValueError(f"restarts = {restarts}: give 0 or more")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds = {seconds}: give a number above 0, for each layer")
    if max_load is not None and not max_load >= 1:
        raise ValueError(
            f"max_load = {max_load}: give a number of at least 1, the mean, or inf for no bound"
        )
    if cross_node_weight is not None and not 0 <= cross_node_weight < math.inf:
        raise ValueError(f"cross_node_weight = {cross_node_weight}: give a number of at least 0")
    if cross_node_weight is not None and num_nodes == 1:
        raise ValueError(f"cross_node_weight = {cross_node_weight} needs more than one node")
    for name, value in (("max_load", max_load), ("cross_node_weight", cross_node_weight)):
        if value is not None and method != "rows":
            raise ValueError(f'{name} = {value} works with method "rows", not "{method}"')
