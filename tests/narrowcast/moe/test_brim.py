"""Condensed BRIMs are Occult's; scattering and merging are adjoint, and sums have one order."""

import pytest
import torch
from torch import Tensor

from narrowcast.moe.brim import (
    Assignments,
    Brim,
    assign,
    build_brim,
    dense_brim,
    merge,
    merge_rows,
    scatter,
)


def random_blocks(num_rows: int, top_k: int, num_blocks: int, num_none: int = 0) -> Tensor:
    """(N, K) blocks, some of them twice in a row."""
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randint(num_blocks + num_none, (num_rows, top_k), generator=generator).clamp(
        max=num_blocks
    )


def built(block_NK: Tensor, num_blocks: int) -> tuple[Assignments, Brim]:
    assigned = assign(block_NK, num_blocks)
    return assigned, build_brim(assigned, int(assigned.counts_B.sum()))


CASES = {
    "blocks twice in a row": (random_blocks(37, 5, 4), 4),
    "none among them": (random_blocks(29, 4, 6, num_none=3), 6),
    "one each": (random_blocks(20, 1, 3), 3),
    "all blocks": (torch.stack([torch.randperm(6) for _ in range(11)]), 6),
    "more assignments than blocks": (random_blocks(9, 7, 2), 2),
    "one block": (torch.zeros(5, 2, dtype=torch.int64), 1),
    "none at all": (torch.full((5, 3), 4), 4),
    "one row": (torch.tensor([[3, 0, 3]]), 4),
    "no rows": (torch.zeros(0, 3, dtype=torch.int64), 4),
    "small integers": (random_blocks(8, 2, 3).to(torch.uint8), 3),
}


@pytest.mark.parametrize(("block_NK", "num_blocks"), CASES.values(), ids=CASES)
def test_a_brim_is_that_of_occults_algorithms(block_NK: Tensor, num_blocks: int) -> None:
    assigned, brim = built(block_NK, num_blocks)
    is_assigned_BN = (block_NK == torch.arange(num_blocks)[:, None, None]).any(dim=2)
    expected_BN = dense_brim(is_assigned_BN)
    assert torch.equal(assigned.counts_B, is_assigned_BN.sum(dim=1))
    assert torch.equal(brim.dense(assigned.counts_B), expected_BN)

    wide = [[w for w in column if w >= 0] for column in expected_BN.T.tolist()]
    assert [w.tolist() for w in brim.wide_W.tensor_split(brim.starts_N)[1:]] == wide
    for row, of_row in enumerate(block_NK.tolist()):
        found = [expected_BN[block, row].item() for block in sorted(of_row) if block < num_blocks]
        assert assigned.wide_NK[row, : len(found)].tolist() == found
    entries = [
        row * block_NK.shape[1] + block_NK[row].tolist().index(block)
        for block, row in is_assigned_BN.nonzero().tolist()
    ]
    assert brim.entry_W.tolist() == entries


def test_occults_algorithm_numbers_rows_block_by_block() -> None:
    is_assigned_BN = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 1]]).bool()
    assert dense_brim(is_assigned_BN).tolist() == [[-1, 0, 1], [-1, -1, -1], [2, -1, 3]]


@pytest.mark.parametrize(("block_NK", "num_blocks"), CASES.values(), ids=CASES)
def test_scattering_and_merging_are_adjoint(block_NK: Tensor, num_blocks: int) -> None:
    """And each is the other's gradient. Of integers: exactly."""
    _, brim = built(block_NK, num_blocks)
    generator = torch.Generator().manual_seed(0)
    narrow_ND, wide_WD = (
        torch.randint(-9, 10, (rows, 3), generator=generator).float().requires_grad_()
        for rows in (len(block_NK), len(brim.source_W))
    )
    scattered_WD, merged_ND = scatter(narrow_ND, brim), merge(wide_WD, brim)
    assert torch.equal(scattered_WD, narrow_ND[brim.source_W])
    assert (scattered_WD * wide_WD).sum() == (narrow_ND * merged_ND).sum()
    scattered_WD.backward(wide_WD.detach())
    merged_ND.backward(narrow_ND.detach())
    assert torch.equal(narrow_ND.grad, merged_ND)
    assert torch.equal(wide_WD.grad, scattered_WD)


def test_replicas_are_added_in_fp32_in_the_order_of_their_blocks() -> None:
    """Whatever order a row's assignments have."""
    _, brim = built(torch.tensor([[2, 0, 1], [1, 2, 0]]), 3)
    large = 2.0**24  # and one more is no fp32 number
    first_ND, last_ND = torch.tensor([[large, 1, 1], [1, 1, large]])[:, :, None].unbind()
    # Wide rows are in the order of blocks: those of row 0 and row 1 alternate.
    wide_WD = torch.stack([first_ND, last_ND], dim=1).flatten(0, 1)
    assert merge(wide_WD, brim).flatten().tolist() == [large, large + 2]

    row_ND = torch.zeros(2, 1, requires_grad=True)
    scatter(row_ND, brim).backward(wide_WD)
    assert row_ND.grad.flatten().tolist() == [large, large + 2]

    # In bf16, 256 + 1 would be 256.
    small_WD = torch.tensor([256.0, 1, 1, 1, 1, 256]).view(6, 1).bfloat16()
    merged_ND = merge(small_WD, brim)
    assert merged_ND.dtype == torch.bfloat16
    assert merged_ND.flatten().tolist() == [258, 258]
    assert merge_rows(small_WD, brim.wide_W, brim.starts_N).dtype == torch.float32


def test_what_no_row_is_merged_from_does_not_reach_it() -> None:
    """Not even NaN."""
    _, brim = built(torch.tensor([[0, 0], [1, 0], [2, 2]]), 2)
    wide_WD = torch.tensor([[1.0], [2.0], [torch.nan]])
    assert merge(wide_WD, brim).nan_to_num(-1).flatten().tolist() == [1, -1, 0]


def test_a_brim_is_built_without_asking_the_device() -> None:
    """A meta tensor has no values to ask for, and raises where a shape depends on them."""
    with torch.device("meta"):
        assigned = assign(torch.zeros(11, 3, dtype=torch.int64), 4)
        brim = build_brim(assigned, 17)
        assert assigned.counts_B.shape == (4,)
        assert assigned.ordinal_NK.shape == assigned.wide_NK.shape == (11, 3)
        assert brim.source_W.shape == brim.entry_W.shape == brim.wide_W.shape == (17,)
        assert brim.starts_N.shape == (11,)
        assert scatter(torch.zeros(11, 2), brim).shape == (17, 2)
        assert merge(torch.zeros(17, 2), brim).shape == (11, 2)


def test_assignments_of_a_row_to_one_block_are_distinguished() -> None:
    assigned = assign(torch.tensor([[2, 0, 2, 2, 3], [3, 1, 0, 1, 0]]), 3)
    assert assigned.block_NK.tolist() == [[0, 2, 2, 2, 3], [0, 0, 1, 1, 3]]
    assert assigned.order_NK.tolist() == [[1, 0, 2, 3, 4], [2, 4, 1, 3, 0]]
    assert assigned.wide_NK[:, :4].tolist() == [[0, 3, 3, 3], [1, 1, 2, 2]]
    assert assigned.ordinal_NK[:, :4].tolist() == [[0, 0, 1, 2], [0, 1, 0, 1]]
