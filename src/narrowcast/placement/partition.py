"""Simple divisions of the experts of one layer into equal parts: ranks, or nodes.

A token is sent once to each part that holds any of its experts. ``search`` starts from these
divisions and is compared with them. All of them return (E,) int64, the part of each expert, and
every part gets E / num_parts experts.

Sources: Occult (section 3.2, algorithm 1) and Expert Coupling (section V.A). Both maximize the
weight of the pairs of experts that share a part, which is a proxy: a token with three experts on
one part counts as three pairs, but saves two rows. With k = 2 the two are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.placement.problem import SMALLEST_GAIN


@dataclass(frozen=True)
class RoutedSets:
    """The distinct sets of experts that tokens selected.

    Attributes:
        ids_SK: (S, K) int64, the experts of each set, ascending.
        weight_S: (S,) int64, how many tokens selected each set.
        num_experts: E.
    """

    ids_SK: Tensor
    weight_S: Tensor
    num_experts: int

    @classmethod
    def of(cls, ids_TK: Tensor, num_experts: int) -> RoutedSets:
        """Return the sets of T tokens.

        Args:
            ids_TK: (T, K) experts of each token, all different within a row, in any order and of
                any integer dtype.
            num_experts: E.
        """
        ids_TK = ids_TK.long().sort(dim=1).values
        ids_SK, weight_S = torch.unique(ids_TK, dim=0, return_counts=True)
        return cls(ids_SK, weight_S, num_experts)

    @property
    def load_E(self) -> Tensor:
        """(E,) float64, tokens that selected each expert."""
        load_E = torch.zeros(self.num_experts, dtype=torch.float64)
        weight_SK = self.weight_S.double()[:, None].expand(self.ids_SK.shape)
        return load_E.index_add_(0, self.ids_SK.flatten(), weight_SK.flatten())

    @classmethod
    def from_coselection(cls, counts_EE: Tensor) -> RoutedSets:
        """Return the sets of a top-2 router, which (E, E) co-selection counts determine."""
        ids_SK = counts_EE.triu(diagonal=1).nonzero()
        return cls(ids_SK, counts_EE[ids_SK[:, 0], ids_SK[:, 1]].long(), len(counts_EE))


def rows_sent(sets: RoutedSets, part_E: Tensor) -> int:
    """Return the sum over all tokens of the distinct parts of their experts, given (E,) the part of
    each expert."""
    part_SK = part_E[sets.ids_SK].sort(dim=1).values
    distinct_S = (part_SK[:, 1:] != part_SK[:, :-1]).sum(dim=1) + 1
    return int((distinct_S * sets.weight_S).sum())


def contiguous(num_experts: int, num_parts: int) -> Tensor:
    """Return expert e on part e // (E / num_parts).

    Raises:
        ValueError: the experts do not divide evenly over the parts.
    """
    if num_parts < 1 or num_experts % num_parts:
        raise ValueError(
            f"{num_experts} experts do not divide evenly over {num_parts} parts: use a divisor"
        )
    return torch.arange(num_experts) // (num_experts // num_parts)


def random(num_experts: int, num_parts: int, seed: int) -> Tensor:
    """Return a division that is uniformly distributed, and a function of the seed."""
    order_E = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed))
    return contiguous(num_experts, num_parts)[order_E]


def occult(graph_EE: Tensor, num_parts: int) -> Tensor:
    """Return the division of algorithm 1 of Occult.

    Part 0 starts with the pair that collaborates most, every other part with the expert that
    collaborates least with all that are placed. Each part then takes the expert that collaborates
    most with its own, until it is full. Ties go to the lowest index. Two things differ from the
    printed algorithm. Its loop runs while len <= E / num_parts, which puts one expert too many on
    each part: here it is <. And if a part holds one expert, only the first of the pair is taken.

    Args:
        graph_EE: (E, E) the symmetric collaboration graph, of any scale.
        num_parts: number of parts.
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
    """Return the result of the local search of Expert Coupling (section V.A).

    It swaps the two experts that add the most weight to pairs that share a part (of equal swaps
    that of the lowest indices), until no swap adds any.

    Args:
        weight_EE: (E, E) symmetric weights of pairs; the diagonal is ignored.
        start_E: (E,) int64, the part of each expert at the start.
        num_parts: number of parts.
    """
    weight_EE = weight_EE.double().clone().fill_diagonal_(0)
    part_E = start_E.clone()
    weight_QE = (part_E == torch.arange(num_parts)[:, None]).double() @ weight_EE
    while True:
        # [b, a]: the weight that a gains by moving to the part of b, which b leaves.
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
