"""Searches that divide the experts of one layer into equal parts: the ranks or nodes they live on.

A token is sent once to each rank that holds some of its experts. `search` looks for the division
that sends the fewest rows; the others are what it starts from and is compared with. All return
(E,) int64, the part of each expert, and every part gets E / num_parts experts.

Sources: "Occult" (section 3.2, algorithm 1) and "Expert Coupling" (V.A). Both maximise the weight
of the pairs of experts that share a part. That is a proxy: of a token with three experts on a part
it counts three pairs and not two rows spared. With k = 2 the two are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from narrowcast.placement import enumeration
from narrowcast.placement.balance import greedy, limit_of, packed
from narrowcast.placement.swaps import SMALLEST_GAIN, Division, Levels, Problem, improve


@dataclass(frozen=True)
class RoutedSets:
    """The distinct sets of experts that tokens selected.

    ids_SK (int64) ascends within a row; weight_S (int64) is how many tokens selected each set.
    """

    ids_SK: Tensor
    weight_S: Tensor
    num_experts: int

    @classmethod
    def of(cls, ids_TK: Tensor, num_experts: int) -> RoutedSets:
        """Of the expert ids of T tokens, distinct within a row, in any order and integer dtype."""
        ids_TK = ids_TK.long().sort(dim=1).values
        ids_SK, weight_S = torch.unique(ids_TK, dim=0, return_counts=True)
        return cls(ids_SK, weight_S, num_experts)

    @property
    def load_E(self) -> Tensor:
        """(E,) float64: tokens that selected each expert."""
        load_E = torch.zeros(self.num_experts, dtype=torch.float64)
        weight_SK = self.weight_S.double()[:, None].expand(self.ids_SK.shape)
        return load_E.index_add_(0, self.ids_SK.flatten(), weight_SK.flatten())

    @classmethod
    def from_coselection(cls, counts_EE: Tensor) -> RoutedSets:
        """Of a top-2 router, of which the (E, E) co-selection counts say all."""
        ids_SK = counts_EE.triu(diagonal=1).nonzero()
        return cls(ids_SK, counts_EE[ids_SK[:, 0], ids_SK[:, 1]].long(), len(counts_EE))


def rows_sent(sets: RoutedSets, part_E: Tensor) -> int:
    """The sum over all tokens of the number of distinct parts among their experts."""
    part_SK = part_E[sets.ids_SK].sort(dim=1).values
    distinct_S = (part_SK[:, 1:] != part_SK[:, :-1]).sum(dim=1) + 1
    return int((distinct_S * sets.weight_S).sum())


def contiguous(num_experts: int, num_parts: int) -> Tensor:
    """Expert e on part e // (E / num_parts).

    Raises:
        ValueError: the experts do not divide evenly.
    """
    if num_parts < 1 or num_experts % num_parts:
        raise ValueError(
            f"{num_experts} experts do not divide evenly over {num_parts} parts: take a divisor"
        )
    return torch.arange(num_experts) // (num_experts // num_parts)


def random(num_experts: int, num_parts: int, seed: int) -> Tensor:
    """Uniform over all equal divisions; the same for the same seed."""
    order_E = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed))
    return contiguous(num_experts, num_parts)[order_E]


def occult(graph_EE: Tensor, num_parts: int) -> Tensor:
    """Occult's algorithm 1, of a symmetric collaboration graph of any scale.

    Part 0 starts with the pair that collaborates most, every other part with the expert that
    collaborates least with all that are placed; then each takes the expert that collaborates most
    with its own, until it is full. Ties go to the lowest index. Two things differ from the printed
    algorithm. Its loop runs while len <= E / num_parts, which puts one expert too many on each
    part: here it is <. And of the first pair only the first expert is taken where a part holds one.
    """
    graph_EE = graph_EE.double().clone().fill_diagonal_(-torch.inf)
    num_experts = len(graph_EE)
    capacity = len(contiguous(num_experts, num_parts)) // num_parts
    part_E = torch.full((num_experts,), -1)
    for part in range(num_parts):
        placed_E = part_E >= 0
        if part == 0:
            first = divmod(int(graph_EE.argmax()), num_experts)[:capacity]
        else:
            least_E = graph_EE[placed_E].sum(dim=0).masked_fill(placed_E, torch.inf)
            first = (int(least_E.argmin()),)
        part_E[list(first)] = part
        for _ in range(len(first), capacity):
            most_E = graph_EE[part_E == part].sum(dim=0).masked_fill(part_E >= 0, -torch.inf)
            part_E[most_E.argmax()] = part
    return part_E


def pairwise(weight_EE: Tensor, start_E: Tensor, num_parts: int) -> Tensor:
    """Expert Coupling's search: swap two experts while that adds weight to pairs that share a part.

    It takes the best swap each time (of equal ones that of the lowest indices) and ends where none
    helps. `weight_EE` is symmetric; its diagonal does not matter.
    """
    weight_EE = weight_EE.double().clone().fill_diagonal_(0)
    part_E = start_E.clone()
    weight_QE = (part_E == torch.arange(num_parts)[:, None]).double() @ weight_EE
    while True:
        # [b, a]: what a gains by moving to the part of b, which leaves it.
        move_EE = weight_QE.index_select(0, part_E)
        move_EE = move_EE - move_EE.diagonal() - weight_EE
        gain_EE = (move_EE + move_EE.T).masked_fill_(part_E[:, None] == part_E, 0)
        a, b = divmod(int(gain_EE.argmax()), len(part_E))
        if gain_EE[a, b] < SMALLEST_GAIN:
            return part_E
        moved_E = weight_EE[b] - weight_EE[a]
        weight_QE[part_E[a]] += moved_E
        weight_QE[part_E[b]] -= moved_E
        part_E[[a, b]] = part_E[[b, a]]


@dataclass(frozen=True)
class Searched:
    """What a search found: (E,) int64, the rank of each expert.

    Attributes:
        rank_E: within the bound on load, or as little beyond it as was found.
        free_E: without a bound.
    """

    rank_E: Tensor
    free_E: Tensor


def search(sets: RoutedSets, num_ranks: int, **options: Any) -> Tensor:
    """(E,) what `searched` finds within the bound on load, if one is given. Takes its arguments."""
    return searched(sets, num_ranks, **options).rank_E


def searched(
    sets: RoutedSets,
    num_ranks: int,
    *,
    load_E: Tensor | None = None,
    num_nodes: int = 1,
    num_groups: int | None = None,
    cross_node_weight: float | None = None,
    max_load: float | None = None,
    restarts: int = 4,
    seed: int = 0,
) -> Searched:
    """The rank of each expert, such that few rows are sent; ranks of a node are consecutive.

    Few experts are divided in every way. Else pairwise searches, from contiguous, from Occult's and
    from random divisions, give the starts, and the best are improved by swaps that are judged by
    the rows themselves. With several nodes, experts are divided over nodes, then over the ranks of
    each; last come swaps across all.

    What is minimised is the largest load beyond the bound, then the weighted sum of rows. By that
    measure the result is never worse than contiguous on `sets`, nor, by the first, than a greedy
    packing by load (EPLB's).

    Args:
        sets: what tokens selected.
        num_ranks: R, a divisor of E.
        load_E: (E,) assignments to each expert, of these tokens or of more; by default of `sets`.
        num_nodes: a divisor of R.
        num_groups: of a node-limited router: group g is the g-th run of E / num_groups experts.
            Where num_nodes divides it, groups stay whole on a node, and nodes come first whatever
            the weight. Elsewhere they are ignored.
        cross_node_weight: what a (token, node) costs, a (token, rank) costing 1. 0 ignores nodes.
            None: nodes first; ranks among divisions of equal cost there.
        max_load: the busiest rank's share of the load, as a multiple of the mean, to stay within
            where that is found to be possible. It comes before rows.
        restarts: number of random divisions to start from.
        seed: of those. Equal arguments give equal results.

    Raises:
        ValueError: experts, ranks, nodes and groups do not divide evenly.
    """
    num_experts = sets.num_experts
    contiguous(num_experts, num_ranks)  # raises
    if num_nodes < 1 or num_ranks % num_nodes:
        raise ValueError(
            f"{num_ranks} ranks do not divide evenly over {num_nodes} nodes: take a divisor"
        )
    if num_groups is not None and (num_groups < 1 or num_experts % num_groups):
        raise ValueError(
            f"{num_experts} experts do not divide evenly into {num_groups} groups: take a divisor"
        )
    problem = Problem.of(sets.ids_SK, sets.weight_S, sets.load_E if load_E is None else load_E)
    limit = limit_of(problem.load_U, num_ranks, max_load)
    if num_nodes == 1:
        return _divide(problem, num_ranks, limit, restarts=restarts, seed=seed)
    whole = num_groups is not None and num_groups % num_nodes == 0
    group_E = contiguous(num_experts, num_groups) if whole else None
    nodes_first = cross_node_weight is None
    if cross_node_weight is None:
        cross_node_weight = float(sets.weight_S.sum()) * sets.ids_SK.shape[1] + 1.0
    levels = ((num_ranks, 1.0), (num_nodes, cross_node_weight))
    if enumeration.can_be_tried(problem, levels):
        return _all_tried(problem, levels, limit, group_E)
    options = {"restarts": restarts, "seed": seed}
    if group_E is not None:
        return _groups_on_nodes(problem, levels, limit, group_E, **options)
    return _over_nodes(problem, levels, limit, nodes_first=nodes_first, **options)


def _divide(
    problem: Problem, num_parts: int, limit: float, *, restarts: int, seed: int
) -> Searched:
    """Units on equal parts of no order."""
    num_units = len(problem.load_U)
    trivial_U, levels = contiguous(num_units, num_parts), ((num_parts, 1.0),)
    if num_parts in (1, num_units):
        return Searched(trivial_U, trivial_U)
    if enumeration.can_be_tried(problem, levels):
        return _all_tried(problem, levels, limit)
    graph_UU = problem.graph_UU
    starts = [trivial_U, occult(graph_UU, num_parts)]
    starts += [random(num_units, num_parts, seed + i) for i in range(restarts)]
    starts = [trivial_U, *(pairwise(graph_UU, start_U, num_parts) for start_U in starts)]
    divisions = [Division.of(problem, start_U, levels) for start_U in starts]
    # Many end in the same division, or in one that differs in the numbers of its parts.
    distinct = {division.cost(torch.inf): division for division in reversed(divisions)}
    best = [distinct[cost] for cost in sorted(distinct)][: max(2, restarts // 4 + 1)]
    return _improved(problem, levels, limit, best)


def _over_nodes(
    problem: Problem, levels: Levels, limit: float, *, nodes_first: bool, **options: int
) -> Searched:
    """Experts on ranks of nodes: from the nodes to their ranks, and from ranks to their nodes."""
    (num_ranks, _), (num_nodes, _) = levels
    per_node = num_ranks // num_nodes

    @cache
    def flat() -> Searched:
        return _divide(problem, num_ranks, limit, **options)

    def dealt(rank_E: Tensor) -> Tensor:
        """With ranks that are dealt to nodes."""
        node_R = _divide(problem.merged(rank_E), num_nodes, torch.inf, **options).free_E
        return node_R.argsort(stable=True).argsort()[rank_E]

    def within() -> list[Tensor]:
        return [_nested(problem, by_node.rank_E, levels, limit, **options), dealt(flat().rank_E)]

    by_node = _divide(problem, num_nodes, limit * per_node, **options)
    starts = [_nested(problem, by_node.free_E, levels, torch.inf, **options)]
    if not nodes_first:
        starts.append(dealt(flat().free_E))
    divisions = [Division.of(problem, start_E, levels) for start_E in starts]
    return _improved(problem, levels, limit, divisions, within)


def _groups_on_nodes(
    problem: Problem, levels: Levels, limit: float, group_E: Tensor, **options: int
) -> Searched:
    """Experts on ranks of nodes, whole groups on each node. Swaps between nodes would break up
    groups, and those within a node have been tried."""
    (num_ranks, _), (num_nodes, _) = levels
    trivial_E = contiguous(len(group_E), num_ranks)
    by_group, node_limit = problem.merged(group_E), limit * (num_ranks // num_nodes)
    by_node = _divide(by_group, num_nodes, node_limit, **options)

    def found(node_G: Tensor, limit: float) -> tuple[float, float, Tensor]:
        rank_E = _nested(problem, node_G[group_E], levels, limit, **options)
        return _judged(problem, levels, limit, rank_E)

    free = [found(by_node.free_E, torch.inf), _judged(problem, levels, torch.inf, trivial_E)]
    within = [found(by_node.rank_E, limit), _judged(problem, levels, limit, trivial_E)]
    if min(within, key=_COST)[0] > 0:
        packings = (
            packed(by_group.load_U, num_nodes, node_limit),
            greedy(by_group.load_U, num_nodes),
        )
        within += [found(node_G, limit) for node_G in packings]
    return Searched(min(within, key=_COST)[2], min(free, key=_COST)[2])


def _nested(
    problem: Problem, node_E: Tensor, levels: Levels, limit: float, **options: int
) -> Tensor:
    """(E,) the rank of each expert, given its node."""
    (num_ranks, _), (num_nodes, _) = levels
    rank_E, per_node = torch.empty_like(node_E), num_ranks // num_nodes
    for node in range(num_nodes):
        here_M = (node_E == node).nonzero()[:, 0]
        rank_M = _divide(problem.among(here_M), per_node, limit, **options).rank_E
        rank_E[here_M] = node * per_node + rank_M
    return rank_E


def _improved(
    problem: Problem,
    levels: Levels,
    limit: float,
    starts: Sequence[Division],
    within_starts: Callable[[], list[Tensor]] = list,
) -> Searched:
    """The best that swaps make of some divisions, first without a limit and then within it."""
    num_parts = levels[0][0]
    judge = functools.partial(_judged, problem, levels, limit)
    trivial = judge(contiguous(len(problem.load_U), num_parts))
    found = [judge(improve(start, torch.inf)[1]) for start in starts]
    free = min([*found, trivial], key=itemgetter(1))
    if free[0] == 0:
        return Searched(free[2], free[2])
    packed_U = packed(problem.load_U, num_parts, limit)
    least = judge(packed_U)[0]
    reachable = limit + least
    within = [*found, trivial]
    within += [judge(improve(start, reachable)[1]) for start in starts]  # from where they are
    for start_U in within_starts():
        within.append(judge(improve(Division.of(problem, start_U, levels), reachable)[1]))
    if min(within, key=_COST)[0] > least:
        within.append(judge(improve(Division.of(problem, packed_U, levels), reachable)[1]))
    best = min(within, key=_COST)
    return Searched(best[2], min(free, best, key=itemgetter(1))[2])


def _all_tried(
    problem: Problem, levels: Levels, limit: float, unit_U: Tensor | None = None
) -> Searched:
    rank_E, free_E = (
        enumeration.best(problem, levels, bound, unit_U) for bound in (limit, torch.inf)
    )
    return Searched(rank_E, free_E)


def _judged(
    problem: Problem, levels: Levels, limit: float, part_U: Tensor
) -> tuple[float, float, Tensor]:
    """The largest load beyond the limit, the weighted rows, and the division that has them."""
    return *Division.of(problem, part_U, levels).cost(limit), part_U


_COST = itemgetter(0, 1)
