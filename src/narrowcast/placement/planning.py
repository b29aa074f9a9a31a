"""Plans a placement from a trace, or from co-selection counts: layer by layer, fitted on earlier
tokens and judged on later ones."""

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
from narrowcast.placement.recording import evenly_spaced
from narrowcast.placement.search import searched
from narrowcast.placement.trace import RoutingTrace

Method = Literal["contiguous", "random", "occult", "pairwise", "rows"]

# The share of a trace's later tokens that a plan must prove itself on.
HELD_OUT = 0.2

# The busiest rank's load over the mean that "rows" may reach in any case; more where contiguous has
# more, unless a bound is given.
DEFAULT_LOAD = 1.1


@dataclass(frozen=True)
class Plan:
    """A placement, and how it was found.

    Attributes:
        placement: within the bound on load, or as little beyond it as was found.
        free: what no bound would give; equal to it where the bound costs nothing.
        effort: of each layer. Of its tokens there may have been fewer.
    """

    placement: Placement
    free: Placement
    effort: Effort


@dataclass(frozen=True)
class LayerPlan:
    """The expert in each slot of a layer, (E,) int64: of `Plan.placement` and of `Plan.free`."""

    experts_E: Tensor
    free_E: Tensor


@dataclass(frozen=True)
class LayerRouting:
    """What one layer's plan is made from, and judged by.

    Attributes:
        layer: its number.
        num_groups: of a node-limited router, or None.
        load_E: (E,) assignments to each expert: of all tokens, whichever are fitted on.
        fitted_TK: experts of the tokens to fit on.
        judged_TK: of those to judge by.
        weight_T: how many tokens each row of both stands for; None for one.
    """

    layer: int
    num_groups: int | None
    load_E: Tensor
    fitted_TK: Tensor
    judged_TK: Tensor
    weight_T: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return len(self.load_E)

    @property
    def sets(self) -> partition.RoutedSets:
        if self.weight_T is None:
            return partition.RoutedSets.of(self.fitted_TK, self.num_experts)
        return partition.RoutedSets(self.fitted_TK, self.weight_T, self.num_experts)

    @property
    def graph_EE(self) -> Tensor:
        return coselection(self.fitted_TK, self.num_experts, self.weight_T)

    def rows(self, part_E: Tensor) -> int:
        """Parts that the tokens to judge by go to."""
        weight_T = self.weight_T
        if weight_T is None:
            weight_T = torch.ones(len(self.judged_TK), dtype=torch.int64)
        judged = partition.RoutedSets(self.judged_TK.long(), weight_T, self.num_experts)
        return partition.rows_sent(judged, part_E)


