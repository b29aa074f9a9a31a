"""Improves a division of experts by swaps of two units: a tabu search on the rows themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.placement.balance import part_loads
from narrowcast.placement.problem import (
    SMALLEST_GAIN,
    Cost,
    Levels,
    Problem,
    excess,
    rows_to_parts,
)

_PATIENCE = 20  # the most swaps in a row that find nothing better
_TABU_SHARE = 1 / 12  # for how many swaps a swapped unit stays, as a share of all units


def improve(
    problem: Problem, start_U: Tensor, levels: Levels, limit: float
) -> tuple[Tensor, Tensor]:
    """Apply the best swap repeatedly.

    A swap is applied even if it increases the cost, and a unit that was swapped stays where it is
    for a while, so that the search leaves a local optimum.

    Args:
        problem: what is divided.
        start_U: (U,) int64, the part of each unit at the start.
        levels: what is counted.
        limit: bound on the load of a part, in assignments.

    Returns:
        (U,) the division of the lowest cost, and (U,) the last one.
    """
    division = Division.of(problem, start_U, levels)
    num_units = problem.num_units
    free_from_U = torch.zeros(num_units, dtype=torch.int64)
    best_U, best_cost = start_U, division.cost(limit)
    least_excess = _total_excess(division, limit)
    step = best_step = 0
    while step - best_step <= min(_PATIENCE, num_units):
        swap = best_swap(division, limit, free_from_U <= step)
        if swap is None:
            break
        division.swap(*swap)
        step += 1
        free_from_U[list(swap)] = step + 1 + int(_TABU_SHARE * num_units)
        busiest, rows = division.cost(limit)
        if (busiest, rows + SMALLEST_GAIN) < best_cost:
            best_U, best_cost, best_step = division.part_U.clone(), (busiest, rows), step
        total = _total_excess(division, limit)
        if total < least_excess:
            least_excess, best_step = total, step
    return best_U, division.part_U


def best_swap(division: Division, limit: float, free_U: Tensor) -> tuple[int, int] | None:
    """Return the best swap of two free units, or None if there is none.

    If swaps can reduce the load beyond the limit, the best is the one with the fewest rows for each
    assignment by which it does. Otherwise it is the one with the fewest rows that does not increase
    the load beyond the limit.

    Args:
        division: the current division.
        limit: bound on the load of a part, in assignments.
        free_U: (U,) bool, the units that may be swapped.
    """
    part_U = division.part_U
    cost_UU = division.swap_costs()
    is_barred_UU = (part_U[:, None] == part_U) | ~(free_U[:, None] & free_U)
    if limit < torch.inf:
        change_UU = _excess_changes(division.problem.load_U, division.load_Q, part_U, limit)
        reduces_UU = (change_UU < 0) & ~is_barred_UU
        if reduces_UU.any():
            cost_UU = cost_UU / -change_UU
            is_barred_UU = ~reduces_UU
        else:
            is_barred_UU |= change_UU > 0
    cost_UU.masked_fill_(is_barred_UU, torch.inf)
    a, b = divmod(int(cost_UU.argmin()), len(part_U))
    return None if is_barred_UU[a, b] else (a, b)


def _excess_changes(load_U: Tensor, load_Q: Tensor, part_U: Tensor, limit: float) -> Tensor:
    """Return (U, U) what each swap adds to the load beyond the limit, of both parts together."""
    # [a, b]: the load of the part of a, once b has replaced a.
    after_UU = (load_Q[part_U] - load_U)[:, None] + load_U
    before_U = (load_Q - limit).clamp(min=0)[part_U]
    change_UU = (after_UU - limit).clamp_(min=0) - before_U[:, None]
    return change_UU + change_UU.T


def _total_excess(division: Division, limit: float) -> float:
    """Return the load beyond the limit, summed over all parts."""
    return float((division.load_Q - limit).clamp(min=0).sum())


@dataclass
class Division:
    """A division that swaps change in place, with what each swap would cost.

    Attributes:
        problem: what is divided.
        levels: what is counted.
        parts: for each level, (U,) int64, the part of each unit.
        tables: for each level, (U + Q, U) float64, from which ``swap_costs`` follow. Row a of the
            first U counts the tokens that hold both a and each unit, and no other unit on the part
            of a. Row U + q counts the tokens that hold each unit and reach part q.
        rows: for each level, the rows that are sent.
        load_Q: (Q,) float64, assignments to each part of the first level.
    """

    problem: Problem
    levels: Levels
    parts: list[Tensor]
    tables: list[Tensor]
    rows: list[float]
    load_Q: Tensor

    @classmethod
    def of(cls, problem: Problem, part_U: Tensor, levels: Levels) -> Division:
        """Return a division of units, given the part of each on the first level."""
        num_parts, _ = levels[0]
        parts = [part_U // (num_parts // number) for number, _ in levels]
        counted = [(of_U, number) for of_U, (number, _) in zip(parts, levels, strict=True)]
        return cls(
            problem,
            levels,
            parts,
            tables=[swap_table(problem, of_U, number) for of_U, number in counted],
            rows=[rows_to_parts(problem, of_U, number) for of_U, number in counted],
            load_Q=part_loads(problem.load_U, part_U, num_parts),
        )

    @property
    def part_U(self) -> Tensor:
        """(U,) the part of each unit on the first level."""
        return self.parts[0]

    def cost(self, limit: float) -> Cost:
        """Return the cost of the division as it is."""
        weighted = (weight * rows for (_, weight), rows in zip(self.levels, self.rows, strict=True))
        return excess(self.load_Q, limit), sum(weighted)

    def swap_costs(self) -> Tensor:
        """Return (U, U) the weighted rows that each swap would add."""
        levels = zip(self.levels, self.tables, self.parts, strict=True)
        return sum(weight * swap_costs(table_XU, of_U) for (_, weight), table_XU, of_U in levels)

    def swap(self, a: int, b: int) -> None:
        """Exchange the parts of units a and b."""
        problem = self.problem
        moved = problem.load_U[b] - problem.load_U[a]
        self.load_Q[self.part_U[a]] += moved
        self.load_Q[self.part_U[b]] -= moved
        # The sets that hold neither contribute to every entry what they did before.
        sets = (problem.held_US[a] | problem.held_US[b]).nonzero()[:, 0]
        hold_SU = problem.hold_SU.index_select(0, sets)
        weight_S = problem.weight_S.index_select(0, sets)
        for level, (table_XU, part_U) in enumerate(zip(self.tables, self.parts, strict=True)):
            self.rows[level] += update_for_swap(table_XU, part_U, a, b, hold_SU, weight_S)


def swap_table(problem: Problem, part_U: Tensor, num_parts: int) -> Tensor:
    """Return (U + Q, U) the table of a level, as in ``Division``, given the part of each unit."""
    hold_US = problem.hold_SU.T.contiguous()
    share_XS = _shares(hold_US, problem.weight_S, part_U, torch.arange(num_parts))
    return (share_XS @ problem.hold_SU).double()


def swap_costs(table_XU: Tensor, part_U: Tensor) -> Tensor:
    """Return (U, U) the rows that each swap would add on one level.

    Args:
        table_XU: (U + Q, U) the table of the level.
        part_U: (U,) the part of each unit on it.
    """
    num_units = len(part_U)
    alone_UU, reach_QU = table_XU[:num_units], table_XU[num_units:]
    # [b, a]: the rows that moving a to the part of b adds. One for each token of a that does not
    # yet reach that part, less one for each token that has only a on its part, except for the
    # tokens that hold b too, since b moves there.
    reach_UU = reach_QU.index_select(0, part_U)
    add_UU = reach_UU.diagonal() - reach_UU - alone_UU.diagonal() + alone_UU.T
    cost_UU = add_UU + add_UU.T
    return cost_UU.masked_fill_(part_U[:, None] == part_U, 0)


def update_for_swap(
    table_XU: Tensor, part_U: Tensor, a: int, b: int, hold_SU: Tensor, weight_S: Tensor
) -> float:
    """Swap units a and b on one level, in place.

    Args:
        table_XU: (U + Q, U) the table of the level, which is updated.
        part_U: (U,) the part of each unit on it, which is updated.
        a, b: the units.
        hold_SU, weight_S: the sets that hold a or b, as in ``Problem``.

    Returns:
        The rows that the swap adds.
    """
    parts_N = part_U[[a, b]]
    if parts_N[0] == parts_N[1]:
        return 0.0
    units_M = torch.isin(part_U, parts_N).nonzero()[:, 0]
    hold_MS = hold_SU.index_select(1, units_M).T.contiguous()
    before_XS = _shares(hold_MS, weight_S, part_U[units_M], parts_N)
    part_U[[a, b]] = part_U[[b, a]]
    change_XS = _shares(hold_MS, weight_S, part_U[units_M], parts_N) - before_XS
    rows_X = torch.cat([units_M, len(part_U) + parts_N])
    table_XU[rows_X] += change_XS @ hold_SU
    return float(change_XS[len(units_M) :].sum(dtype=torch.float64))


def _shares(hold_MS: Tensor, weight_S: Tensor, part_M: Tensor, parts_N: Tensor) -> Tensor:
    """Return (M + N, S) the tokens that each set adds to the rows of M units and of their N parts.

    A set adds its tokens to the row of a unit that it holds if it holds no other unit on the part,
    and to the row of a part if it reaches it.
    """
    on_NM = parts_N[:, None] == part_M
    count_NS = on_NM.to(hold_MS) @ hold_MS
    alone_NS = (count_NS == 1) * weight_S
    alone_MS = hold_MS * alone_NS.index_select(0, on_NM.int().argmax(dim=0))
    return torch.cat([alone_MS, (count_NS > 0) * weight_S])
