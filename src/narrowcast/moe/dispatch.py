"""Deduplicated dispatch and combine: a token crosses once to each rank that holds its experts.

    x_TD -BRIM_0-> x_SD ==all-to-all==> x_SD -experts-> y_SD ==all-to-all==> y_SD -BRIM_0-> y_TD
    ORI            SFD                  SFD  (BRIM_1)   SFD                  SFD            ORI

Plain expert parallelism sends a row for each of a token's k experts. Here one row goes to each
rank (Expert Coupling, V.A; Occult, section 3.1), with the token's experts on that rank and their
routing probabilities beside it, in one message. The rank gives back one partial sum. Backward is
the mirror: one gradient row goes there, one comes back with the gradients of the probabilities.

    a row of a message:  x (D values) | probabilities (J fp32) | experts (J uint8, int16) | padding

with J the most experts that a token can have on a rank. Rows arrive to the last bit; sums over a
token's rows are made in fp32, in the order of the ranks, and rounded once.

With several nodes there is a form of two levels: a token crosses once to each node, to the rank of
its own number there, and is passed on from it to the ranks of the node; partial sums come back the
same way. Each level is the same crossing, over other groups.

The only thing that waits for the device is the exchange of how many rows cross.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.fsdp2 import finish_all_to_all, start_all_to_all
from narrowcast.moe.brim import Brim, assign, build_brim, merge_rows, scatter_rows
from narrowcast.moe.routing_error import agreed, argument_error, first_fault, has_faults
from narrowcast.moe.row_layout import RowLayout
from narrowcast.moe.swiglu import ExpertRows

Counter = Callable[[str, int, int, int], None]
"""Is called with "dispatch" or "combine", the rows and the bytes that this rank sends to others,
and the bytes that plain expert parallelism would send for the same tokens."""


def count_nothing(collective: str, rows: int, sent_bytes: int, plain_bytes: int) -> None:
    """A `Counter` that does not count."""


@dataclass(frozen=True)
class Level:
    """Where one crossing goes.

    Attributes:
        group: whose ranks hold an equal share of the slots each, in order: a block.
        ranks: expert-parallel ranks of each block, to which a later level passes tokens on; 1 at
            the last level.
        rank_in_block: this rank's among them.
    """

    group: dist.ProcessGroup
    ranks: int = 1
    rank_in_block: int = 0


@dataclass(frozen=True)
class Crossing:
    """What crosses at one level, in numbers that the host knows.

    Attributes:
        level: where it goes.
        layout: of the rows.
        tokens: T before it.
        sent, received: rows to and from each rank of the group, its own included.
        assignments: pairs of a token and an expert before it.
        local_assignments: of these, with an expert on this very rank.
        received_assignments: pairs of a row and an expert that arrive.
        plain_sent, plain_received: rows to and from other ranks in plain expert parallelism; 0 but
            at the last level.
    """

    level: Level
    layout: RowLayout
    tokens: int
    sent: list[int]
    received: list[int]
    assignments: int
    local_assignments: int
    received_assignments: int
    plain_sent: int = 0
    plain_received: int = 0

    @property
    def rows(self) -> int:
        """S before it: rows that this rank's tokens become."""
        return sum(self.sent)

    @property
    def rows_sent(self) -> int:
        """Of these, to other ranks."""
        return self.rows - self.sent[self.level.group.rank()]

    @property
    def rows_received(self) -> int:
        """From other ranks."""
        return sum(self.received) - self.received[self.level.group.rank()]

    def count_there(self, count: Counter, collective: str, row_bytes: int) -> None:
        """Rows go the way that the tokens go."""
        plain_bytes = self.plain_sent * self.layout.token_nbytes
        count(collective, self.rows_sent, self.rows_sent * row_bytes, plain_bytes)

    def count_back(self, count: Counter, collective: str, row_bytes: int) -> None:
        """Rows go back to where the tokens came from."""
        plain_bytes = self.plain_received * self.layout.token_nbytes
        count(collective, self.rows_received, self.rows_received * row_bytes, plain_bytes)


@dataclass(frozen=True)
class _Route:
    """A crossing with its maps: BRIM_0, and where each assignment lies in the flat (S, J)."""

    crossing: Crossing
    brim: Brim
    place_TK: Tensor


