"""The best division of few experts, by trying all."""

from __future__ import annotations

from itertools import combinations
from math import factorial

import torch
from torch import Tensor

from narrowcast.placement.swaps import SMALLEST_GAIN, Levels, Problem

_MOST = 2**23  # divisions times parts times sets of units, that are counted


def can_be_tried(problem: Problem, levels: Levels) -> bool:
    """Whether there are so few divisions that all of them are tried."""
    num_parts, num_units = levels[0][0], len(problem.load_U)
    count, units = num_parts * max(len(problem.weight_S), 1), num_units
    for parts, _ in levels:
        count *= factorial(units) // factorial(units // parts) ** parts // factorial(parts)
        units = parts
    return count <= _MOST


def all_divisions(num_units: int, num_parts: int) -> Tensor:
    """(N, U) int64: the part of each unit, in every way to make equal parts of them.

    Parts are numbered by their first units, so that no two are alike. Contiguous is the first.
    """
    if num_parts == 1:
        return torch.zeros(1, num_units, dtype=torch.int64)
    rest_NV = all_divisions(num_units - num_units // num_parts, num_parts - 1) + 1
    found = []
    for fellows in combinations(range(1, num_units), num_units // num_parts - 1):
        part_NU = torch.zeros(len(rest_NV), num_units, dtype=torch.int64)
        others = torch.ones(num_units, dtype=torch.bool)
        others[[0, *fellows]] = False
        part_NU[:, others] = rest_NV
        found.append(part_NU)
    return torch.cat(found)


def best(problem: Problem, levels: Levels, limit: float, unit_U: Tensor | None = None) -> Tensor:
    """(U,) of all divisions that of the least load beyond the limit, and then of the fewest rows.

    Args:
        problem: of few units: see `can_be_tried`.
        levels: of one or two numbers of parts.
        limit: of a part's load.
        unit_U: units of equal number stay together on the second level.
    """
    num_parts = levels[0][0]
    part_NU = all_divisions(len(problem.load_U), num_parts)
    if len(levels) > 1:
        part_NU = _over_nodes(part_NU, num_parts, levels[1][0])
    if unit_U is not None:
        node_NU = part_NU // (num_parts // levels[1][0])
        split_NUU = (node_NU[:, :, None] != node_NU[:, None, :]) & (unit_U[:, None] == unit_U)
        part_NU = part_NU[~split_NUU.flatten(1).any(dim=1)]
    load_N = _on_parts(part_NU, num_parts, problem.load_U).amax(dim=1)
    excess_N = (load_N - limit).clamp_(min=0)
    part_NU = part_NU[excess_N == excess_N.min()]
    rows_N = torch.zeros(len(part_NU), dtype=torch.float64)
    for parts, weight in levels:
        rows_N += weight * _rows(problem, part_NU // (num_parts // parts), parts)
    # The first of those that are equal but for rounding.
    return part_NU[(rows_N < rows_N.min() + SMALLEST_GAIN).int().argmax()]


def _over_nodes(part_NU: Tensor, num_parts: int, num_nodes: int) -> Tensor:
    """Each division with its parts on the nodes in every way; those of a node are consecutive."""
    node_MQ = all_divisions(num_parts, num_nodes)
    number_MQ = node_MQ.argsort(dim=1, stable=True).argsort(dim=1)
    return number_MQ[:, part_NU].flatten(0, 1)


def _on_parts(part_NU: Tensor, num_parts: int, load_U: Tensor) -> Tensor:
    """(N, Q) the load of each part."""
    load_NQ = torch.zeros(len(part_NU), num_parts, dtype=torch.float64)
    return load_NQ.scatter_add_(1, part_NU, load_U.expand(part_NU.shape))


def _rows(problem: Problem, part_NU: Tensor, num_parts: int) -> Tensor:
    """(N,) float64: the rows that each division sends."""
    onto_UNQ = part_NU.T[:, :, None] == torch.arange(num_parts)
    touch_SX = problem.hold_SU @ onto_UNQ.flatten(1).to(problem.hold_SU) > 0
    rows_X = problem.weight_S @ touch_SX.to(problem.hold_SU)
    return rows_X.double().view(-1, num_parts).sum(dim=1)
