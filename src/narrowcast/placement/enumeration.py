"""Finds the best division of few experts by trying all of them."""

from __future__ import annotations

from itertools import combinations
from math import factorial

import torch
from torch import Tensor

from narrowcast.placement.problem import SMALLEST_GAIN, Levels, Problem

_MAX_COUNTED = 2**23  # divisions times parts times sets of units


def is_feasible(problem: Problem, levels: Levels) -> bool:
    """Return whether there are few enough divisions to try all of them."""
    num_parts, num_units = levels[0][0], problem.num_units
    count, units = num_parts * max(len(problem.weight_S), 1), num_units
    for parts, _ in levels:
        count *= factorial(units) // factorial(units // parts) ** parts // factorial(parts)
        units = parts
    return count <= _MAX_COUNTED


def all_divisions(num_units: int, num_parts: int) -> Tensor:
    """Return (N, U) int64 the part of each unit, for every way to divide units into equal parts.

    Parts are numbered by their first units, so that no two divisions are the same. The first one is
    contiguous.
    """
    if num_parts == 1:
        return torch.zeros(1, num_units, dtype=torch.int64)
    rest_NV = all_divisions(num_units - num_units // num_parts, num_parts - 1) + 1
    found = []
    for others in combinations(range(1, num_units), num_units // num_parts - 1):
        part_NU = torch.zeros(len(rest_NV), num_units, dtype=torch.int64)
        is_rest = torch.ones(num_units, dtype=torch.bool)
        is_rest[[0, *others]] = False
        part_NU[:, is_rest] = rest_NV
        found.append(part_NU)
    return torch.cat(found)


def best(problem: Problem, levels: Levels, limit: float, group_U: Tensor | None = None) -> Tensor:
    """Return (U,) the division with the least load beyond the limit, and of these the fewest rows.

    Args:
        problem: a problem of few units: see ``is_feasible``.
        levels: one or two levels.
        limit: bound on the load of a part, in assignments.
        group_U: (U,) units of equal group stay together on the second level; None for no groups.
    """
    num_parts = levels[0][0]
    part_NU = all_divisions(len(problem.load_U), num_parts)
    if len(levels) > 1:
        part_NU = _over_nodes(part_NU, num_parts, levels[1][0])
    if group_U is not None:
        node_NU = part_NU // (num_parts // levels[1][0])
        split_NUU = (node_NU[:, :, None] != node_NU[:, None, :]) & (group_U[:, None] == group_U)
        part_NU = part_NU[~split_NUU.flatten(1).any(dim=1)]
    load_N = _part_loads(part_NU, num_parts, problem.load_U).amax(dim=1)
    excess_N = (load_N - limit).clamp_(min=0)
    part_NU = part_NU[excess_N == excess_N.min()]
    rows_N = torch.zeros(len(part_NU), dtype=torch.float64)
    for parts, weight in levels:
        rows_N += weight * _rows(problem, part_NU // (num_parts // parts), parts)
    # The first of those that are equal up to rounding errors.
    return part_NU[(rows_N < rows_N.min() + SMALLEST_GAIN).int().argmax()]


def _over_nodes(part_NU: Tensor, num_parts: int, num_nodes: int) -> Tensor:
    """Return each division with its parts on the nodes in every way. Parts of a node are
    consecutive."""
    node_MQ = all_divisions(num_parts, num_nodes)
    number_MQ = node_MQ.argsort(dim=1, stable=True).argsort(dim=1)
    return number_MQ[:, part_NU].flatten(0, 1)


def _part_loads(part_NU: Tensor, num_parts: int, load_U: Tensor) -> Tensor:
    """Return (N, Q) the load of each part of each division."""
    load_NQ = torch.zeros(len(part_NU), num_parts, dtype=torch.float64)
    return load_NQ.scatter_add_(1, part_NU, load_U.expand(part_NU.shape))


def _rows(problem: Problem, part_NU: Tensor, num_parts: int) -> Tensor:
    """Return (N,) float64 the rows that each division sends."""
    onto_UNQ = part_NU.T[:, :, None] == torch.arange(num_parts)
    reach_SX = problem.hold_SU @ onto_UNQ.flatten(1).to(problem.hold_SU) > 0
    rows_X = problem.weight_S @ reach_SX.to(problem.hold_SU)
    return rows_X.double().view(-1, num_parts).sum(dim=1)
