"""Improves a division of experts by swaps of two, judged by the rows themselves.

What is minimised is, first, the largest load of a part beyond a limit, and then the weighted rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from narrowcast.placement.balance import part_loads

_PATIENCE = 20  # swaps in a row that may find nothing better, at most
_REST = 1 / 12  # how many swaps a swapped unit rests, as a share of all units
SMALLEST_GAIN = 1e-6  # beyond rounding: costs are whole numbers, times a weight

# The largest load beyond the limit, and the weighted sum of rows.
Cost = tuple[float, float]
# Pairs: the number of parts, or a divisor of it (to which consecutive parts belong), and what a row
# to each costs there. The number of parts is the first, and load counts on it.
Levels = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Problem:
    """What is divided: U units (experts, groups of them, or all of a rank's) that sets hold."""

    hold_SU: Tensor  # 1 where a set holds a unit, in a dtype that counts all tokens exactly
    weight_S: Tensor  # tokens of each set, in the same dtype
    load_U: Tensor  # assignments to each unit, float64

    @classmethod
    def of(cls, ids_SK: Tensor, weight_S: Tensor, load_E: Tensor) -> Problem:
        """Of sets of K experts, and of the load of each expert: of these sets, or of others."""
        exact = torch.float32 if weight_S.sum() < 2**24 else torch.float64
        hold_SE = torch.zeros(len(ids_SK), len(load_E), dtype=exact).scatter_(1, ids_SK, 1)
        return cls._that_matter(hold_SE, weight_S.to(exact), load_E.double())

    @cached_property
    def held_US(self) -> Tensor:
        """(U, S) bool, where a set holds a unit."""
        return self.hold_SU.T.bool().contiguous()

    @property
    def graph_UU(self) -> Tensor:
        """How many tokens hold both of two units."""
        return (self.hold_SU * self.weight_S[:, None]).T @ self.hold_SU

    def merged(self, unit_U: Tensor) -> Problem:
        """With the units of equal `unit_U` (from 0, without gaps) as one."""
        onto_UV = (unit_U[:, None] == torch.arange(int(unit_U.max()) + 1)).to(self.hold_SU)
        hold_SV = (self.hold_SU @ onto_UV).clamp_(max=1)
        return self._that_matter(hold_SV, self.weight_S, self.load_U @ onto_UV.double())

    def among(self, units_M: Tensor) -> Problem:
        """Of these units alone."""
        return self._that_matter(self.hold_SU[:, units_M], self.weight_S, self.load_U[units_M])

    @classmethod
    def _that_matter(cls, hold_SU: Tensor, weight_S: Tensor, load_U: Tensor) -> Problem:
        """Without the sets of fewer than two units: they touch as many parts in any division."""
        matters_S = hold_SU.sum(dim=1) > 1
        if matters_S.all():
            return cls(hold_SU, weight_S, load_U)
        return cls(hold_SU[matters_S], weight_S[matters_S], load_U)


@dataclass
class Division:
    """A division that swaps change, and what it sends and loads."""

    problem: Problem
    levels: list[tuple[float, _Rows]]
    load_Q: Tensor

    @classmethod
    def of(cls, problem: Problem, part_U: Tensor, levels: Levels) -> Division:
        num_parts = levels[0][0]
        rows = [(w, _Rows(problem, part_U // (num_parts // q), q)) for q, w in levels]
        return cls(problem, rows, part_loads(problem.load_U, part_U, num_parts))

    @property
    def part_U(self) -> Tensor:
        return self.levels[0][1].part_U

    def cost(self, limit: float) -> Cost:
        excess = max(0.0, float(self.load_Q.max()) - limit)
        return excess, sum(weight * rows.total for weight, rows in self.levels)

    def found(self, limit: float) -> tuple[Cost, Tensor]:
        return self.cost(limit), self.part_U.clone()

    def swap(self, a: int, b: int) -> None:
        """Let units a and b trade places."""
        moved = self.problem.load_U[b] - self.problem.load_U[a]
        self.load_Q[self.part_U[a]] += moved
        self.load_Q[self.part_U[b]] -= moved
        sets = (self.problem.held_US[a] | self.problem.held_US[b]).nonzero()[:, 0]
        hold_SU = self.problem.hold_SU.index_select(0, sets)
        weight_S = self.problem.weight_S.index_select(0, sets)
        for _, rows in self.levels:
            rows.swap(a, b, hold_SU, weight_S)


def improve(division: Division, limit: float) -> tuple[Cost, Tensor]:
    """Take the best swap, time and again, and return the best that was seen.

    A swap is taken even where it makes things worse, and units just swapped rest for a while, so
    that the search climbs out of a local optimum (tabu search).
    """
    num_units = len(division.part_U)
    rested_U = torch.zeros(num_units, dtype=torch.int64)
    best, step, best_step = division.found(limit), 0, 0
    least_beyond = _beyond(division, limit)
    while step - best_step <= min(_PATIENCE, num_units):
        swap = best_swap(division, limit, rested_U <= step)
        if swap is None:
            break
        division.swap(*swap)
        step += 1
        rested_U[list(swap)] = step + 1 + int(_REST * num_units)
        excess, rows = division.cost(limit)
        if (excess, rows + SMALLEST_GAIN) < best[0]:
            best, best_step = division.found(limit), step
        beyond = _beyond(division, limit)
        if beyond < least_beyond:
            least_beyond, best_step = beyond, step
    return best


def best_swap(division: Division, limit: float, free_U: Tensor) -> tuple[int, int] | None:
    """The best swap of two free units, or None if there is no swap.

    While a part's load is beyond the limit: of the swaps that mend it, the one of the fewest rows
    for what it mends. Else the one of the fewest rows that does not break it.
    """
    part_U = division.part_U
    cost_UU = sum(weight * rows.swap_costs() for weight, rows in division.levels)
    barred_UU = (part_U[:, None] == part_U) | ~(free_U[:, None] & free_U)
    if limit < torch.inf:
        load_U, load_Q = division.problem.load_U, division.load_Q
        # [a, b]: the load of a's part where b takes a's place.
        after_UU = (load_Q[part_U] - load_U)[:, None] + load_U
        if load_Q.max() > limit:
            beyond_U = (load_Q - limit).clamp(min=0)[part_U]
            change_UU = (after_UU - limit).clamp_(min=0) - beyond_U[:, None]
            change_UU = change_UU + change_UU.T
            mends_UU = (change_UU < 0) & ~barred_UU
            if mends_UU.any():
                cost_UU = cost_UU / -change_UU
                barred_UU = ~mends_UU
            else:
                barred_UU |= change_UU > 0
        else:
            breaks_UU = after_UU > limit
            barred_UU |= breaks_UU | breaks_UU.T
    cost_UU.masked_fill_(barred_UU, torch.inf)
    a, b = divmod(int(cost_UU.argmin()), len(part_U))
    return None if barred_UU[a, b] else (a, b)


def _beyond(division: Division, limit: float) -> float:
    """The load beyond the limit, of all parts."""
    return float((division.load_Q - limit).clamp(min=0).sum())


class _Rows:
    """How many rows one way of dividing sends, and what each swap would change.

    The costs follow from table_XU (U + Q, U), all of it sums over sets. Row a of the first U counts
    the tokens that hold a and each unit and have a alone on its part, row U + q those that hold
    each unit and touch part q.
    """

    def __init__(self, problem: Problem, part_U: Tensor, num_parts: int):
        self.problem, self.part_U, self.parts_Q = problem, part_U, torch.arange(num_parts)
        on_UQ = (part_U[:, None] == self.parts_Q).to(problem.hold_SU)
        touch_Q = problem.weight_S @ (problem.hold_SU @ on_UQ > 0).to(on_UQ)
        self.total = float(touch_Q.sum(dtype=torch.float64))

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
        self.total += float(change_XS[len(units_M) :].sum(dtype=torch.float64))


def _shares(hold_MS: Tensor, weight_S: Tensor, part_M: Tensor, parts_N: Tensor) -> Tensor:
    """(M + N, S) the share of each set in the rows of the table of M units and of their N parts."""
    on_NM = parts_N[:, None] == part_M
    count_NS = on_NM.to(hold_MS) @ hold_MS
    alone_NS = (count_NS == 1) * weight_S
    alone_MS = hold_MS * alone_NS.index_select(0, on_NM.int().argmax(dim=0))
    return torch.cat([alone_MS, (count_NS > 0) * weight_S])
