"""Gathers and gradients are narrowed apart, counted in one ledger, given back in any order."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowcast import NarrowedGradients, NarrowedModel, narrow_all_gather, narrow_reduce_scatter
from narrowcast.allgather.comm import NarrowAllGather
from narrowcast.fsdp2 import WatchedAllGather, is_default, param_groups
from narrowcast.reducescatter import codec
from narrowcast.reducescatter.comm import NarrowReduceScatter
from narrowcast.telemetry.over_ranks import reduce_over_ranks
from narrowcast.telemetry.step_volume import StepVolume
from narrowcast.wire.packet import Encoded
from tests.narrowcast.autotune.test_controller import SLOW
from tests.narrowcast.autotune.test_gradient_controller import on_this_link
from tests.narrowcast.training import Setup, build, narrowed, train

STEP = Setup(steps=1)
BOTH = (
    partial(narrow_all_gather, compression="delta"),
    partial(narrow_reduce_scatter, compression="entropy"),
)
Handle = NarrowedModel | NarrowedGradients


def _torch_collectives() -> list[Callable]:
    names = "all_reduce", "all_gather_single", "reduce_scatter_single"
    return [getattr(module, name) for module in (dist, dist.distributed_c10d) for name in names]


_TORCH_COLLECTIVES = _torch_collectives()


def _collectives(model: nn.Module) -> list[bool]:
    """Whether its gathers, its reductions, and torch's own collectives are as they were."""
    groups = param_groups(model)
    return [
        all(is_default(group.all_gather) for group in groups),
        all(is_default(group.reduce_scatter) for group in groups),
        _torch_collectives() == _TORCH_COLLECTIVES,
    ]


def _in_every_order(gather_first: bool, removed_first: int) -> list[str]:
    """What is wrong after two handles were made in one order, and given back in another."""
    wrong = []

    def check(name: str, right: bool) -> None:
        if not right:
            wrong.append(name)

    def counts() -> dict[str, int]:
        train(STEP, model, optimizer)
        return dict(handles[0].ledger.last.sent)

    model, optimizer = build(STEP)
    check("plain before", all(_collectives(model)))
    handles: list[Handle] = []
    for call in BOTH if gather_first else BOTH[::-1]:
        handles.append(call(model, optimizer))
    groups = param_groups(model)
    check("narrow gathers", all(type(g.all_gather) is NarrowAllGather for g in groups))
    check("narrow gradients", all(type(g.reduce_scatter) is NarrowReduceScatter for g in groups))
    check("one ledger", handles[0].ledger is handles[1].ledger)
    train(STEP, model, optimizer)
    both, steps = counts(), handles[0].ledger.steps
    check("one step is one step", steps == 2)

    gone, left = handles[removed_first], handles[1 - removed_first]
    gone.remove()
    gone.remove()
    gathers_left = isinstance(left, NarrowedModel)
    check("gathers", all((type(g.all_gather) is NarrowAllGather) == gathers_left for g in groups))
    cached = all((type(g.reduce_scatter) is NarrowReduceScatter) != gathers_left for g in groups)
    check("gradients", cached)
    train(STEP, model, optimizer)  # sizes of the last refresh are counted in the step after it
    other = counts()
    narrow, plain = ("all_gather", "reduce_scatter")[:: 1 if gathers_left else -1]
    check("the other goes on counting", handles[0].ledger.steps == 4)
    check("the other sends as little", other[narrow] < 1.2 * both[narrow])
    check("plain is counted too", other[plain] == handles[0].ledger.last.plain[plain] > both[plain])

    left.remove()
    left.remove()
    gone.remove()
    check("plain after", all(_collectives(model)))
    train(STEP, model, optimizer)
    check("no step is counted after", handles[0].ledger.steps == 4)
    return wrong


@pytest.mark.parametrize("removed_first", [0, 1])
@pytest.mark.parametrize("gather_first", [True, False])
def test_two_handles_share_a_ledger_and_end_in_any_order(
    ranks, gather_first: bool, removed_first: int
) -> None:
    assert ranks(2).run(_in_every_order, gather_first, removed_first) == [[]] * 2


