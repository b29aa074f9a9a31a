"""Searches that divide the experts of one layer into equal parts: the ranks or nodes they live on.

A token is sent once to each rank that holds some of its experts. `search` looks for the division
that sends the fewest rows; the others are what it starts from and is compared with. All return
(E,) int64, the part of each expert, and every part gets E / num_parts experts.

Sources: "Occult" (section 3.2, algorithm 1) and "Expert Coupling" (V.A). Both maximise the weight
of the pairs of experts that share a part. That is a proxy: of a token with three experts on a part
it counts three pairs and not two rows spared. With k = 2 the two are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import floor
from operator import itemgetter

import torch
from torch import Tensor

_POLISHED = 2  # starts of a search that are improved by rows
_PATIENCE = 20  # swaps in a row that may find nothing better, at most
_REST = 1 / 12  # how many swaps a swapped unit rests, as a share of all units
_SMALLEST_GAIN = 1e-6  # beyond rounding: costs are whole numbers, times a weight


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
        if gain_EE[a, b] < _SMALLEST_GAIN:
            return part_E
        moved_E = weight_EE[b] - weight_EE[a]
        weight_QE[part_E[a]] += moved_E
        weight_QE[part_E[b]] -= moved_E
        part_E[[a, b]] = part_E[[b, a]]


def search(
    sets: RoutedSets,
    num_ranks: int,
    *,
    num_nodes: int = 1,
    num_groups: int | None = None,
    cross_node_weight: float | None = None,
    max_load: float | None = None,
    restarts: int = 4,
    seed: int = 0,
) -> Tensor:
    """The rank of each expert, such that few rows are sent; ranks of a node are consecutive.

    Pairwise searches, from contiguous, from Occult's and from random divisions, give the starts.
    The best are improved by swaps that are judged by the rows themselves. With several nodes,
    experts are divided over nodes, then over the ranks of each; last come swaps across all.

    What is minimised is load beyond the bound, then the weighted sum of rows. By that measure the
    result is never worse than contiguous on `sets`.

    Args:
        sets: what tokens selected.
        num_ranks: R, a divisor of E.
        num_nodes: a divisor of R.
        num_groups: of a node-limited router: group g is the g-th run of E / num_groups experts.
            Where num_nodes divides it, groups stay whole on a node, and nodes come first whatever
            the weight. Elsewhere they are ignored.
        cross_node_weight: what a (token, node) costs, a (token, rank) costing 1. 0 ignores nodes.
            None: nodes first; ranks among divisions of equal cost there.
        max_load: the busiest rank's share of the expert rows, as a multiple of the mean, to stay
            below where swaps can reach that. It comes before rows.
        restarts: number of random divisions to start from.
        seed: of those. Equal arguments give equal results.

    Raises:
        ValueError: experts, ranks, nodes and groups do not divide evenly.
    """
    num_experts = sets.num_experts
    contiguous_E = contiguous(num_experts, num_ranks)
    if num_nodes < 1 or num_ranks % num_nodes:
        raise ValueError(
            f"{num_ranks} ranks do not divide evenly over {num_nodes} nodes: take a divisor"
        )
    if num_groups is not None and (num_groups < 1 or num_experts % num_groups):
        raise ValueError(
            f"{num_experts} experts do not divide evenly into {num_groups} groups: take a divisor"
        )
    problem = _Problem.of(sets)
    total = float(problem.load_U.sum())
    rank_load = None if max_load is None else max_load * total / num_ranks
    if num_nodes == 1:
        return _divide(problem, num_ranks, rank_load, restarts, seed)

    per_node = num_ranks // num_nodes
    node_load = None if rank_load is None else rank_load * per_node
    whole = num_groups is not None and num_groups % num_nodes == 0
    unit_E = contiguous(num_experts, num_groups) if whole else torch.arange(num_experts)
    node_U = _divide(problem.merged(unit_E), num_nodes, node_load, restarts, seed)
    node_E = node_U[unit_E]
    nested_E = torch.empty_like(node_E)
    for node in range(num_nodes):
        here_M = (node_E == node).nonzero()[:, 0]
        rank_M = _divide(problem.among(here_M), per_node, rank_load, restarts, seed)
        nested_E[here_M] = node * per_node + rank_M

    starts = [nested_E]
    if cross_node_weight is None:
        cross_node_weight = total + 1.0
    elif not whole:
        flat_E = _divide(problem, num_ranks, rank_load, restarts, seed)
        node_R = _divide(problem.merged(flat_E), num_nodes, None, restarts, seed)
        starts.append(node_R.argsort(stable=True).argsort()[flat_E])
    levels = ((num_ranks, 1.0), (num_nodes, cross_node_weight))
    searches = [_Swaps(problem, start_E, levels, rank_load) for start_E in starts]
    # Swaps between nodes would break up groups, and those within a node have been tried.
    found = [swaps.found() if whole else swaps.improve() for swaps in searches]
    found.append(_Swaps(problem, contiguous_E, levels, rank_load).found())
    return min(found, key=itemgetter(0))[1]


@dataclass(frozen=True)
class _Problem:
    """What is divided: U units (experts, groups of them, or all of a rank's) that sets hold."""

    hold_SU: Tensor  # 1 where a set holds a unit, in a dtype that counts all tokens exactly
    held_US: Tensor  # the same as bool
    weight_S: Tensor  # tokens of each set, in the same dtype
    load_U: Tensor  # assignments to each unit, float64

    @classmethod
    def of(cls, sets: RoutedSets) -> _Problem:
        exact = torch.float32 if sets.weight_S.sum() < 2**24 else torch.float64
        hold_SE = torch.zeros(len(sets.ids_SK), sets.num_experts, dtype=exact)
        hold_SE.scatter_(1, sets.ids_SK, 1)
        weight_S = sets.weight_S.to(exact)
        return cls._that_matter(hold_SE, weight_S, (weight_S @ hold_SE).double())

    def merged(self, unit_U: Tensor) -> _Problem:
        """With the units of equal `unit_U` (from 0, without gaps) as one."""
        onto_UV = (unit_U[:, None] == torch.arange(int(unit_U.max()) + 1)).to(self.hold_SU)
        hold_SV = (self.hold_SU @ onto_UV).clamp_(max=1)
        return self._that_matter(hold_SV, self.weight_S, self.load_U @ onto_UV.double())

    def among(self, units_M: Tensor) -> _Problem:
        """Of these units alone."""
        return self._that_matter(self.hold_SU[:, units_M], self.weight_S, self.load_U[units_M])

    @classmethod
    def _that_matter(cls, hold_SU: Tensor, weight_S: Tensor, load_U: Tensor) -> _Problem:
        """Without the sets of fewer than two units: they touch as many parts in any division."""
        matters_S = hold_SU.sum(dim=1) > 1
        hold_SU = hold_SU[matters_S]
        return cls(hold_SU, hold_SU.T.bool().contiguous(), weight_S[matters_S], load_U)


def _divide(
    problem: _Problem, num_parts: int, bound: float | None, restarts: int, seed: int
) -> Tensor:
    """(U,) the division that sends the fewest rows, no part's load beyond `bound` if possible."""
    num_units = len(problem.load_U)
    trivial_U = contiguous(num_units, num_parts)
    if num_parts in (1, num_units):
        return trivial_U
    graph_UU = (problem.hold_SU * problem.weight_S[:, None]).T @ problem.hold_SU
    starts = [trivial_U, occult(graph_UU, num_parts)]
    starts += [random(num_units, num_parts, seed + i) for i in range(restarts)]
    starts = [trivial_U, *(pairwise(graph_UU, start_U, num_parts) for start_U in starts)]
    searches = [_Swaps(problem, start_U, ((num_parts, 1.0),), bound) for start_U in starts]
    # Many end in the same division, or in one that differs in the numbers of its parts.
    distinct = {swaps.cost: swaps for swaps in reversed(searches)}
    found = [distinct[cost].improve() for cost in sorted(distinct)[:_POLISHED]]
    return min(found, key=itemgetter(0))[1]


class _Swaps:
    """A division that swaps of two units improve.

    `levels` are pairs: the number of parts, or a divisor of it (to which consecutive parts belong),
    and what a row to each costs there. The number of parts is the first, and load counts on it.
    """

    def __init__(self, problem: _Problem, part_U: Tensor, levels: tuple, bound: float | None):
        self.problem = problem
        num_parts = levels[0][0]
        self.levels = [(w, _Level(problem, part_U // (num_parts // q), q)) for q, w in levels]
        # Whole, so that sums and differences of loads are exact.
        self.bound = torch.inf if bound is None else floor(bound + 1e-6)
        self.load_Q = torch.zeros(num_parts, dtype=torch.float64)
        self.load_Q.index_add_(0, part_U, problem.load_U)

    @property
    def part_U(self) -> Tensor:
        return self.levels[0][1].part_U

    @property
    def cost(self) -> tuple[float, float]:
        """What is minimised: load beyond the bound, then the weighted sum of rows."""
        excess = float((self.load_Q - self.bound).clamp(min=0).sum())
        return excess, sum(weight * level.rows for weight, level in self.levels)

    def found(self) -> tuple[tuple[float, float], Tensor]:
        return self.cost, self.part_U.clone()

    def improve(self) -> tuple[tuple[float, float], Tensor]:
        """Take the best swap, time and again, and return the best that was seen.

        A swap is taken even where it makes things worse, and units just swapped rest for a while,
        so that the search climbs out of a local optimum (tabu search).
        """
        num_units = len(self.part_U)
        rested_U = torch.zeros(num_units, dtype=torch.int64)
        best, step, best_step = self.found(), 0, 0
        while step - best_step <= min(_PATIENCE, num_units):
            swap = self._best(rested_U <= step)
            if swap is None:
                break
            self._swap(*swap)
            step += 1
            rested_U[list(swap)] = step + 1 + int(_REST * num_units)
            excess, rows = self.cost
            if (excess, rows + _SMALLEST_GAIN) < best[0]:
                best, best_step = self.found(), step
        return best

    def _best(self, free_U: Tensor) -> tuple[int, int] | None:
        """The best swap of two free units, or None if there is no swap.

        While a part's load is beyond the bound: of the swaps that mend it, the one of the fewest
        rows for what it mends. Else the one of the fewest rows that does not break it.
        """
        part_U, load_U = self.part_U, self.problem.load_U
        cost_UU = sum(weight * level.swap_costs() for weight, level in self.levels)
        barred_UU = (part_U[:, None] == part_U) | ~(free_U[:, None] & free_U)
        if self.bound != torch.inf:
            after_UU = self.load_Q[part_U][:, None] - load_U[:, None] + load_U
            excess_UU = (after_UU - self.bound).clamp_(min=0)
            excess_UU -= (self.load_Q - self.bound).clamp(min=0)[part_U][:, None]
            excess_UU = (excess_UU + excess_UU.T).masked_fill_(barred_UU, torch.inf)
            mends_UU = excess_UU < 0
            if mends_UU.any():
                cost_UU = cost_UU / -excess_UU
                barred_UU = ~mends_UU
            else:
                barred_UU |= excess_UU > 0
        cost_UU.masked_fill_(barred_UU, torch.inf)
        a, b = divmod(int(cost_UU.argmin()), len(part_U))
        return None if barred_UU[a, b] else (a, b)

    def _swap(self, a: int, b: int) -> None:
        moved = self.problem.load_U[b] - self.problem.load_U[a]
        self.load_Q[self.part_U[a]] += moved
        self.load_Q[self.part_U[b]] -= moved
        sets = (self.problem.held_US[a] | self.problem.held_US[b]).nonzero()[:, 0]
        hold_SU = self.problem.hold_SU.index_select(0, sets)
        weight_S = self.problem.weight_S.index_select(0, sets)
        for _, level in self.levels:
            level.swap(a, b, hold_SU, weight_S)


class _Level:
    """How many rows one way of dividing sends, and what each swap would change.

    The costs follow from table_XU (U + Q, U), all of it sums over sets. Row a of the first U counts
    the tokens that hold a and each unit and have a alone on its part, row U + q those that hold
    each unit and touch part q.
    """

    def __init__(self, problem: _Problem, part_U: Tensor, num_parts: int):
        self.problem, self.part_U, self.parts_Q = problem, part_U, torch.arange(num_parts)
        on_UQ = (part_U[:, None] == self.parts_Q).to(problem.hold_SU)
        touch_Q = problem.weight_S @ (problem.hold_SU @ on_UQ > 0).to(on_UQ)
        self.rows = float(touch_Q.sum(dtype=torch.float64))

    @cached_property
    def table_XU(self) -> Tensor:
        hold_SU, weight_S = self.problem.hold_SU, self.problem.weight_S
        share_XS = _shares(hold_SU.T.contiguous(), weight_S, self.part_U, self.parts_Q)
        return (share_XS @ hold_SU).double()

    def swap_costs(self) -> Tensor:
        """(U, U) the rows that each swap would add."""
        num_units = len(self.part_U)
        alone_UU, touch_QU = self.table_XU[:num_units], self.table_XU[num_units:]
        # [b, a]: what moving a to the part of b adds. A row where its tokens go not yet, less one
        # where only a was; tokens of both are an exception, as b leaves that part.
        touch_UU = touch_QU.index_select(0, self.part_U)
        add_UU = touch_UU.diagonal() - touch_UU - alone_UU.diagonal() + alone_UU.T
        cost_UU = add_UU + add_UU.T
        return cost_UU.masked_fill_(self.part_U[:, None] == self.part_U, 0)

    def swap(self, a: int, b: int, hold_SU: Tensor, weight_S: Tensor) -> None:
        """Swap, given the sets that hold a or b: no other's share of the sums changes."""
        parts_N = self.part_U[[a, b]]
        if parts_N[0] == parts_N[1]:
            return
        units_M = torch.isin(self.part_U, parts_N).nonzero()[:, 0]
        hold_MS = hold_SU.index_select(1, units_M).T.contiguous()
        before_XS = _shares(hold_MS, weight_S, self.part_U[units_M], parts_N)
        self.part_U[[a, b]] = self.part_U[[b, a]]
        change_XS = _shares(hold_MS, weight_S, self.part_U[units_M], parts_N) - before_XS
        rows_X = torch.cat([units_M, len(self.part_U) + parts_N])
        self.table_XU[rows_X] += change_XS @ hold_SU
        self.rows += float(change_XS[len(units_M) :].sum(dtype=torch.float64))


def _shares(hold_MS: Tensor, weight_S: Tensor, part_M: Tensor, parts_N: Tensor) -> Tensor:
    """(M + N, S) the share of each set in the rows of the table of M units and of their N parts."""
    on_NM = parts_N[:, None] == part_M
    count_NS = on_NM.to(hold_MS) @ hold_MS
    alone_NS = (count_NS == 1) * weight_S
    alone_MS = hold_MS * alone_NS.index_select(0, on_NM.int().argmax(dim=0))
    return torch.cat([alone_MS, (count_NS > 0) * weight_S])
