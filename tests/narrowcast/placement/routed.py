"""Made-up routing of tokens, and brute-force counts of its divisions, for the tests."""

from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor

from narrowcast.placement.partition import RoutedSets, random, rows_sent


def clustered(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Tensor:
    """(T, K) ids of tokens that prefer the experts of one of a few topics; loads are skewed."""
    generator = torch.Generator().manual_seed(seed)
    favours = torch.rand(10, num_experts, generator=generator) < 0.2
    popular = torch.randn(num_experts, generator=generator)
    topic_T = torch.randint(10, (num_tokens,), generator=generator)
    noise = -torch.log(-torch.log(torch.rand(num_tokens, num_experts, generator=generator)))
    return (2.5 * favours[topic_T] + 0.4 * popular + noise).topk(top_k, dim=1).indices


def planted(num_experts: int, block: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids of 500 tokens that stay within shuffled blocks of experts, and the block of each."""
    generator = torch.Generator().manual_seed(seed)
    block_E = random(num_experts, num_experts // block, seed)
    chosen_T = torch.randint(num_experts // block, (500,), generator=generator)
    score = torch.rand(500, num_experts, generator=generator) + (block_E == chosen_T[:, None])
    return score.topk(top_k, dim=1).indices, block_E


def divisions(experts: list[int], size: int) -> Iterator[list[tuple[int, ...]]]:
    """All ways to divide the experts into sets of ``size``."""
    if not experts:
        yield []
        return
    first, *others = experts
    for fellows in combinations(others, size - 1):
        left = [e for e in others if e not in fellows]
        yield from ([(first, *fellows), *rest] for rest in divisions(left, size))


def optimum(sets: RoutedSets, num_parts: int, max_load: float = torch.inf) -> int:
    """The fewest rows of any division, by trying all."""
    fewest = torch.inf
    for parts in divisions(list(range(sets.num_experts)), sets.num_experts // num_parts):
        part_E = torch.empty(sets.num_experts, dtype=torch.int64)
        for number, experts in enumerate(parts):
            part_E[list(experts)] = number
        if busiest(sets, part_E, num_parts) <= max_load:
            fewest = min(fewest, rows_sent(sets, part_E))
    return fewest


def swapped(part_E: Tensor, a: int, b: int) -> Tensor:
    part_E = part_E.clone()
    part_E[[a, b]] = part_E[[b, a]]
    return part_E


def sizes(part_E: Tensor, num_parts: int) -> list[int]:
    return torch.bincount(part_E, minlength=num_parts).tolist()


def busiest(sets: RoutedSets, part_E: Tensor, num_parts: int) -> float:
    """Load of the busiest part over the mean."""
    weight_SK = sets.weight_S[:, None].expand_as(sets.ids_SK).double()
    load_Q = torch.bincount(part_E[sets.ids_SK].reshape(-1), weight_SK.reshape(-1), num_parts)
    return float(load_Q.max() / load_Q.mean())


def coselection(ids_TK: Tensor, num_experts: int) -> Tensor:
    hold_TE = torch.zeros(len(ids_TK), num_experts, dtype=torch.float64).scatter_(1, ids_TK, 1)
    return (hold_TE.T @ hold_TE).fill_diagonal_(0)
