"""Deduplicated dispatch and combine: a token is sent once to each rank that holds its experts.

    x_TD -BRIM_0-> x_SD ==all-to-all==> x_SD -experts-> y_SD ==all-to-all==> y_SD -BRIM_0-> y_TD
    ORI            SFD                  SFD  (BRIM_1)   SFD                  SFD            ORI

Standard expert parallelism sends one row for each of the k experts of a token. Here one row is sent
to each rank (Expert Coupling, section V.A; Occult, section 3.1). The row carries the experts of the
token on that rank and their routing probabilities, in one message. The rank returns one partial
sum. Backward mirrors this: one gradient row is sent, and one returns with the gradients of the
probabilities.

    a row of a message:  x (D values) | probabilities (J fp32) | experts (J uint8, int16) | padding

J is the largest number of experts that a token can have on a rank. Rows arrive bitwise identical.
Sums over the rows of a token are computed in fp32, in the order of the ranks, and rounded once.

Across several nodes there is a form with two levels: a token is sent once to each node, to the rank
of the same index there, which forwards it to the ranks of its node. Partial sums return along the
same path. Each level is the same hop over another process group.

The host waits for the device only once a hop, to read how many rows it moves.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.fsdp2 import finish_all_to_all, start_all_to_all
from narrowcast.moe.brim import assign, build_brim, merge_rows, scatter_rows
from narrowcast.moe.hop import Counter, Hop, Level, count_nothing
from narrowcast.moe.route import (
    Route,
    count_rows,
    from_rows,
    hop_of_counts,
    is_any_faulty,
    plan_route,
    to_rows,
    with_baseline,
)
from narrowcast.moe.routing_error import agreed, argument_error, first_fault, has_faults
from narrowcast.moe.row_layout import RowLayout
from narrowcast.moe.swiglu import ExpertRows


@dataclass(frozen=True)
class Dispatched:
    """Tokens that arrived at the ranks of their experts.

    Attributes:
        x_SD: (S, D) one row for each token and rank: a strided view of the message.
        rows: the local experts that each row goes to, and their probabilities.
        routes: the routes of the tokens, level by level, which ``combine`` follows back.
    """

    x_SD: Tensor
    rows: ExpertRows
    routes: tuple[Route, ...]

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The hops of the tokens, level by level."""
        return tuple(route.hop for route in self.routes)


