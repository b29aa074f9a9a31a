"""Moves payloads of unequal size between the ranks of a group.

In an all-gather every rank sends a buffer of the same padded size, that of the largest payload that
was announced. Of a payload that does not fit, the buffer holds the header and as much as fits.
Since headers state how large the bodies are, every rank sees that a second round is due, and how
large: it sends all bodies again, complete. So a shard that changed unannounced on one rank costs
the buffer and a round, and no rank ever waits for another that does not take part.
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
    """Starts the all-gather of a payload, uint8, cut or padded to ``padded_size`` bytes.

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
    """Exchanges payloads with every other rank of the group, one after the other.

    Sizes differ by pair and are known only once a payload is made, so each is sent right before its
    payload, and the receiver asks for exactly as much. While one exchange is pending, the caller
    reads what arrived by the one before, and the payload of the next is made: no more than four
    payloads exist at once, if the caller keeps none.

    Args:
        payload_for: makes the payload, uint8, for a rank of the group. It must not raise, since the
            other rank would wait for ever.

    Yields:
        A rank of the group, and the payload that arrived from it.
    """
    pending: tuple[int, Tensor, list[dist.Work], Tensor] | None = None
    for partner in pairwise_schedule(group.rank(), group.size()):
        outgoing = payload_for(partner)
        size = torch.tensor([outgoing.numel()], device=outgoing.device)
        incoming_size = torch.empty_like(size)
        _wait(_start_pairwise(size, incoming_size, partner, group))
        incoming = outgoing.new_empty(int(incoming_size))
        works = _start_pairwise(outgoing, incoming, partner, group)
        if pending is not None:
            _wait(pending[2])
            yield pending[:2]
        pending = (partner, incoming, works, outgoing)
    if pending is not None:
        _wait(pending[2])
        yield pending[:2]


def pairwise_schedule(rank: int, world_size: int) -> Iterator[int]:
    """Every other rank, in an order in which all ranks are paired in each round: a round-robin
    tournament by the circle method. If their number is odd, one rank pauses in each round."""
    last = world_size + world_size % 2 - 1
    for number in range(last):
        partner = (number - rank) % last if rank < last else number * (last + 1) // 2 % last
        if partner == rank:
            partner = last
        if partner < world_size:
            yield partner


def _start_pairwise(
    outgoing: Tensor, incoming: Tensor, partner: int, group: dist.ProcessGroup
) -> list[dist.Work]:
    """Receives before it sends, since otherwise gloo uses half of a slow link alone."""
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=partner)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=partner)
    return dist.batch_isend_irecv([receive, send])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