def _gradients_by_auto(gather_first: bool, removed_first: int, counts: bool) -> list[str]:
    """What is wrong while gathers are watched for gradients' ``auto``, and after both handles."""
    wrong = []

    def check(name: str, right: bool) -> None:
        if not right:
            wrong.append(name)

    model, optimizer = build(STEP)
    groups = param_groups(model)
    own = [group._group._all_gather_comm for group in groups]
    gradients = partial(narrow_reduce_scatter, compression="auto", force=True)
    calls = [partial(narrow_all_gather, compression="delta"), gradients]
    with on_this_link(SLOW):
        handles = [
            call(model, optimizer, volume=counts) for call in calls[:: 1 if gather_first else -1]
        ]
    check("watched", all(type(g._group._all_gather_comm) is WatchedAllGather for g in groups))
    check("narrow gathers", all(type(g.all_gather) is NarrowAllGather for g in groups))
    train(STEP, model, optimizer)
    gone, left = handles[removed_first], handles[1 - removed_first]
    gone.remove()
    for group in groups:
        is_narrow = type(group.all_gather) is NarrowAllGather
        check("gathers", is_narrow == isinstance(left, NarrowedModel))
        is_watched = type(group._group._all_gather_comm) is WatchedAllGather
        check("watch", is_watched == isinstance(left, NarrowedGradients))
    train(STEP, model, optimizer)
    if counts:
        check("gathers are counted", left.ledger.last.sent["all_gather"] > 0)
    left.remove()
    check("own objects", [group._group._all_gather_comm for group in groups] == own)
    train(STEP, model, optimizer)
    return wrong


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("removed_first", [0, 1])
@pytest.mark.parametrize("gather_first", [True, False])
def test_gathers_that_gradients_auto_watches_are_given_back_in_any_order(
    ranks, gather_first: bool, removed_first: int, counts: bool
) -> None:
    assert ranks(2).run(_gradients_by_auto, gather_first, removed_first, counts) == [[]] * 2


def _removed_twice() -> list[bool]:
    model, optimizer = build(STEP)
    old = narrow_reduce_scatter(model, optimizer, compression="entropy")
    old.remove()
    new = narrow_reduce_scatter(model, optimizer, compression="entropy")
    old.remove()
    train(STEP, model, optimizer)
    narrow = all(type(g.reduce_scatter) is NarrowReduceScatter for g in param_groups(model))
    counted = new.ledger.last.sent["reduce_scatter"] > 0
    new.remove()
    return [narrow, counted, *_collectives(model)]


def test_a_removed_handle_leaves_a_newer_one_alone(ranks) -> None:
    for right in ranks(2).run(_removed_twice):
        assert all(right)


def _without_volume() -> list[bool]:
    model, optimizer = build(STEP)
    handles = [call(model, optimizer, volume=False) for call in BOTH]
    uncounted = [handle.ledger is None for handle in handles] + _collectives(model)[2:]
    train(STEP, model, optimizer)
    for handle in handles:
        handle.remove()
    return [*uncounted, *_collectives(model)]


def test_without_volume_nothing_is_counted_nor_replaced(ranks) -> None:
    for right in ranks(2).run(_without_volume):
        assert all(right)


def _steps_without_an_optimizer() -> list[int]:
    model, optimizer = build(STEP)
    handle = narrow_reduce_scatter(model, compression="entropy")
    train(STEP, model, optimizer)
    steps = [handle.ledger.steps]
    handle.ledger.end_step()
    steps += [handle.ledger.steps, int(handle.ledger.last.gradients.parameters > 0)]
    handle.remove()
    return steps


def test_without_an_optimizer_its_user_ends_the_steps(ranks) -> None:
    assert ranks(2).run(_steps_without_an_optimizer) == [[0, 1, 1]] * 2


