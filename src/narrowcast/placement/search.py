"""Searches for the division of experts over ranks that sends the fewest rows.

Few experts are divided in every way. Otherwise pairwise searches from contiguous, from Occult's and
from random divisions give the starts, and swaps that are judged by the rows themselves improve the
best of these. With several nodes, experts are divided over the nodes first, then over the ranks of
each; swaps across all ranks come last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.placement import enumeration
from narrowcast.placement.balance import greedy, limit_of, packed
from narrowcast.placement.partition import RoutedSets, contiguous, occult, pairwise, random
from narrowcast.placement.problem import Cost, Levels, Problem, cost_of
from narrowcast.placement.swaps import improve


@dataclass(frozen=True)
class Searched:
    """What a search found.

    Attributes:
        rank_E: (E,) int64, the rank of each expert: within the bound on load, or as little beyond
            it as was found.
        free_E: (E,) int64, the same without a bound.
    """

    rank_E: Tensor
    free_E: Tensor


Divide = Callable[[Problem, int, float], Searched]
"""Divides the units of a problem into equal parts, whose load has a limit."""


def search(sets: RoutedSets, num_ranks: int, **options: Any) -> Tensor:
    """Return (E,) what ``searched`` finds within the bound on load. It takes the same arguments."""
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
    """Search for the rank of each expert that sends the fewest rows.

    It minimizes the load of the busiest rank beyond the bound, then the weighted sum of rows. By
    that measure the result is never worse than contiguous on ``sets``, and never further beyond the
    bound than a greedy packing by load (EPLB's).

    Args:
        sets: sets of experts that tokens selected.
        num_ranks: R, a divisor of E.
        load_E: (E,) assignments to each expert, of these tokens or of more; by default of ``sets``.
        num_nodes: a divisor of R. The ranks of a node are consecutive.
        num_groups: groups of a node-limited router: group g is the g-th E / num_groups experts. If
            ``num_nodes`` divides it, groups stay whole on a node, and nodes come first whatever the
            weight. Otherwise it is ignored.
        cross_node_weight: cost of a (token, node) pair, where a (token, rank) pair costs 1. 0
            ignores nodes. None counts nodes first, and ranks among divisions of equal nodes.
        max_load: bound on the load of the busiest rank over the mean. It comes before rows.
        restarts: number of random divisions to start from.
        seed: seed of these. Equal arguments give equal results.

    Raises:
        ValueError: experts, ranks, nodes and groups do not divide evenly.
    """
    _check_divisible(sets.num_experts, num_ranks, num_nodes, num_groups)
    problem = Problem.of(sets.ids_SK, sets.weight_S, sets.load_E if load_E is None else load_E)
    limit = limit_of(problem.load_U, num_ranks, max_load)
    divide = functools.partial(_divide, restarts=restarts, seed=seed)
    if num_nodes == 1:
        return divide(problem, num_ranks, limit)
    nodes_first = cross_node_weight is None
    if cross_node_weight is None:  # more than all rows to ranks
        cross_node_weight = float(sets.weight_S.sum()) * sets.ids_SK.shape[1] + 1.0
    levels = ((num_ranks, 1.0), (num_nodes, cross_node_weight))
    is_grouped = num_groups is not None and num_groups % num_nodes == 0
    group_E = contiguous(sets.num_experts, num_groups) if is_grouped else None
    if enumeration.is_feasible(problem, levels):
        return _enumerated(problem, levels, limit, group_E)
    if group_E is not None:
        return _groups_on_nodes(problem, levels, limit, group_E, divide)
    return _over_nodes(problem, levels, limit, divide, nodes_first=nodes_first)


def _check_divisible(
    num_experts: int, num_ranks: int, num_nodes: int, num_groups: int | None
) -> None:
    contiguous(num_experts, num_ranks)  # raises
    if num_nodes < 1 or num_ranks % num_nodes:
        raise ValueError(
            f"{num_ranks} ranks do not divide evenly over {num_nodes} nodes: use a divisor"
        )
    if num_groups is not None and (num_groups < 1 or num_experts % num_groups):
        raise ValueError(
            f"{num_experts} experts do not divide evenly into {num_groups} groups: use a divisor"
        )


def _divide(
    problem: Problem, num_parts: int, limit: float, *, restarts: int, seed: int
) -> Searched:
    """Divide units into equal parts whose order does not matter."""
    num_units = problem.num_units
    contiguous_U, levels = contiguous(num_units, num_parts), ((num_parts, 1.0),)
    if num_parts in (1, num_units):
        return Searched(contiguous_U, contiguous_U)
    if enumeration.is_feasible(problem, levels):
        return _enumerated(problem, levels, limit)
    graph_UU = problem.graph_UU
    starts = [contiguous_U, occult(graph_UU, num_parts)]
    starts += [random(num_units, num_parts, seed + i) for i in range(restarts)]
    starts = [contiguous_U, *(pairwise(graph_UU, start_U, num_parts) for start_U in starts)]
    # Many starts reach the same division, or one that differs in the order of its parts.
    distinct = {cost_of(problem, of_U, levels, torch.inf): of_U for of_U in reversed(starts)}
    best = [distinct[cost] for cost in sorted(distinct)][: max(2, restarts // 4 + 1)]
    return _improved(problem, levels, limit, best)


def _over_nodes(
    problem: Problem, levels: Levels, limit: float, divide: Divide, *, nodes_first: bool
) -> Searched:
    """Divide experts over the ranks of several nodes.

    It starts from a division over nodes, each of which is then divided over its ranks, and from a
    division over ranks, which are then divided over nodes.
    """
    (num_ranks, _), (num_nodes, _) = levels
    flat = functools.cache(lambda: divide(problem, num_ranks, limit))

    def grouped(rank_E: Tensor) -> Tensor:
        """Return the same division with its ranks renumbered, node by node."""
        node_R = divide(problem.merged(rank_E), num_nodes, torch.inf).free_E
        return node_R.argsort(stable=True).argsort()[rank_E]

    by_node = divide(problem, num_nodes, limit * (num_ranks // num_nodes))
    starts = [_within_nodes(problem, by_node.free_E, levels, torch.inf, divide)]
    if not nodes_first:
        starts.append(grouped(flat().free_E))

    def bounded_starts() -> list[Tensor]:
        within_E = _within_nodes(problem, by_node.rank_E, levels, limit, divide)
        return [within_E, grouped(flat().rank_E)]

    return _improved(problem, levels, limit, starts, bounded_starts)


def _groups_on_nodes(
    problem: Problem, levels: Levels, limit: float, group_E: Tensor, divide: Divide
) -> Searched:
    """Divide experts over the ranks of several nodes, whole groups on each node.

    Swaps between nodes would split groups, and those within a node have been tried.
    """
    (num_ranks, _), (num_nodes, _) = levels
    by_group, node_limit = problem.merged(group_E), limit * (num_ranks // num_nodes)
    by_node = divide(by_group, num_nodes, node_limit)

    def found(node_G: Tensor, limit: float) -> _Candidate:
        rank_E = _within_nodes(problem, node_G[group_E], levels, limit, divide)
        return _Candidate.of(problem, levels, limit, rank_E)

    contiguous_E = contiguous(len(group_E), num_ranks)
    free = [
        found(by_node.free_E, torch.inf),
        _Candidate.of(problem, levels, torch.inf, contiguous_E),
    ]
    bounded = [found(by_node.rank_E, limit), _Candidate.of(problem, levels, limit, contiguous_E)]
    if _best(bounded).excess > 0:
        packings = (
            packed(by_group.load_U, num_nodes, node_limit),
            greedy(by_group.load_U, num_nodes),
        )
        bounded += [found(node_G, limit) for node_G in packings]
    return Searched(_best(bounded).part_U, _best(free).part_U)


def _within_nodes(
    problem: Problem, node_E: Tensor, levels: Levels, limit: float, divide: Divide
) -> Tensor:
    """Return (E,) the rank of each expert, given its node."""
    (num_ranks, _), (num_nodes, _) = levels
    rank_E, per_node = torch.empty_like(node_E), num_ranks // num_nodes
    for node in range(num_nodes):
        here_M = (node_E == node).nonzero()[:, 0]
        rank_M = divide(problem.among(here_M), per_node, limit).rank_E
        rank_E[here_M] = node * per_node + rank_M
    return rank_E


def _improved(
    problem: Problem,
    levels: Levels,
    limit: float,
    starts: Sequence[Tensor],
    bounded_starts: Callable[[], list[Tensor]] = list,
) -> Searched:
    """Improve divisions by swaps, first without a limit and then within it.

    Args:
        problem: what is divided.
        levels: what is counted.
        limit: bound on the load of a part, in assignments.
        starts: (U,) each, to start from.
        bounded_starts: makes further starts for the search within the limit.
    """
    judge = functools.partial(_Candidate.of, problem, levels, limit)
    contiguous_U = judge(contiguous(problem.num_units, levels[0][0]))
    improved = [improve(problem, start_U, levels, torch.inf) for start_U in starts]
    found = [judge(best_U) for best_U, _ in improved]
    free = min([*found, contiguous_U], key=_rows)
    if free.excess == 0:
        return Searched(free.part_U, free.part_U)
    packed_U = packed(problem.load_U, levels[0][0], limit)
    least = judge(packed_U).excess
    reachable = limit + least
    bounded = [*found, contiguous_U]
    # The search continues from where the search without a limit ended.
    for start_U in [*(last_U for _, last_U in improved), *bounded_starts()]:
        bounded.append(judge(improve(problem, start_U, levels, reachable)[0]))
    if _best(bounded).excess > least:
        bounded.append(judge(improve(problem, packed_U, levels, reachable)[0]))
    best = _best(bounded)
    return Searched(best.part_U, min(free, best, key=_rows).part_U)


def _enumerated(
    problem: Problem, levels: Levels, limit: float, group_U: Tensor | None = None
) -> Searched:
    """Return the best of all divisions, within the limit and without it."""
    rank_E, free_E = (
        enumeration.best(problem, levels, bound, group_U) for bound in (limit, torch.inf)
    )
    return Searched(rank_E, free_E)


@dataclass(frozen=True)
class _Candidate:
    """A division, the load of its busiest part beyond the limit, and its weighted rows."""

    part_U: Tensor
    excess: float
    rows: float

    @classmethod
    def of(cls, problem: Problem, levels: Levels, limit: float, part_U: Tensor) -> _Candidate:
        return cls(part_U, *cost_of(problem, part_U, levels, limit))


def _best(candidates: Sequence[_Candidate]) -> _Candidate:
    """Return the first of the candidates of the lowest cost."""
    return min(candidates, key=_cost)


def _cost(candidate: _Candidate) -> Cost:
    return candidate.excess, candidate.rows


def _rows(candidate: _Candidate) -> float:
    return candidate.rows
