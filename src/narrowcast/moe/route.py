"""The route of the tokens of a rank over one hop: how many rows go where, and which rows those are.

Pure steps, without communication: ``count_rows`` on the device, then, once the ranks have exchanged
their counts and the host has read them, ``hop_of_counts`` and ``plan_route``.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowcast.moe.brim import Assignments, Brim, build_brim
from narrowcast.moe.hop import Hop, Level
from narrowcast.moe.row_layout import RowLayout


@dataclass(frozen=True)
class Route:
    """A hop with its index maps.

    Attributes:
        hop: what it moves.
        brim: BRIM_0, from the T tokens before the hop to the S rows that they become.
        entry_TK: (T, K) int64, the entry of each assignment in the flat (S, J) probabilities and
            experts of the rows; S * J for an assignment without a row.
    """

    hop: Hop
    brim: Brim
    entry_TK: Tensor


def count_rows(
    assigned: Assignments, slot_TK: Tensor, num_slots: int, level: Level, is_faulty: Tensor
) -> Tensor:
    """Return what this rank reports to each block of a level.

    Args:
        assigned: the tokens, assigned to B blocks.
        slot_TK: (T, K) int64 slots of the tokens, ``num_slots`` for none.
        num_slots: slots of all blocks.
        level: where the tokens go.
        is_faulty: () bool, whether the routing of this rank is invalid.

    Returns:
        (B, 1 + ranks + 1) int64: rows, assignments to each rank of the block, and ``is_faulty``.
    """
    num_blocks = level.group.size()
    num_ranks = num_blocks * level.ranks
    rank_M = (slot_TK // (num_slots // num_ranks)).flatten()
    assignments = slot_TK.new_zeros(num_ranks + 1).scatter_add_(0, rank_M, torch.ones_like(rank_M))
    columns = (
        assigned.counts_B[:, None],
        assignments[:-1].view(num_blocks, level.ranks),
        is_faulty.long().expand(num_blocks, 1),
    )
    return torch.cat(columns, dim=1)


def is_any_faulty(counts: list[list[int]]) -> bool:
    """Whether any row of ``count_rows``, sent or received, reports invalid routing."""
    return any(row[-1] for row in counts)


def hop_of_counts(
    level: Level,
    layout: RowLayout,
    num_tokens: int,
    sent_counts: list[list[int]],
    received_counts: list[list[int]],
) -> Hop:
    """Return the hop of which ``count_rows`` reported ``sent_counts`` and the peers
    ``received_counts``, both (B, 1 + ranks + 1)."""
    return Hop(
        level,
        layout,
        num_tokens,
        sent=[row[0] for row in sent_counts],
        received=[row[0] for row in received_counts],
        assignments=sum(sum(row[1:-1]) for row in sent_counts),
        local_assignments=sent_counts[level.group.rank()][1 + level.rank_in_block],
        received_assignments=sum(sum(row[1:-1]) for row in received_counts),
    )


def plan_route(assigned: Assignments, hop: Hop) -> Route:
    """Return the route of assigned tokens over a hop."""
    num_blocks, max_experts = len(hop.sent), hop.layout.max_experts
    entry_TK = assigned.wide_NK * max_experts + assigned.ordinal_NK
    entry_TK = entry_TK.masked_fill_(assigned.block_NK == num_blocks, hop.rows * max_experts)
    # From the order of the blocks back to that of the router.
    entry_TK = torch.zeros_like(entry_TK).scatter_(1, assigned.order_NK, entry_TK)
    return Route(hop, build_brim(assigned, hop.rows), entry_TK)


def with_baseline(last: Route, first: Hop) -> Route:
    """Return the route over the last hop, which also knows the rows that expert parallelism without
    deduplication would send in the place of all hops."""
    hop = replace(
        last.hop,
        baseline_sent=first.assignments - first.local_assignments,
        baseline_received=last.hop.received_assignments - first.local_assignments,
    )
    return replace(last, hop=hop)


def to_rows(values_TK: Tensor, route: Route, fill: int) -> Tensor:
    """Return (S, J) the value of each assignment at its entry, and ``fill`` elsewhere. Values of
    assignments without a row are dropped."""
    num_rows, max_experts = route.hop.rows, route.hop.layout.max_experts
    values = values_TK.new_full((num_rows * max_experts + 1,), fill)
    values[route.entry_TK.flatten()] = values_TK.flatten()
    return values[:-1].view(num_rows, max_experts)


def from_rows(values_SJ: Tensor, entry_TK: Tensor) -> Tensor:
    """Return (T, K) the value at the entry of each assignment, and 0 for one without a row."""
    return torch.cat([values_SJ.flatten(), values_SJ.new_zeros(1)])[entry_TK]
