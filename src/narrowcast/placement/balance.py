"""Equal parts of experts whose busiest part has as little load as can be, whatever rows that costs.

Sources: DeepSeek's EPLB (`balanced_packing`) for the greedy packing; swaps and, where few experts
allow it, a branch and bound improve it.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from math import comb, floor, inf

import numpy as np
import torch
from torch import Tensor

_MOST_CHOICES = 10_000  # of a part, for which the branch and bound is tried
_MOST_WEIGHED = 2**21  # choices that it weighs


def part_loads(load_U: Tensor, part_U: Tensor, num_parts: int) -> Tensor:
    """(Q,) float64: the load of each part."""
    return torch.zeros(num_parts, dtype=torch.float64).index_add_(0, part_U, load_U.double())


def limit_of(load_U: Tensor, num_parts: int, max_load: float | None) -> float:
    """The most that a part may bear, as a whole number: so many times the mean."""
    if max_load is None or max_load == inf:
        return inf
    return floor(max_load * float(load_U.sum()) / num_parts + 1e-6)


def greedy(load_U: Tensor, num_parts: int) -> Tensor:
    """(U,) EPLB's: by descending load, each unit goes to the least loaded part that has room."""
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
    """(U,) a division whose busiest part is within `limit`, or as little beyond it as was found.

    Never worse than `greedy`. With up to 16 units it is the best there is.

    Args:
        load_U: whole numbers.
        num_parts: Q, which divides U.
        limit: of a part's load.
    """
    part_U = greedy(load_U, num_parts)
    size = len(load_U) // num_parts
    ascending_U = load_U.double().sort().values
    # No division has less than the mean, or than the largest unit with the smallest beside it.
    least = max(float(ascending_U.mean()) * size, float(ascending_U[[-1, *range(size - 1)]].sum()))
    enough = max(limit, least)
    part_U = _swapped(load_U, part_U, num_parts, enough)
    within = float(part_loads(load_U, part_U, num_parts).max()) <= enough
    if within or comb(len(load_U) - 1, size - 1) > _MOST_CHOICES:
        return part_U
    return _branch_and_bound(load_U, part_U, num_parts, enough)


def _swapped(load_U: Tensor, part_U: Tensor, num_parts: int, enough: float) -> Tensor:
    """With the swaps that lower the busiest part most, one after the other, until it has enough."""
    load_U = load_U.double()
    while True:
        load_Q = part_loads(load_U, part_U, num_parts)
        busiest = int(load_Q.argmax())
        if load_Q[busiest] <= enough:
            return part_U
        mine_M = (part_U == busiest).nonzero()[:, 0]
        moved_MU = load_U[mine_M][:, None] - load_U
        after_MU = torch.maximum(load_Q[busiest] - moved_MU, load_Q[part_U] + moved_MU)
        after_MU.masked_fill_(part_U == busiest, torch.inf)
        a, b = divmod(int(after_MU.argmin()), len(load_U))
        if after_MU[a, b] >= load_Q[busiest]:
            return part_U
        swap = [int(mine_M[a]), b]
        part_U[swap] = part_U[swap[::-1]]


def _branch_and_bound(load_U: Tensor, part_U: Tensor, num_parts: int, enough: float) -> Tensor:
    """Fills part after part, each with the largest unit left, and cuts what cannot be better."""
    order_U = load_U.argsort(descending=True, stable=True).numpy()
    size = len(order_U) // num_parts
    load = load_U.numpy().astype(np.float64)
    best = float(part_loads(load_U, part_U, num_parts).max())
    found, weighed = part_U.numpy().copy(), 0
    filled = np.empty_like(found)

    def fill(left: np.ndarray, part: int, busiest: float) -> None:
        nonlocal best, weighed
        if part == num_parts:
            best, found[:] = busiest, filled
            return
        fellows_CM = _choices(len(left) - 1, size - 1) + 1
        sums_C = load[left[0]] + load[left[fellows_CM]].sum(axis=1)
        weighed += len(sums_C)
        rest_C, parts_left = load[left].sum() - sums_C, num_parts - part - 1
        for choice in np.abs(sums_C - load[left].sum() / (parts_left + 1)).argsort(kind="stable"):
            if best <= enough or weighed > _MOST_WEIGHED:
                return
            if sums_C[choice] >= best or rest_C[choice] >= best * parts_left > 0:
                continue
            taken = np.zeros(len(left), dtype=bool)
            taken[[0, *fellows_CM[choice]]] = True
            filled[left[taken]] = part
            fill(left[~taken], part + 1, max(busiest, sums_C[choice]))

    fill(order_U, 0, 0.0)
    return torch.from_numpy(found)


@cache
def _choices(num_units: int, size: int) -> np.ndarray:
    """(C, size) all sets of so many of the units."""
    chosen = list(combinations(range(num_units), size))
    return np.array(chosen, dtype=np.int64).reshape(len(chosen), size)
