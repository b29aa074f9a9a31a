"""What a placement search minimizes: the rows of a division, under a bound on the load of parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from narrowcast.placement.balance import part_loads

SMALLEST_GAIN = 1e-6
"""Exceeds rounding errors: costs are whole numbers, times a weight."""

Levels = tuple[tuple[int, float], ...]
"""What is counted: pairs of a number of parts and the cost of a row to one of them. The first pair
has the parts of the division, Q, whose load is bounded. The number of any other pair divides Q, and
its parts are consecutive parts of the division: nodes of ranks."""

Cost = tuple[float, float]
"""The load of the busiest part beyond the limit, and the weighted sum of rows: compared in this
order."""


@dataclass(frozen=True)
class Problem:
    """U units (experts, groups of experts, or all experts of a rank) and the S sets that hold them.

    Attributes:
        hold_SU: (S, U) 1 where a set holds a unit, else 0, in a dtype that counts all tokens
            exactly.
        weight_S: (S,) tokens of each set, in the same dtype.
        load_U: (U,) float64, assignments to each unit.
    """

    hold_SU: Tensor
    weight_S: Tensor
    load_U: Tensor

    @classmethod
    def of(cls, ids_SK: Tensor, weight_S: Tensor, load_E: Tensor) -> Problem:
        """Return the problem of sets of K experts.

        Args:
            ids_SK: (S, K) int64, the experts of each set.
            weight_S: (S,) tokens that selected each set.
            load_E: (E,) assignments to each expert, of these sets or of others.
        """
        exact = torch.float32 if weight_S.sum() < 2**24 else torch.float64
        hold_SE = torch.zeros(len(ids_SK), len(load_E), dtype=exact).scatter_(1, ids_SK, 1)
        return cls._without_trivial_sets(hold_SE, weight_S.to(exact), load_E.double())

    @classmethod
    def _without_trivial_sets(cls, hold_SU: Tensor, weight_S: Tensor, load_U: Tensor) -> Problem:
        """Drop the sets of fewer than two units, which reach as many parts in any division."""
        matters_S = hold_SU.sum(dim=1) > 1
        if matters_S.all():
            return cls(hold_SU, weight_S, load_U)
        return cls(hold_SU[matters_S], weight_S[matters_S], load_U)

    @property
    def num_units(self) -> int:
        """U."""
        return len(self.load_U)

    @cached_property
    def held_US(self) -> Tensor:
        """(U, S) bool, where a set holds a unit."""
        return self.hold_SU.T.bool().contiguous()

    @property
    def graph_UU(self) -> Tensor:
        """(U, U) the tokens that hold both of two units."""
        return (self.hold_SU * self.weight_S[:, None]).T @ self.hold_SU

    def merged(self, unit_U: Tensor) -> Problem:
        """Return the problem with the units of equal ``unit_U`` (from 0, without gaps) as one."""
        onto_UV = (unit_U[:, None] == torch.arange(int(unit_U.max()) + 1)).to(self.hold_SU)
        hold_SV = (self.hold_SU @ onto_UV).clamp_(max=1)
        load_V = self.load_U @ onto_UV.double()
        return self._without_trivial_sets(hold_SV, self.weight_S, load_V)

    def among(self, units_M: Tensor) -> Problem:
        """Return the problem of these units only."""
        hold_SM = self.hold_SU[:, units_M]
        return self._without_trivial_sets(hold_SM, self.weight_S, self.load_U[units_M])


def rows_to_parts(problem: Problem, part_U: Tensor, num_parts: int) -> float:
    """Return the rows that a division sends: the sum over all tokens of the parts that they reach.

    Args:
        problem: its trivial sets are not counted.
        part_U: (U,) int64, the part of each unit.
        num_parts: number of parts.
    """
    on_UQ = (part_U[:, None] == torch.arange(num_parts)).to(problem.hold_SU)
    reach_Q = problem.weight_S @ (problem.hold_SU @ on_UQ > 0).to(on_UQ)
    return float(reach_Q.sum(dtype=torch.float64))


def cost_of(problem: Problem, part_U: Tensor, levels: Levels, limit: float) -> Cost:
    """Return the cost of a division.

    Args:
        problem: what is divided.
        part_U: (U,) int64, the part of each unit.
        levels: what is counted.
        limit: bound on the load of a part, in assignments.
    """
    num_parts, _ = levels[0]
    rows = [
        weight * rows_to_parts(problem, part_U // (num_parts // parts), parts)
        for parts, weight in levels
    ]
    return excess(part_loads(problem.load_U, part_U, num_parts), limit), sum(rows)


def excess(load_Q: Tensor, limit: float) -> float:
    """Return the load of the busiest part beyond the limit; 0 if there is none."""
    return max(0.0, float(load_Q.max()) - limit)
