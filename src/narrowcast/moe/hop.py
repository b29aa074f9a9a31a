"""Where tokens are sent: the levels of a dispatch, and what one hop of it moves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from narrowcast.moe.row_layout import RowLayout

Counter = Callable[[str, int, int, int], None]
"""Is called with "dispatch" or "combine", the rows and the bytes that this rank sends to others,
and the bytes that expert parallelism without deduplication would send for the same tokens."""


def count_nothing(collective: str, rows: int, sent_bytes: int, baseline_bytes: int) -> None:
    """A ``Counter`` that ignores its arguments."""


@dataclass(frozen=True)
class Level:
    """Where one hop of a dispatch goes.

    Attributes:
        group: process group whose ranks each stand for an equal and consecutive share of the
            slots, called a block.
        ranks: expert-parallel ranks of each block, to which a later level forwards its tokens; 1 at
            the last level.
        rank_in_block: index of this rank among them.
    """

    group: dist.ProcessGroup
    ranks: int = 1
    rank_in_block: int = 0


def one_level(group: dist.ProcessGroup) -> tuple[Level, ...]:
    """Tokens are sent from rank to rank of an expert-parallel group."""
    return (Level(group),)


def two_levels(group: dist.ProcessGroup, num_nodes: int) -> tuple[Level, ...]:
    """Tokens are sent to nodes first, then to the ranks of each. Every rank of the job must call
    this.

    Args:
        group: the expert-parallel group of this rank. Consecutive ranks of it are on one node.
        num_nodes: number of nodes that the group spans.

    Raises:
        ValueError: the ranks of the group do not divide over the nodes.
    """
    size = group.size()
    if size % num_nodes:
        raise ValueError(f"{size} expert-parallel ranks do not divide over {num_nodes} nodes")
    members: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(members, dist.get_process_group_ranks(group))
    per_node = size // num_nodes
    local: list[dist.ProcessGroup] = []
    # ``new_group`` is collective: every rank of the job creates every group, in one order.
    for ranks in sorted({tuple(ranks) for ranks in members}):
        across = [ranks[i::per_node] for i in range(per_node)]
        within = [ranks[i : i + per_node] for i in range(0, size, per_node)]
        created = [(part, dist.new_group(list(part))) for part in (*across, *within)]
        local += [subgroup for part, subgroup in created if dist.get_rank() in part]
    across_group, within_group = local
    return Level(across_group, per_node, within_group.rank()), Level(within_group)


@dataclass(frozen=True)
class Hop:
    """What one level of a dispatch moves, in numbers that the host knows.

    Attributes:
        level: where it goes.
        layout: layout of a row of its message.
        tokens: T, the tokens of this rank before the hop.
        sent, received: rows to and from each rank of the group, this rank included.
        assignments: (token, expert) pairs before the hop.
        local_assignments: how many of them have their expert on this rank.
        received_assignments: (row, expert) pairs that arrive.
        baseline_sent, baseline_received: rows that expert parallelism without deduplication would
            send to and receive from other ranks. They are 0 except at the last level.
    """

    level: Level
    layout: RowLayout
    tokens: int
    sent: list[int]
    received: list[int]
    assignments: int
    local_assignments: int
    received_assignments: int
    baseline_sent: int = 0
    baseline_received: int = 0

    @property
    def rows(self) -> int:
        """S, the rows that the tokens of this rank become, its rows to itself included."""
        return sum(self.sent)

    @property
    def rows_sent(self) -> int:
        """Rows that this rank sends to other ranks."""
        return self.rows - self.sent[self.level.group.rank()]

    @property
    def rows_received(self) -> int:
        """Rows that this rank receives from other ranks."""
        return sum(self.received) - self.received[self.level.group.rank()]

    def count_to_experts(self, count: Counter, collective: str, row_bytes: int) -> None:
        """Count rows that are sent from the ranks of the tokens to those of their experts."""
        baseline_bytes = self.baseline_sent * self.layout.token_nbytes
        count(collective, self.rows_sent, self.rows_sent * row_bytes, baseline_bytes)

    def count_to_tokens(self, count: Counter, collective: str, row_bytes: int) -> None:
        """Count rows that are sent from the ranks of the experts back to those of the tokens."""
        baseline_bytes = self.baseline_received * self.layout.token_nbytes
        count(collective, self.rows_received, self.rows_received * row_bytes, baseline_bytes)