def _route(
    slot_TK: Tensor,
    is_faulty: Tensor,
    num_slots: int,
    level: Level,
    layout: RowLayout,
    on_sent: Callable[[], None],
) -> _Route | None:
    """None on every rank of the group if `is_faulty` () on any."""
    num_blocks = level.group.size()
    slots_per_block = num_slots // num_blocks
    assigned = assign(slot_TK // slots_per_block, num_blocks)
    by_rank = slot_TK.new_zeros(num_blocks * level.ranks + 1)
    rank_M = (slot_TK // (slots_per_block // level.ranks)).flatten()
    by_rank.scatter_add_(0, rank_M, torch.ones_like(rank_M))
    counts = [assigned.counts_B[:, None], by_rank[:-1].view(num_blocks, level.ranks)]
    sent_BC = torch.cat([*counts, is_faulty.long().expand(num_blocks, 1)], dim=1)
    ones = [1] * num_blocks
    received_BC = finish_all_to_all(start_all_to_all(sent_BC, ones, ones, level.group, on_sent))
    # The one place that waits for the device.
    sent_counts, received_counts = torch.stack([sent_BC, received_BC]).tolist()
    if any(row.pop() for row in (*sent_counts, *received_counts)):
        return None
    sent, received = [row[0] for row in sent_counts], [row[0] for row in received_counts]
    brim = build_brim(assigned, sum(sent))
    crossing = Crossing(
        level,
        layout,
        len(slot_TK),
        sent,
        received,
        assignments=sum(sum(row[1:]) for row in sent_counts),
        local_assignments=sent_counts[level.group.rank()][1 + level.rank_in_block],
        received_assignments=sum(sum(row[1:]) for row in received_counts),
    )
    # Sorted by rank, as they are assigned; then as the router has them.
    place_TK = assigned.wide_NK * layout.places + assigned.place_NK
    place_TK = place_TK.masked_fill_(assigned.block_NK == num_blocks, sum(sent) * layout.places)
    place_TK = torch.zeros_like(place_TK).scatter_(1, assigned.order_NK, place_TK)
    return _Route(crossing, brim, place_TK)


def _with_plain_rows(last: _Route, first: Crossing) -> _Route:
    """The last route, which knows what plain expert parallelism would send in its place."""
    crossing = replace(
        last.crossing,
        plain_sent=first.assignments - first.local_assignments,
        plain_received=last.crossing.received_assignments - first.local_assignments,
    )
    return replace(last, crossing=crossing)


def _spread(values_TK: Tensor, place_TK: Tensor, num_rows: int, places: int, fill: int) -> Tensor:
    """(S, J) each assignment's value at its place; what has no row is dropped."""
    spread = values_TK.new_full((num_rows * places + 1,), fill)
    spread[place_TK.flatten()] = values_TK.flatten()
    return spread[:-1].view(num_rows, places)


@dataclass
class _Flight:
    """A message under way, between the two halves of a dispatch."""

    pending: Tensor | None = None

    def land(self) -> Tensor:
        pending, self.pending = self.pending, None
        return finish_all_to_all(pending)


class _Depart(torch.autograd.Function):
    """Sends tokens on their way; in backward their gradients arrive. What runs between it and
    `_Arrive` runs while rows are under way, in backward too."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        prob_TK: Tensor,
        id_TK: Tensor,
        route: _Route,
        flight: _Flight,
        count: Counter,
    ) -> Tensor:
        crossing, layout = route.crossing, route.crossing.layout
        ctx.save_for_backward(route.brim.wide_W, route.brim.starts_N, route.place_TK)
        ctx.crossing, ctx.flight = crossing, flight
        ctx.dtypes = x_TD.dtype, prob_TK.dtype
        place = (route.place_TK, crossing.rows, layout.places)
        message = layout.pack(
            scatter_rows(x_TD, route.brim.source_W),
            _spread(prob_TK.float(), *place, fill=0),
            _spread(id_TK, *place, fill=layout.num_ids),
        )
        flight.pending = start_all_to_all(
            message,
            crossing.received,
            crossing.sent,
            crossing.level.group,
            on_sent=lambda: crossing.count_there(count, "dispatch", layout.nbytes),
        )
        return x_TD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        *rows_of_T, place_TK = ctx.saved_tensors
        x_dtype, prob_dtype = ctx.dtypes
        layout = replace(ctx.crossing.layout, num_ids=0)
        grad_x_SD, grad_prob_SJ, _ = layout.unpack(ctx.flight.land())
        grad_x_TD = merge_rows(grad_x_SD, *rows_of_T).to(x_dtype)
        flat = torch.cat([grad_prob_SJ.flatten(), grad_prob_SJ.new_zeros(1)])
        return grad_x_TD, flat[place_TK].to(prob_dtype), None, None, None, None


class _Arrive(torch.autograd.Function):
    """Takes the tokens that others sent; in backward sends their gradients on their way."""

    @staticmethod
    def forward(
        ctx: Any, link: Tensor, crossing: Crossing, flight: _Flight, count: Counter
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.crossing, ctx.flight, ctx.count = crossing, flight, count
        x_SD, prob_SJ, id_SJ = crossing.layout.unpack(flight.land())
        ctx.mark_non_differentiable(id_SJ)
        return x_SD, prob_SJ.contiguous(), id_SJ

    @staticmethod
    def backward(
        ctx: Any, grad_x_SD: Tensor, grad_prob_SJ: Tensor, _: Any
    ) -> tuple[Tensor, None, None, None]:
        crossing: Crossing = ctx.crossing
        layout = replace(crossing.layout, num_ids=0)
        ctx.flight.pending = start_all_to_all(
            layout.pack(grad_x_SD, grad_prob_SJ),
            crossing.sent,
            crossing.received,
            crossing.level.group,
            on_sent=lambda: crossing.count_back(ctx.count, "dispatch", layout.nbytes),
        )
        return grad_x_SD.new_empty(0), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_SD: Tensor,
        source_S: Tensor,
        row_S: Tensor,
        starts_T: Tensor,
        crossing: Crossing,
        count: Counter,
    ) -> Tensor:
        ctx.save_for_backward(source_S)
        ctx.crossing, ctx.count = crossing, count
        pending = start_all_to_all(
            y_SD,
            crossing.sent,
            crossing.received,
            crossing.level.group,
            on_sent=lambda: crossing.count_back(count, "combine", crossing.layout.token_nbytes),
        )
        return merge_rows(finish_all_to_all(pending), row_S, starts_T).to(y_SD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        (source_S,) = ctx.saved_tensors
        crossing: Crossing = ctx.crossing
        token_bytes = crossing.layout.token_nbytes
        pending = start_all_to_all(
            scatter_rows(grad_TD, source_S),
            crossing.received,
            crossing.sent,
            crossing.level.group,
            on_sent=lambda: crossing.count_there(ctx.count, "combine", token_bytes),
        )
        return finish_all_to_all(pending), None, None, None, None, None


@dataclass(frozen=True)
class Dispatched:
    """Tokens that arrived at the ranks of their experts.

    Attributes:
        x_SD: (S, D) one row for each token and rank; a view with row stride of the message.
        rows: which local experts they go to, and with what probability.
        routes: how they came, level by level, for `combine`.
    """

    x_SD: Tensor
    rows: ExpertRows
    routes: tuple["_Route", ...]

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        return tuple(route.crossing for route in self.routes)


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
        x_TD: (T, D) this rank's tokens.
        prob_TK: (T, K) routing probabilities.
        slot_TK: (T, K) integers, the slots of each token's experts, no slot twice: slot s is on
            rank s // e, with e slots a rank.
        num_slots: E, of all ranks.
        levels: where tokens cross to, one after the other; see `one_level`, `two_levels`.
        count: is told of the bytes.
        meanwhile: runs while the tokens are under way; its backward runs while their gradients are.

    Raises:
        ValueError: slots do not divide over the ranks.
        RoutingError: on every rank of the levels' groups, if a token of any names a slot twice or
            one that does not exist, or if a rank's tokens, probabilities and slots are of shapes or
            dtypes that do not go together.
    """
    routes, all_slots = [], num_slots
    num_ranks = math.prod(level.group.size() for level in levels)
    if num_slots % num_ranks:
        raise ValueError(f"{num_slots} slots do not divide over {num_ranks} expert-parallel ranks")
    error = argument_error(x_TD, prob_TK, slot_TK)
    if error is not None:  # no token goes anywhere, but the others must hear of it
        x_TD, prob_TK, slot_TK = (of.new_zeros(0, 1) for of in (x_TD, prob_TK, slot_TK))
    x, prob, slot = x_TD, prob_TK, slot_TK.long()
    is_faulty = has_faults(slot, num_slots) | (error is not None)
    slot = torch.where(is_faulty, num_slots, slot)
    for number, level in enumerate(levels):
        is_last = number == len(levels) - 1
        slots_per_block = num_slots // level.group.size()
        places = min(slot.shape[1], slots_per_block)
        layout = RowLayout(x.shape[1], x.dtype, places, slots_per_block)
        with torch.no_grad():
            # Plain expert parallelism exchanges a count for each slot, where this is the last one.
            plain_bytes = 8 * slots_per_block * (num_ranks - 1) if level.ranks == 1 else 0
            count_bytes = 8 * (2 + level.ranks) * (level.group.size() - 1)
            on_sent = functools.partial(count, "dispatch", 0, count_bytes, plain_bytes)
            route = _route(slot, is_faulty, num_slots, level, layout, on_sent)
        num_slots = slots_per_block
        if route is None:
            error = agreed(error or first_fault(slot_TK, all_slots), level.group, x.device)
            if is_last:
                raise error
            # The ranks that the next level goes to have not heard of it.
            x, prob, slot, is_faulty = x[:0], prob[:0], slot[:0], torch.ones_like(is_faulty)
            continue
        if is_last:
            route = _with_plain_rows(route, (routes or [route])[0].crossing)
        routes.append(route)
        flight = _Flight()
        link = _Depart.apply(x, prob, slot % slots_per_block, route, flight, count)
        if number == 0 and meanwhile is not None:
            meanwhile()
        x, prob, slot = _Arrive.apply(link, route.crossing, flight, count)
        is_faulty = torch.zeros_like(is_faulty)
    with torch.no_grad():
        assigned = assign(slot, num_slots)
        brim = build_brim(assigned, routes[-1].crossing.received_assignments)
        offsets_e = assigned.counts_B.cumsum(0, dtype=torch.int32)
    return Dispatched(x, ExpertRows(brim, offsets_e, prob), tuple(routes))


def combine(y_SD: Tensor, dispatched: Dispatched, count: Counter = count_nothing) -> Tensor:
    """(T, D) every token's sum of the rows that its ranks give back. Every rank must call it.

    Args:
        y_SD: (S, D) a partial sum for each row of `dispatched`.
    """
    for route in reversed(dispatched.routes):
        brim = route.brim
        maps = brim.source_W, brim.wide_W, brim.starts_N
        y_SD = _Combine.apply(y_SD, *maps, route.crossing, count)
    return y_SD


def one_level(group: dist.ProcessGroup) -> tuple[Level, ...]:
    """Tokens go from rank to rank of an expert-parallel group."""
    return (Level(group),)


def two_levels(group: dist.ProcessGroup, num_nodes: int) -> tuple[Level, ...]:
    """Tokens go to nodes first, then to the ranks of each. Every rank of the job must call it.

    Args:
        group: this rank's expert-parallel group, consecutive ranks of it on the same node.
        num_nodes: that it is spread over.

    Raises:
        ValueError: it cannot be.
    """
    size = group.size()
    if size % num_nodes:
        raise ValueError(f"{size} expert-parallel ranks do not divide over {num_nodes} nodes")
    members: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(members, dist.get_process_group_ranks(group))
    per_node = size // num_nodes
    mine: list[dist.ProcessGroup] = []
    # Every rank of the job takes part in the making of every group.
    for ranks in sorted({tuple(ranks) for ranks in members}):
        across = [ranks[i::per_node] for i in range(per_node)]
        within = [ranks[i : i + per_node] for i in range(0, size, per_node)]
        made = [(part, dist.new_group(list(part))) for part in (*across, *within)]
        mine += [made_group for part, made_group in made if dist.get_rank() in part]
    across_group, within_group = mine
    return Level(across_group, per_node, within_group.rank()), Level(within_group)
