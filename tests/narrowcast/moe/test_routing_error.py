"""A routing row that cannot be followed is one error on every rank, which names token and slot."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.moe import dispatch as module
from narrowcast.moe.brim import assign, build_brim
from narrowcast.moe.dispatch import dispatch
from narrowcast.moe.hop import Level, one_level, two_levels
from narrowcast.moe.routing_error import RoutingError, has_faults
from tests.narrowcast.moe.moe_layer import deduplicated, random_layer
from tests.narrowcast.training import same_bits

NUM_SLOTS = 8
TWICE = "token 2 is routed to slot 3 twice (its row: [3, 3])"
# The row of token 2, and the error for it.
ROWS = {
    "twice": ([3, 3], TWICE),
    "beyond the last": ([8, 1], "token 2 is routed to slot 8, but slots are 0 to 7"),
    "far beyond": ([1, 2**40], f"token 2 is routed to slot {2**40}, but slots are 0 to 7"),
    "minus one": ([5, -1], "token 2 is routed to slot -1, but slots are 0 to 7"),
    "none twice": ([-1, -1], "token 2 is routed to slot -1, but"),
    "beyond twice": ([9, 9], "token 2 is routed to slot 9, but"),
}


def _levels(name: str) -> tuple[Level, ...]:
    world = dist.group.WORLD
    if name == "one level":
        return one_level(world)
    return two_levels(world, 2 if name == "two levels" else world.size())


def _errors(row: list[int], dtype: torch.dtype, levels_name: str, wrong: list[int]) -> list[str]:
    """What is raised where one token of some ranks has a wrong row; and that the ranks then go on,
    in step, to results that are bitwise identical to those before."""
    rank, levels = dist.get_rank(), _levels(levels_name)
    layer = random_layer([6] * dist.get_world_size(), NUM_SLOTS, len(row), dim=8)
    before = deduplicated(layer, levels, rank)
    share = layer.share(rank)
    slot_TK = share.ids_TK.clone().to(dtype)
    if rank in wrong:
        slot_TK[2] = torch.tensor(row, dtype=dtype)
    x_TD = share.leaves["x"].clone().requires_grad_()
    arguments = x_TD, share.leaves["prob"].clone().requires_grad_(), slot_TK, NUM_SLOTS, levels
    try:
        dispatch(*arguments)
    except RoutingError as error:
        errors = [str(error)]
    else:
        errors = []
    after = deduplicated(layer, levels, rank)
    assert same_bits([*before.values()], [*after.values()])
    return errors


@pytest.mark.parametrize("levels", ["one level", "two levels"])
@pytest.mark.parametrize("what", ROWS)
def test_a_wrong_row_of_one_rank_is_the_same_error_on_all(ranks, what: str, levels: str) -> None:
    row, message = ROWS[what]
    wrong = list(ROWS).index(what) % 4
    outcomes = ranks(4).run(_errors, row, torch.int64, levels, [wrong])
    assert len({tuple(errors) for errors in outcomes}) == 1
    ((error,), *_) = outcomes
    assert error.startswith(f"rank {wrong}: {message}")


@pytest.mark.parametrize(
    ("row", "dtype", "message"),
    [
        ([3, 3], torch.int32, TWICE),
        ([-1], torch.int32, "token 2 is routed to slot -1"),  # k = 1
        ([8], torch.int64, "token 2 is routed to slot 8"),
        ([7, 0, 7], torch.int16, "token 2 is routed to slot 7 twice (its row: [7, 0, 7])"),
        ([4, 4], torch.uint8, "token 2 is routed to slot 4 twice"),
        ([255, 4], torch.uint8, "token 2 is routed to slot 255, but"),
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_k_and_dtype_of_slots_is_checked(ranks, world_size, row, dtype, message) -> None:
    for levels in ("one level", "a node each"):
        wrong = world_size - 1
        for errors in ranks(world_size).run(_errors, row, dtype, levels, [wrong]):
            assert len(errors) == 1
            assert errors[0].startswith(f"rank {wrong}: {message}")


@pytest.mark.parametrize("levels", ["one level", "two levels"])
def test_of_several_ranks_the_same_one_is_named_everywhere(ranks, levels: str) -> None:
    """Wrong ranks of both rails and both nodes."""
    outcomes = ranks(4).run(_errors, [3, 3], torch.int64, levels, [1, 2])
    assert len({tuple(errors) for errors in outcomes}) == 1
    assert TWICE in outcomes[0][0]


def _wrong_arguments(levels_name: str) -> list[str]:
    rank, levels = dist.get_rank(), _levels(levels_name)
    errors = []
    x_TD, prob_TK = torch.ones(3, 8), torch.ones(3, 2)
    slot_TK = torch.tensor([[0, 1]] * 3)
    for wrong in (
        (x_TD, prob_TK, slot_TK + 0.5),
        (x_TD, prob_TK, slot_TK.bool()),
        (x_TD[:2], prob_TK, slot_TK),
        (x_TD, prob_TK[:, :1], slot_TK),
        (x_TD[0], prob_TK[0], slot_TK[0]),
    ):
        arguments = wrong if rank == 1 else (x_TD, prob_TK, slot_TK)
        with pytest.raises(RoutingError) as raised:
            dispatch(*arguments, NUM_SLOTS, levels)
        errors.append(str(raised.value))
    return errors


@pytest.mark.parametrize("levels", ["one level", "two levels"])
def test_arguments_that_do_not_match_are_one_error_on_every_rank(ranks, levels: str) -> None:
    outcomes = ranks(4).run(_wrong_arguments, levels)
    assert all(errors == outcomes[0] for errors in outcomes)
    fractions, booleans, *shapes = outcomes[0]
    assert fractions == "rank 1: slots are torch.float32; expected integers, such as int64 or int32"
    assert "slots are torch.bool" in booleans
    assert "have shapes (2, 8), (3, 2), (3, 2); expected (T, D), (T, K) and (T, K)" in shapes[0]
    assert all(error.startswith("rank 1: ") for error in shapes)


def _collectives_and_waits() -> tuple[int, int]:
    """Of a dispatch of good rows: exchanges that start, and tensors that the host reads."""
    layer = random_layer([5, 4, 6, 3], NUM_SLOTS, 3).share(dist.get_rank())
    levels, started, read = _levels("two levels"), [], []
    start, to_list, item = module.start_all_to_all, Tensor.tolist, Tensor.item

    def noted(function, notes):
        return lambda *of, **options: notes.append(function) or function(*of, **options)

    with (
        patch.object(module, "start_all_to_all", noted(start, started)),
        patch.object(Tensor, "tolist", noted(to_list, read)),
        patch.object(Tensor, "item", noted(item, read)),
        patch.object(Tensor, "__bool__", noted(Tensor.__bool__, read)),
        patch.object(Tensor, "nonzero", noted(Tensor.nonzero, read)),
    ):
        dispatch(layer.leaves["x"], layer.leaves["prob"], layer.ids_TK, NUM_SLOTS, levels)
    return len(started), len(read)


def test_good_rows_cost_no_collective_and_no_wait(ranks) -> None:
    """At each level counts are exchanged, tokens are sent, and the host reads the counts."""
    assert ranks(4).run(_collectives_and_waits) == [(4, 2)] * 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_faults_are_those_of_a_loop_over_tokens(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        num_slots, top_k = torch.randint(1, 7, (2,), generator=generator).tolist()
        slot_TK = torch.randint(-1, num_slots + 1, (3, top_k), generator=generator)
        expected = any(
            len(set(row)) < len(row) or min(row) < 0 or max(row) >= num_slots
            for row in slot_TK.tolist()
        )
        assert has_faults(slot_TK.to(dtype), num_slots).item() == expected
    assert not has_faults(torch.zeros(0, 3, dtype=dtype), 4)


def test_no_index_is_memory_that_nobody_wrote() -> None:
    """Whatever is assigned, and however many wide rows the caller passes."""
    block_NK = torch.tensor([[1, 1, 0], [2, 3, 3], [4, 4, 4]])
    assigned = assign(block_NK, 4)

    def poisoned(size: int | tuple[int, ...], like: Tensor) -> Tensor:
        return torch.full(size if isinstance(size, tuple) else (size,), 2**40, dtype=like.dtype)

    with (
        patch.object(Tensor, "new_empty", lambda like, *size, **_: poisoned(math.prod(size), like)),
        patch.object(torch, "empty_like", lambda like, **_: poisoned(tuple(like.shape), like)),
    ):
        brim = build_brim(assigned, int(assigned.counts_B.sum()) + 2)
    for index_W, below in ((brim.wide_W, 6), (brim.source_W, 3), (brim.entry_W, 9)):
        assert 0 <= int(index_W.min()) <= int(index_W.max()) < below