def dispatch(
    x_TD: Tensor,
    prob_TK: Tensor,
    slot_TK: Tensor,
    num_slots: int,
    levels: Sequence[Level],
    count: Counter = count_nothing,
    meanwhile: Callable[[], None] | None = None,
) -> Dispatched:
    """Send each token once to each rank that holds any of its experts. Every rank must call it.

    Args:
        x_TD: (T, D) tokens of this rank.
        prob_TK: (T, K) routing probabilities.
        slot_TK: (T, K) integers, the slots of the experts of each token, all different within a
            row. With e slots a rank, slot s is on rank s // e.
        num_slots: E, the slots of all ranks.
        levels: where the tokens go, hop by hop: see ``one_level`` and ``two_levels``.
        count: is called with the bytes of each all-to-all.
        meanwhile: runs while the tokens are being sent; its backward runs while their gradients
            are.

    Raises:
        ValueError: the slots do not divide over the ranks.
        RoutingError: on every rank of the levels' groups, if any rank has a token with the same
            slot twice or with a slot that does not exist, or has tokens, probabilities and slots
            whose shapes or dtypes do not match.
    """
    num_ranks = math.prod(level.group.size() for level in levels)
    if num_slots % num_ranks:
        raise ValueError(f"{num_slots} slots do not divide over {num_ranks} expert-parallel ranks")
    error = argument_error(x_TD, prob_TK, slot_TK)
    tokens = _checked(x_TD, prob_TK, slot_TK, num_slots, has_error=error is not None)
    routes: list[Route] = []
    for number, level in enumerate(levels):
        with torch.no_grad():
            route = _plan(tokens, level, _counter_of_counts(count, tokens, level, num_ranks))
        if route is None:
            # The ranks of the next level's group have not all seen this error.
            error = agreed(error or first_fault(slot_TK, num_slots), level.group, x_TD.device)
            tokens = tokens.dropped(tokens.num_slots // level.group.size())
            continue
        if number == len(levels) - 1:
            route = with_baseline(route, (routes or [route])[0].hop)
        routes.append(route)
        tokens = _send(tokens, route, count, meanwhile if number == 0 else None)
    if error is not None:
        raise error
    return Dispatched(tokens.x_TD, _expert_rows(tokens, routes[-1].hop), tuple(routes))


def combine(y_SD: Tensor, dispatched: Dispatched, count: Counter = count_nothing) -> Tensor:
    """Return (T, D) the sum of the rows that come back for each token. Every rank must call it.

    Args:
        y_SD: (S, D) a partial sum for each row of ``dispatched``.
        dispatched: what ``dispatch`` returned.
        count: is called with the bytes of each all-to-all.
    """
    for route in reversed(dispatched.routes):
        brim = route.brim
        maps = brim.source_W, brim.wide_W, brim.starts_N
        y_SD = _Combine.apply(y_SD, *maps, route.hop, count)
    return y_SD


@dataclass(frozen=True)
class _Tokens:
    """The tokens that this rank holds before a hop, or after the last one.

    Attributes:
        x_TD: (T, D) the tokens.
        prob_TK: (T, K) their routing probabilities.
        slot_TK: (T, K) int64, their slots, from 0 to ``num_slots`` - 1; ``num_slots`` for none.
        num_slots: slots of the ranks that the remaining hops can reach.
        is_faulty: () bool, whether the routing of this rank is invalid.
    """

    x_TD: Tensor
    prob_TK: Tensor
    slot_TK: Tensor
    num_slots: int
    is_faulty: Tensor

    def dropped(self, num_slots: int) -> "_Tokens":
        """Return no tokens, in a rank that reports a fault to the next level."""
        rows = self.x_TD[:0], self.prob_TK[:0], self.slot_TK[:0]
        return _Tokens(*rows, num_slots, torch.ones_like(self.is_faulty))


def _checked(
    x_TD: Tensor, prob_TK: Tensor, slot_TK: Tensor, num_slots: int, has_error: bool
) -> _Tokens:
    """Return the tokens of this rank, none of which has a slot if any of its routing is invalid."""
    if has_error:  # Nothing is sent, but all ranks must learn of the error.
        x_TD, prob_TK, slot_TK = (of.new_zeros(0, 1) for of in (x_TD, prob_TK, slot_TK))
    slot_TK = slot_TK.long()
    is_faulty = has_faults(slot_TK, num_slots) | has_error
    slot_TK = torch.where(is_faulty, num_slots, slot_TK)
    return _Tokens(x_TD, prob_TK, slot_TK, num_slots, is_faulty)


def _counter_of_counts(
    count: Counter, tokens: _Tokens, level: Level, num_ranks: int
) -> Callable[[], None]:
    """Return what counts the bytes of a hop's exchange of counts.

    Standard expert parallelism exchanges one count for each slot: it is counted at the last level.
    """
    num_blocks = level.group.size()
    slots_per_block = tokens.num_slots // num_blocks
    count_bytes = 8 * (2 + level.ranks) * (num_blocks - 1)
    baseline_bytes = 8 * slots_per_block * (num_ranks - 1) if level.ranks == 1 else 0
    return functools.partial(count, "dispatch", 0, count_bytes, baseline_bytes)


def _plan(tokens: _Tokens, level: Level, on_sent: Callable[[], None]) -> Route | None:
    """Return the route of tokens over one level, or None on every rank of its group if the routing
    of any of these ranks is invalid."""
    num_blocks = level.group.size()
    slots_per_block = tokens.num_slots // num_blocks
    num_tokens, top_k = tokens.slot_TK.shape
    assigned = assign(tokens.slot_TK // slots_per_block, num_blocks)
    sent_BC = count_rows(assigned, tokens.slot_TK, tokens.num_slots, level, tokens.is_faulty)
    received_BC = _exchange_counts(sent_BC, level.group, on_sent)
    # The only place that waits for the device.
    sent_counts, received_counts = torch.stack([sent_BC, received_BC]).tolist()
    if is_any_faulty([*sent_counts, *received_counts]):
        return None
    layout = RowLayout(
        dim=tokens.x_TD.shape[1],
        dtype=tokens.x_TD.dtype,
        max_experts=min(top_k, slots_per_block),
        num_experts=slots_per_block,
    )
    hop = hop_of_counts(level, layout, num_tokens, sent_counts, received_counts)
    return plan_route(assigned, hop)


def _exchange_counts(
    sent_BC: Tensor, group: dist.ProcessGroup, on_sent: Callable[[], None]
) -> Tensor:
    """Return (B, C) row b of rank b, which is its row for this rank."""
    ones = [1] * group.size()
    return finish_all_to_all(start_all_to_all(sent_BC, ones, ones, group, on_sent))


def _send(
    tokens: _Tokens, route: Route, count: Counter, meanwhile: Callable[[], None] | None
) -> _Tokens:
    """Send tokens over a hop, and return those that arrive."""
    num_slots = route.hop.layout.num_experts
    pending = PendingAllToAll()
    rows = tokens.x_TD, tokens.prob_TK, tokens.slot_TK % num_slots
    link = DispatchStart.apply(*rows, route, pending, count)
    if meanwhile is not None:
        meanwhile()
    received = DispatchWait.apply(link, route.hop, pending, count)
    return _Tokens(*received, num_slots, torch.zeros_like(tokens.is_faulty))


@torch.no_grad()
def _expert_rows(tokens: _Tokens, hop: Hop) -> ExpertRows:
    """Return BRIM_1 of the rows that arrived over the last hop."""
    assigned = assign(tokens.slot_TK, tokens.num_slots)
    brim = build_brim(assigned, hop.received_assignments)
    offsets_e = assigned.counts_B.cumsum(0, dtype=torch.int32)
    return ExpertRows(brim, offsets_e, tokens.prob_TK)


@dataclass
class PendingAllToAll:
    """A message that is being sent, between the two halves of a dispatch."""

    pending: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the message, once it has arrived."""
        pending, self.pending = self.pending, None
        return finish_all_to_all(pending)


class DispatchStart(torch.autograd.Function):
    """Starts to send tokens; in backward it receives their gradients.

    What runs between it and ``DispatchWait`` overlaps with the all-to-all, in backward too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        prob_TK: Tensor,
        id_TK: Tensor,
        route: Route,
        pending: PendingAllToAll,
        count: Counter,
    ) -> Tensor:
        hop, layout = route.hop, route.hop.layout
        ctx.save_for_backward(route.brim.wide_W, route.brim.starts_N, route.entry_TK)
        ctx.layout, ctx.pending = layout.without_experts(), pending
        ctx.dtypes = x_TD.dtype, prob_TK.dtype
        message = layout.pack(
            scatter_rows(x_TD, route.brim.source_W),
            to_rows(prob_TK.float(), route, fill=0),
            to_rows(id_TK, route, fill=layout.num_experts),
        )
        pending.pending = start_all_to_all(
            message,
            hop.received,
            hop.sent,
            hop.level.group,
            on_sent=lambda: hop.count_to_experts(count, "dispatch", layout.nbytes),
        )
        return x_TD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        wide_S, starts_T, entry_TK = ctx.saved_tensors
        x_dtype, prob_dtype = ctx.dtypes
        grad_x_SD, grad_prob_SJ, _ = ctx.layout.unpack(ctx.pending.wait())
        grad_x_TD = merge_rows(grad_x_SD, wide_S, starts_T).to(x_dtype)
        grad_prob_TK = from_rows(grad_prob_SJ, entry_TK).to(prob_dtype)
        return grad_x_TD, grad_prob_TK, None, None, None, None


class DispatchWait(torch.autograd.Function):
    """Receives the tokens that other ranks sent; in backward it starts to send their gradients."""

    @staticmethod
    def forward(
        ctx: Any, link: Tensor, hop: Hop, pending: PendingAllToAll, count: Counter
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.hop, ctx.pending, ctx.count = hop, pending, count
        x_SD, prob_SJ, id_SJ = hop.layout.unpack(pending.wait())
        ctx.mark_non_differentiable(id_SJ)
        return x_SD, prob_SJ.contiguous(), id_SJ

    @staticmethod
    def backward(
        ctx: Any, grad_x_SD: Tensor, grad_prob_SJ: Tensor, _: Any
    ) -> tuple[Tensor, None, None, None]:
        hop: Hop = ctx.hop
        layout = hop.layout.without_experts()
        ctx.pending.pending = start_all_to_all(
            layout.pack(grad_x_SD, grad_prob_SJ),
            hop.sent,
            hop.received,
            hop.level.group,
            on_sent=lambda: hop.count_to_tokens(ctx.count, "dispatch", layout.nbytes),
        )
        return grad_x_SD.new_empty(0), None, None, None


class _Combine(torch.autograd.Function):
    """Returns partial sums to the ranks of their tokens and adds them up; in backward it sends the
    gradient of each token to the ranks of its experts."""

    @staticmethod
    def forward(
        ctx: Any,
        y_SD: Tensor,
        source_S: Tensor,
        wide_S: Tensor,
        starts_T: Tensor,
        hop: Hop,
        count: Counter,
    ) -> Tensor:
        ctx.save_for_backward(source_S)
        ctx.hop, ctx.count = hop, count
        pending = start_all_to_all(
            y_SD,
            hop.sent,
            hop.received,
            hop.level.group,
            on_sent=lambda: hop.count_to_tokens(count, "combine", hop.layout.token_nbytes),
        )
        return merge_rows(finish_all_to_all(pending), wide_S, starts_T).to(y_SD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        (source_S,) = ctx.saved_tensors
        hop: Hop = ctx.hop
        pending = start_all_to_all(
            scatter_rows(grad_TD, source_S),
            hop.received,
            hop.sent,
            hop.level.group,
            on_sent=lambda: hop.count_to_experts(ctx.count, "combine", hop.layout.token_nbytes),
        )
        return finish_all_to_all(pending), None, None, None, None, None
