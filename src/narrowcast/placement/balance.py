"""Divides experts into equal parts by load alone: the busiest part gets the least load.

Source: DeepSeek's EPLB (``balanced_packing``) for the greedy packing. Swaps improve it and, where
there are few experts, branch and bound.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from math import comb, floor, inf

import numpy as np
import torch
from torch import Tensor

_MAX_CHOICES = 10_000  # sets of units that may fill a part, up to which branch and bound is tried
_MAX_EVALUATED = 2**21  # such sets that it evaluates


def part_loads(load_U: Tensor, part_U: Tensor, num_parts: int) -> Tensor:
    """Return (Q,) float64 the load of each part, given (U,) the load and the part of each unit."""
    return torch.zeros(num_parts, dtype=torch.float64).index_add_(0, part_U, load_U.double())


def limit_of(load_U: Tensor, num_parts: int, max_load: float | None) -> float:
    """Return the largest load of a part, a whole number, within ``max_load`` times the mean."""
    if max_load is None or max_load == inf:
        return inf
    return floor(max_load * float(load_U.sum()) / num_parts + 1e-6)


def greedy(load_U: Tensor, num_parts: int) -> Tensor:
    """Return (U,) int64 the packing of EPLB: by descending load, each unit goes to the least loaded
    part that has room."""
    part_U = torch.empty(len(load_U), dtype=torch.int64)
    load_Q = torch.zeros(num_parts, dtype=torch.float64)
    room_Q = torch.full((num_parts,), len(load_U) // num_parts)
    for unit in load_U.argsort(descending=True, stable=True).tolist():
        part = int(load_Q.masked_fill(room_Q == 0, torch.inf).argmin())
        part_U[unit] = part
        load_Q[part] += load_U[unit]
        room_Q[part] -= 1
    return part_U


def packed(load_U: Tensor, num_parts: int, limit: float) -> Tensor:
    """Return (U,) int64 a division whose busiest part is within the limit, or as little beyond it
    as was found.

    It is never worse than ``greedy``. With up to 16 units it is optimal.

    Args:
        load_U: (U,) whole numbers, the load of each unit.
        num_parts: Q, which divides U.
        limit: bound on the load of a part.
    """
    part_U = greedy(load_U, num_parts)
    size = len(load_U) // num_parts
    ascending_U = load_U.double().sort().values
    # A lower bound: the mean, and the part of the largest unit filled up with the smallest.
    least = max(float(ascending_U.mean()) * size, float(ascending_U[[-1, *range(size - 1)]].sum()))
    enough = max(limit, least)
    part_U = _swapped(load_U, part_U, num_parts, enough)
    within = float(part_loads(load_U, part_U, num_parts).max()) <= enough
    if within or comb(len(load_U) - 1, size - 1) > _MAX_CHOICES:
        return part_U
    return _branch_and_bound(load_U, part_U, num_parts, enough)


def _swapped(load_U: Tensor, part_U: Tensor, num_parts: int, enough: float) -> Tensor:
    """Return the division after the swaps that lower the load of the busiest part most, one after
    the other, until it is at most ``enough``."""
    load_U = load_U.double()
    while True:
        load_Q = part_loads(load_U, part_U, num_parts)
        busiest = int(load_Q.argmax())
        if load_Q[busiest] <= enough:
            return part_U
        local_M = (part_U == busiest).nonzero()[:, 0]
        moved_MU = load_U[local_M][:, None] - load_U
        after_MU = torch.maximum(load_Q[busiest] - moved_MU, load_Q[part_U] + moved_MU)
        after_MU.masked_fill_(part_U == busiest, torch.inf)
        a, b = divmod(int(after_MU.argmin()), len(load_U))
        if after_MU[a, b] >= load_Q[busiest]:
            return part_U
        swap = [int(local_M[a]), b]
        part_U[swap] = part_U[swap[::-1]]


def _branch_and_bound(load_U: Tensor, part_U: Tensor, num_parts: int, enough: float) -> Tensor:
    """Return the best division that is found by filling part after part, each with the largest unit
    left, and skipping what cannot be better."""
    order_U = load_U.argsort(descending=True, stable=True).numpy()
    size = len(order_U) // num_parts
    load = load_U.numpy().astype(np.float64)
    best = float(part_loads(load_U, part_U, num_parts).max())
    found, evaluated = part_U.numpy().copy(), 0
    filled = np.empty_like(found)

    def fill(left: np.ndarray, part: int, busiest: float) -> None:
        nonlocal best, evaluated
        if part == num_parts:
            best, found[:] = busiest, filled
            return
        others_CM = _choices(len(left) - 1, size - 1) + 1
        sums_C = load[left[0]] + load[left[others_CM]].sum(axis=1)
        evaluated += len(sums_C)
        rest_C, parts_left = load[left].sum() - sums_C, num_parts - part - 1
        for choice in np.abs(sums_C - load[left].sum() / (parts_left + 1)).argsort(kind="stable"):
            if best <= enough or evaluated > _MAX_EVALUATED:
                return
            if sums_C[choice] >= best or rest_C[choice] >= best * parts_left > 0:
                continue
            taken = np.zeros(len(left), dtype=bool)
            taken[[0, *others_CM[choice]]] = True
            filled[left[taken]] = part
            fill(left[~taken], part + 1, max(busiest, sums_C[choice]))

    fill(order_U, 0, 0.0)
    return torch.from_numpy(found)


@cache
def _choices(num_units: int, size: int) -> np.ndarray:
    """Return (C, size) int64 all sets of ``size`` units."""
    chosen = list(combinations(range(num_units), size))
    return np.array(chosen, dtype=np.int64).reshape(len(chosen), size)
