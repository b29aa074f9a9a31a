"""Plans a placement from a trace: layer by layer, fitted on earlier, judged on later tokens."""

import functools
import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from narrowcast.experts import partition
from narrowcast.experts.correlation import MIN_TOKENS, coselection, normalized
from narrowcast.experts.metrics import rows_per_token
from narrowcast.experts.placement import Placement, from_parts
from narrowcast.experts.recording import evenly_spaced
from narrowcast.experts.routing import RoutingTrace

Method = Literal["contiguous", "random", "occult", "pairwise", "rows"]

# Tokens times experts that a plan is made from: a search takes time in proportion. 16,384 tokens of
# 128 experts; from 4,096 a plan is within a per cent (Expert Coupling, VI.A).
_TOKENS_TIMES_EXPERTS = 2**21

# The share of a trace's later tokens that a plan must prove itself on.
HELD_OUT = 0.2


def plan(
    trace: RoutingTrace,
    num_ranks: int,
    *,
    num_nodes: int = 1,
    method: Method = "rows",
    max_load: float | None = None,
    cross_node_weight: float | None = None,
    restarts: int = 4,
    seed: int = 0,
    progress: bool = False,
) -> Placement:
    """The placement of every layer's experts that sends the fewest rows, as a method finds it.

    Args:
        trace: of at least 1,024 tokens.
        num_ranks: expert-parallel degree, which divides the number of experts.
        num_nodes: that the ranks are spread over, consecutive ranks on a node.
        method: "contiguous"; "random"; "occult", algorithm 1 of Occult; "pairwise", the local
            search of Expert Coupling (V.A); "rows", search on the number of rows itself.
        max_load: bound on the assignments of the busiest rank over the mean. Of "rows" alone.
        cross_node_weight: what one more node of a token costs, in rows. None: nodes first, then
            ranks within each. Of "rows" alone.
        restarts: seeded starts of "rows".
        seed: of "random" and of the restarts.
        progress: show a bar on stderr.

    Raises:
        ValueError: too few tokens, or numbers that do not divide.
    """
    check(trace, num_ranks, num_nodes)
    _check_options(method, num_nodes, max_load, cross_node_weight, restarts)
    trace = sample(trace)
    layers = range(len(trace.layers))
    search = functools.partial(
        plan_layer,
        trace,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        method=method,
        max_load=max_load,
        cross_node_weight=cross_node_weight,
        restarts=restarts,
        seed=seed,
    )
    bar = tqdm(layers, desc="placement", unit="layer", disable=not progress)
    return placement_of(trace, [search(layer) for layer in bar], num_ranks, num_nodes, method)


def plan_layer(
    trace: RoutingTrace,
    layer: int,
    *,
    num_ranks: int,
    num_nodes: int = 1,
    method: Method = "rows",
    max_load: float | None = None,
    cross_node_weight: float | None = None,
    restarts: int = 4,
    seed: int = 0,
) -> Tensor:
    """(E,) the expert in each slot of one layer. Arguments as of `plan`, after `check`.

    Contiguous, unless what was fitted on the earlier tokens is better for the later ones: by nodes
    a token and then by ranks a token, or by their weighted sum. A bound on load comes first.
    """
    num_experts = trace.num_experts
    contiguous_E = partition.contiguous(num_experts, num_ranks)
    fitted, held_out = (part.ids_LTK[layer].long() for part in trace.split(HELD_OUT))
    match method:
        case "contiguous":
            return from_parts(contiguous_E)
        case "random":
            return from_parts(partition.random(num_experts, num_ranks, seed + layer))
        case "occult":
            graph_EE = normalized(coselection(fitted, num_experts))
            rank_E = partition.occult(graph_EE, num_ranks)
        case "pairwise":
            rank_E = _pairwise(coselection(fitted, num_experts), num_ranks, num_nodes)
        case "rows":
            rank_E = partition.search(
                partition.RoutedSets.of(fitted, num_experts),
                num_ranks,
                num_nodes=num_nodes,
                num_groups=trace.num_groups,
                cross_node_weight=cross_node_weight,
                max_load=max_load,
                restarts=restarts,
                seed=seed,
            )
        case _:
            raise AssertionError(method)
    if max_load is not None:
        return from_parts(rank_E)

    def cost(rank_E: Tensor) -> tuple[float, float]:
        ranks = rows_per_token(held_out, rank_E)
        nodes = rows_per_token(held_out, rank_E // (num_ranks // num_nodes))
        if cross_node_weight is None:
            return nodes, ranks
        return ranks + cross_node_weight * nodes, 0.0

    return from_parts(min(contiguous_E, rank_E, key=cost))


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
    trace: RoutingTrace,
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


def tokens_to_plan_from(num_experts: int) -> int:
    """How many tokens a plan is made from, at most."""
    return max(_TOKENS_TIMES_EXPERTS // num_experts, MIN_TOKENS)


def sample(trace: RoutingTrace) -> RoutingTrace:
    """As many of the tokens as are planned from, evenly spaced."""
    return trace.tokens(evenly_spaced(trace.num_tokens, tokens_to_plan_from(trace.num_experts)))


def check(trace: RoutingTrace, num_ranks: int, num_nodes: int) -> None:
    """Raise a ValueError if no placement can be planned from the trace for these ranks."""
    if trace.num_tokens < MIN_TOKENS:
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
    restarts: int,
) -> None:
    """Raise a ValueError for an option that is out of range, or would be ignored."""
    if method not in get_args(Method):
        raise ValueError(f"method = {method!r}: there are {', '.join(get_args(Method))}")
    if restarts < 0:
        raise ValueError(f"restarts = {restarts}: give 0 or more")
    if max_load is not None and not 1 <= max_load < math.inf:
        raise ValueError(f"max_load = {max_load}: give a number of at least 1, the mean")
    if cross_node_weight is not None and not 0 <= cross_node_weight < math.inf:
        raise ValueError(f"cross_node_weight = {cross_node_weight}: give a number of at least 0")
    if cross_node_weight is not None and num_nodes == 1:
        raise ValueError(f"cross_node_weight = {cross_node_weight} takes more than one node")
    for name, value in (("max_load", max_load), ("cross_node_weight", cross_node_weight)):
        if value is not None and method != "rows":
            raise ValueError(f'{name} = {value} works with method "rows", not "{method}"')
