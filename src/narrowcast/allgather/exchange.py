"""Moves payloads of unequal size between the ranks of a group; raw and coded shards share it.

A slot is what every rank sends, as large as the largest payload that was announced. A payload that
does not fit sends its head alone, and since the heads say how large the bodies are, every rank sees
that a second round is due and how large. So a shard that changed behind our back on one rank costs
a round, and no rank ever waits for another that does not come.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def largest_sizes(sizes: list[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """The largest of each size over the ranks of the group, in one collective."""
    largest = torch.tensor(sizes, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def start_round(
    payload: Tensor, slot_size: int, group: dist.ProcessGroup, async_op: bool
) -> tuple[Tensor, dist.Work | None]:
    """Sends a payload, uint8, cut or padded to ``slot_size`` bytes.

    Returns:
        The slots of all ranks, uint8 of (W, slot_size), valid once the work is waited for.
    """
    slot = payload.new_zeros(slot_size)
    slot[: payload.numel()] = payload[:slot_size]
    slots = payload.new_empty(group.size() * slot_size)
    work = dist.all_gather_single(slots, slot, group=group, async_op=async_op)
    return slots.view(group.size(), slot_size), work