@contextmanager
def _watched() -> Iterator[Counter[str]]:
    """Counts by itself what reductions hand to torch, and what they encode."""
    seen: Counter[str] = Counter()
    swap, all_reduce, encode = dist.batch_isend_irecv, dist.all_reduce, codec.encode

    def watched_swap(ops: list[dist.P2POp]) -> list[dist.Work]:
        sent = [op.tensor for op in ops if op.op is dist.isend]
        seen["swapped bytes"] += sum(t.numel() * t.element_size() for t in sent)
        seen["size bytes"] += 8 * sum(t.dtype == torch.int64 for t in sent)
        return swap(ops)

    def watched_all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        nbytes, world_size = tensor.numel() * tensor.element_size(), dist.get_world_size()
        seen["all-reduced bytes"] += 2 * nbytes * (world_size - 1) // world_size
        return all_reduce(tensor, *args, **kwargs)

    def watched_encode(values_N: Tensor, *args: Any) -> Encoded:
        seen["values"] += values_N.numel()
        seen["zeros"] += sum(value == 0 for value in values_N.tolist())
        return encode(values_N, *args)

    with (
        patch.object(dist, "batch_isend_irecv", watched_swap),
        patch.object(dist, "all_reduce", watched_all_reduce),
        patch.object(codec, "encode", watched_encode),
    ):
        yield seen


def _counted(compression: str) -> tuple[StepVolume, Counter[str], int]:
    """A step's volume, what was seen of it, and how many values a rank's shards of it have."""
    setup = Setup(gradients={"compression": compression}, steps=1, microbatches=2)
    model, optimizer = build(setup)
    with _watched() as seen, narrowed(setup, model, optimizer) as (handle,):
        train(setup, model, optimizer)
        numel = sum(sum(group.numels) for group in param_groups(model))
        return handle.ledger.last, seen, numel


@pytest.mark.parametrize("compression", ["entropy", "none"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_are_counted_as_they_are_handed_to_the_wire(
    ranks, world_size, compression
) -> None:
    others = world_size - 1
    for volume, seen, numel in ranks(world_size).run(_counted, compression):
        sent = seen["swapped bytes"] + seen["all-reduced bytes"]
        assert volume.sent["reduce_scatter"] == sent
        assert volume.plain["reduce_scatter"] == 2 * others * numel * 4
        gradients = volume.gradients
        assert gradients.bits == 8 * (seen["swapped bytes"] - seen["size bytes"])
        assert gradients.parameters == gradients.examined == seen["values"] == 2 * others * numel
        assert gradients.zeros == seen["zeros"] > 0
        assert volume.sent["other"] == 0


def test_coded_gradients_are_a_fraction_of_plain_ones(ranks) -> None:
    """Though pieces of this model are small, so that headers count."""
    for volume, _, _ in ranks(2).run(_counted, "entropy"):
        scalars = volume.scalars()
        assert scalars["narrowcast/bits_per_parameter/gradients"] < 13
        assert scalars["narrowcast/ratio/reduce_scatter"] < 0.45


def _summed_over_ranks() -> tuple[StepVolume, StepVolume]:
    rank = dist.get_rank()
    mine = StepVolume()
    mine.sent.update(reduce_scatter=100 + rank)
    mine.plain.update(reduce_scatter=400 - rank)
    mine.gradients.parameters, mine.gradients.bits = 10 + rank, 100 + rank
    mine.gradients.examined, mine.gradients.zeros = 5, rank
    mine.first.parameters, mine.later.bits = 7, 3
    return mine, reduce_over_ranks(mine, torch.device("cpu"))


def test_the_bits_and_zeros_of_all_ranks_are_added_up(ranks) -> None:
    for _, total in ranks(3).run(_summed_over_ranks):
        assert (total.sent["reduce_scatter"], total.plain["reduce_scatter"]) == (102, 400)
        gradients = total.gradients
        assert (gradients.parameters, gradients.bits) == (33, 303)
        assert (gradients.examined, gradients.zeros) == (15, 3)
        assert (total.first.parameters, total.later.bits) == (21, 9)