def plan(trace: RoutingTrace | CoselectionCounts, num_ranks: int, **options: Any) -> Placement:
    """The placement that `make_plan` finds. Takes its arguments."""
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
    """The placement of every layer's experts that sends the fewest rows, as a method finds it.

    Args:
        trace: of at least 1,024 tokens. Or co-selection counts: all that there is is fitted on and
            judged by then, and "rows" takes counts of a top-2 router.
        num_ranks: expert-parallel degree, which divides the number of experts.
        num_nodes: that the ranks are spread over, consecutive ranks on a node.
        method: "contiguous"; "random"; "occult", algorithm 1 of Occult; "pairwise", the local
            search of Expert Coupling (V.A); "rows", search on the number of rows itself.
        max_load: bound on the assignments of the busiest rank over the mean, of all tokens of the
            trace. It comes before rows. By default 1.1, or what contiguous has where that is more;
            `math.inf` lifts it. Of "rows" alone.
        cross_node_weight: what one more node of a token costs, in rows. None: nodes first, then
            ranks within each. Of "rows" alone.
        seconds: of a layer, for "rows": see `Effort`.
        restarts: seeded starts of "rows"; by default what `seconds` leave after the tokens.
        seed: of "random" and of the restarts. Equal arguments give equal plans.
        processes: that share the layers: see `parallel.each`.
        progress: show a bar on stderr.

    Raises:
        ValueError: too few tokens, numbers that do not divide, or what counts do not tell.
    """
    check(trace, num_ranks, num_nodes)
    _check_options(method, num_nodes, max_load, cross_node_weight, seconds, restarts)
    if isinstance(trace, CoselectionCounts):
        if method == "rows":
            trace.check_tells_rows()
        effort = Effort.of(seconds, trace.num_experts, 0, num_nodes)
        routings = _routings_of_counts(trace)
    else:
        fitted = trace.num_tokens - round(trace.num_tokens * HELD_OUT)
        effort = Effort.of(seconds, trace.num_experts, fitted, num_nodes)
        routings = routings_of(trace, effort.tokens)
    if restarts is not None:
        effort = replace(effort, restarts=restarts)
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
        routings,
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
    """The plan of one layer. Arguments as of `make_plan`, after `check`.

    The bound on load comes first. Within it, or equally far beyond, a layer stays contiguous unless
    what was fitted is better for the tokens to judge by: by nodes a token and then by ranks a
    token, or by their weighted sum.
    """
    num_experts = routing.num_experts
    contiguous_E = partition.contiguous(num_experts, num_ranks)
    limit = math.inf
    match method:
        case "contiguous":
            free_E = rank_E = contiguous_E
        case "random":
            free_E = rank_E = partition.random(num_experts, num_ranks, seed + routing.layer)
        case "occult":
            free_E = rank_E = partition.occult(normalized(routing.graph_EE), num_ranks)
        case "pairwise":
            free_E = rank_E = _pairwise(routing.graph_EE, num_ranks, num_nodes)
        case "rows":
            if max_load is None:
                load_R = part_loads(routing.load_E, contiguous_E, num_ranks)
                max_load = max(DEFAULT_LOAD, float(load_R.max() / load_R.mean()))
            limit = limit_of(routing.load_E, num_ranks, max_load)
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
            rank_E, free_E = found.rank_E, found.free_E
        case _:
            raise AssertionError(method)
    if method in ("contiguous", "random"):  # for comparison, as they are
        return LayerPlan(from_parts(rank_E), from_parts(rank_E))

    def excess(rank_E: Tensor) -> float:
        return max(0.0, float(part_loads(routing.load_E, rank_E, num_ranks).max()) - limit)

    def sent(rank_E: Tensor) -> tuple[float, float]:
        ranks, nodes = routing.rows(rank_E), routing.rows(rank_E // (num_ranks // num_nodes))
        if cross_node_weight is None:
            return nodes, ranks
        return ranks + cross_node_weight * nodes, 0.0

    rank_E = min(contiguous_E, rank_E, key=lambda rank_E: (excess(rank_E), *sent(rank_E)))
    return LayerPlan(from_parts(rank_E), from_parts(min(rank_E, contiguous_E, free_E, key=sent)))


def _pairwise(weight_EE: Tensor, num_ranks: int, num_nodes: int) -> Tensor:
    """Nodes first, then the ranks of each, from contiguous (Expert Coupling, V.A)."""
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
    """The placement made of the plans of all layers."""
    return Placement(
        model=trace.model,
        layers=trace.layers,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        method=method,
        experts_LE=torch.stack(list(experts_by_layer)),
    )


def routings_of(trace: RoutingTrace, num_fitted: int) -> Iterator[LayerRouting]:
    """What each layer's plan is made from: loads of the whole trace; of its earlier tokens so many,
    evenly spaced, to fit on; all of its later ones to judge by."""
    earlier, later = trace.split(HELD_OUT)
    fitted = earlier.tokens(evenly_spaced(earlier.num_tokens, num_fitted))
    for layer, ids_TK in enumerate(trace.ids_LTK):
        load_E = torch.bincount(ids_TK.flatten(), minlength=trace.num_experts)
        yield LayerRouting(
            layer=layer,
            num_groups=trace.num_groups,
            load_E=load_E,
            # Copies, since a view would be sent to a process with all that it is a view of.
            fitted_TK=fitted.ids_LTK[layer].clone(),
            judged_TK=later.ids_LTK[layer].clone(),
        )


def _routings_of_counts(counts: CoselectionCounts) -> Iterator[LayerRouting]:
    """The same, of pairs of experts as if they were tokens. At top-2 they are."""
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
    """Raise a ValueError if no placement can be planned from the trace for these ranks."""
    if isinstance(trace, RoutingTrace) and trace.num_tokens < MIN_TOKENS:
        raise ValueError(
            f"the trace holds {trace.num_tokens} tokens: a placement takes at least {MIN_TOKENS}. "
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
    """Raise a ValueError for an option that is out of range, or would be ignored."""
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
        raise ValueError(f"cross_node_weight = {cross_node_weight} takes more than one node")
    for name, value in (("max_load", max_load), ("cross_node_weight", cross_node_weight)):
        if value is not None and method != "rows":
            raise ValueError(f'{name} = {value} works with method "rows", not "{method}"')
