"""Moves payloads of unequal size between the ranks of a group; raw and coded shards share it.

A slot is what every rank sends, as large as the largest payload that was announced. A payload that
does not fit sends its head alone, and since the heads say how large the bodies are, every rank sees
that a second round is due and how large. So a shard that changed behind our back on one rank costs
a round, and no rank ever waits for another that does not come.
"""

from collections.abc import Callable, Iterator

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


def exchange(
    payload_for: Callable[[int], Tensor], group: dist.ProcessGroup
) -> Iterator[tuple[int, Tensor]]:
    """Sends every other rank of the group its own payload, and yields those that come from them.

    Sizes differ by pair and are known only once a payload is made, so each is announced right
    before it, and its receiver asks for exactly as much. While a payload travels the next is made,
    and while the last ones do, the first are there to be read.

    Args:
        payload_for: makes the payload, uint8, for a rank of the group. It must not raise: a peer
            would wait for ever.

    Yields:
        The sender's rank in the group, and its payload, in the order rank - 1, rank - 2, ...
    """
    rank, world_size = group.rank(), group.size()
    travelling = []
    for distance in range(1, world_size):
        peers = (rank + distance) % world_size, (rank - distance) % world_size
        payload = payload_for(peers[0])
        size = torch.tensor([payload.numel()], device=payload.device)
        their_size = torch.empty_like(size)
        for work in _start_swap(size, their_size, *peers, group):
            work.wait()
        theirs = payload.new_empty(int(their_size))
        works = _start_swap(payload, theirs, *peers, group)
        travelling.append((peers[1], theirs, works, payload))
    for sender, theirs, works, _ in travelling:
        for work in works:
            work.wait()
        yield sender, theirs


def _start_swap(
    ours: Tensor, theirs: Tensor, receiver: int, sender: int, group: dist.ProcessGroup
) -> list[dist.Work]:
    """Sends ``ours`` to one rank and receives ``theirs`` from another. Asks before it sends, since
    gloo loses half of a slow link otherwise."""
    ask = dist.P2POp(dist.irecv, theirs, group=group, group_peer=sender)
    send = dist.P2POp(dist.isend, ours, group=group, group_peer=receiver)
    return dist.batch_isend_irecv([ask, send])
