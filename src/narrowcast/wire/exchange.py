"""Moves payloads of unequal size between the ranks of a group; raw and coded shards share it.

A buffer is what every rank sends, as large as the largest payload that was announced. Of a payload
that does not fit, the buffer holds the header and as much as fits, and since the headers say how
large the bodies are, every rank sees that a second round is due and how large: it sends all bodies
again, whole. So a shard that changed behind our back on one rank costs the buffer and a round, and
no rank ever waits for another that does not come.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor


def largest_sizes(
    sizes: list[int],
    group: dist.ProcessGroup,
    device: torch.device,
    wait: Callable[[dist.Work], object] = dist.Work.wait,
) -> list[int]:
    """The largest of each size over the ranks of the group, in one collective."""
    largest = torch.tensor(sizes, dtype=torch.int64, device=device)
    wait(dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True))
    return largest.tolist()


def send_buffer(payload: Tensor, padded_size: int) -> Tensor:
    """What is sent of a payload, uint8, in one round: cut or padded to ``padded_size`` bytes."""
    buffer = payload.new_zeros(padded_size)
    buffer[: payload.numel()] = payload[:padded_size]
    return buffer


def start_round(
    payload: Tensor, padded_size: int, group: dist.ProcessGroup, async_op: bool
) -> tuple[Tensor, dist.Work | None]:
    """Sends a payload, uint8, cut or padded to ``padded_size`` bytes.

    Returns:
        The buffers of all ranks, uint8 of (W, padded_size), valid once the work is waited for.
    """
    buffer = send_buffer(payload, padded_size)
    buffers = payload.new_empty(group.size() * padded_size)
    work = dist.all_gather_single(buffers, buffer, group=group, async_op=async_op)
    return buffers.view(group.size(), padded_size), work


def exchange(
    payload_for: Callable[[int], Tensor], group: dist.ProcessGroup
) -> Iterator[tuple[int, Tensor]]:
    """Swaps payloads with every other rank of the group, one after the other.

    Sizes differ by pair and are known only once a payload is made, so each is announced right
    before it, and its receiver asks for exactly as much. While a swap is under way, what came by
    the one before can be read, and the payload of the next is made: no more than four payloads
    exist at once, if the caller keeps none.

    Args:
        payload_for: makes the payload, uint8, for a rank of the group. It must not raise: the other
            would wait for ever.

    Yields:
        A rank of the group, and the payload that came from it.
    """
    under_way: tuple[int, Tensor, list[dist.Work], Tensor] | None = None
    for partner in pairwise_schedule(group.rank(), group.size()):
        ours = payload_for(partner)
        size = torch.tensor([ours.numel()], device=ours.device)
        their_size = torch.empty_like(size)
        _wait(_start_pairwise(size, their_size, partner, group))
        theirs = ours.new_empty(int(their_size))
        works = _start_pairwise(ours, theirs, partner, group)
        if under_way is not None:
            _wait(under_way[2])
            yield under_way[:2]
        under_way = (partner, theirs, works, ours)
    if under_way is not None:
        _wait(under_way[2])
        yield under_way[:2]


def pairwise_schedule(rank: int, world_size: int) -> Iterator[int]:
    """Every other rank, in an order by which all ranks swap in pairs at a time: the rounds of a
    tournament, by the circle method. One rank pauses in each where their number is odd."""
    last = world_size + world_size % 2 - 1
    for turn in range(last):
        partner = (turn - rank) % last if rank < last else turn * (last + 1) // 2 % last
        if partner == rank:
            partner = last
        if partner < world_size:
            yield partner


def _start_pairwise(
    ours: Tensor, theirs: Tensor, partner: int, group: dist.ProcessGroup
) -> list[dist.Work]:
    """Asks before it sends, since gloo loses half of a slow link otherwise."""
    ask = dist.P2POp(dist.irecv, theirs, group=group, group_peer=partner)
    send = dist.P2POp(dist.isend, ours, group=group, group_peer=partner)
    return dist.batch_isend_irecv([ask, send])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
