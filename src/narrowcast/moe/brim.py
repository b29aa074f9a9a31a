"""Bidirectional Re-Index Matrices: which rows of one token state come of which rows of another.

Occult (section 3.1, appendix A.2) has three states of the tokens of an MoE layer,

    ORI   tokens as the layer gets them, (T, D)
    SFD   a row for each token and rank that holds any of its experts: what crosses the wire, (S, D)
    EPD   a row for each token and expert, within the experts alone, (N, F)

and a matrix between each two: BRIM_0 (ranks, T) holds the row in SFD of a token on a rank, BRIM_1
(local experts, S) the row in EPD of a row in SFD at an expert, and -1 where there is none. Wide
rows are numbered block by block (rank by rank, expert by expert), tokens in order in each.

    scattering   narrow -> wide    a row is read once for each of its replicas
    merging      wide -> narrow    replicas are added up, in fp32, in the order of their blocks

Most of a BRIM is -1. `Brim` holds the rest, condensed: O(rows x k), built without a loop over
blocks or rows, and without asking the device for anything. `dense_brim` is the paper's algorithm
as it stands, which `Brim.dense` is tested against.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Brim:
    """A BRIM from N narrow rows to W wide ones in B blocks, condensed.

    Attributes:
        source_W: (W,) int64, the narrow row that each wide row is a replica of.
        wide_W: (W,) int64, the wide rows of the first narrow row in the order of their blocks, then
            those of the second, and so on.
        starts_N: (N,) int64, where those of each narrow row start in `wide_W`.
        entry_W: (W,) int64, the place in the flat (N, K) assignments that each wide row stands for:
            of several in one block, the first.
    """

    source_W: Tensor
    wide_W: Tensor
    starts_N: Tensor
    entry_W: Tensor

    def dense(self, counts_B: Tensor) -> Tensor:
        """(B, N) as the paper has it, -1 for no row.

        Args:
            counts_B: (B,) wide rows of each block.
        """
        num_wide = len(self.source_W)
        brim_BN = torch.full((len(counts_B), len(self.starts_N)), -1)
        block_W = torch.arange(len(counts_B)).repeat_interleave(counts_B.cpu())
        brim_BN[block_W, self.source_W.cpu()] = torch.arange(num_wide)
        return brim_BN


@dataclass(frozen=True)
class Assignments:
    """Narrow rows assigned to blocks, before the host knows how many wide rows there are.

    Attributes:
        block_NK: (N, K) int64, the blocks of each row, ascending; B for none.
        order_NK: (N, K) int64, where each of them stood before.
        first_NK: (N, K) bool, whether it is the first of its block.
        counts_B: (B,) int64, wide rows of each block.
        wide_order_M: (N * K,) int64, places in the flat `block_NK`: of wide rows first, in order.
    """

    block_NK: Tensor
    order_NK: Tensor
    first_NK: Tensor
    counts_B: Tensor
    wide_order_M: Tensor

    @property
    def wide_NK(self) -> Tensor:
        """(N, K) the wide row of each assignment; of no meaning where it has none."""
        wide_M = torch.zeros_like(self.wide_order_M)
        wide_M[self.wide_order_M] = torch.arange(len(wide_M), device=wide_M.device)
        index_K = torch.arange(self.block_NK.shape[1], device=wide_M.device)
        return wide_M.view_as(self.block_NK).gather(1, index_K - self.place_NK)

    @property
    def place_NK(self) -> Tensor:
        """(N, K) which of the assignments of its row and block each one is, from 0."""
        index_K = torch.arange(self.block_NK.shape[1], device=self.block_NK.device)
        return index_K - (index_K * self.first_NK).cummax(dim=1).values


def assign(block_NK: Tensor, num_blocks: int) -> Assignments:
    """Assign narrow rows to blocks: ranks (BRIM_0) or local experts (BRIM_1).

    Args:
        block_NK: (N, K) integers, the block of each assignment; `num_blocks` for none.
        num_blocks: B.
    """
    block_NK, order_NK = block_NK.long().sort(dim=1, stable=True)
    first_NK = block_NK < num_blocks
    first_NK[:, 1:] &= block_NK[:, 1:] != block_NK[:, :-1]
    key_M = torch.where(first_NK, block_NK, num_blocks).flatten()
    counts = key_M.new_zeros(num_blocks + 1).scatter_add_(0, key_M, torch.ones_like(key_M))
    return Assignments(
        block_NK, order_NK, first_NK, counts[:num_blocks], key_M.argsort(stable=True)
    )


def build_brim(assigned: Assignments, num_wide: int) -> Brim:
    """The BRIM of assignments (Occult, algorithms 3 and 5).

    Args:
        assigned: of N rows.
        num_wide: W, the sum of its counts, which the host knows by now.
    """
    top_k = max(assigned.block_NK.shape[1], 1)
    order_W = assigned.wide_order_M[:num_wide]
    source_W = order_W // top_k
    entry_W = source_W * top_k + assigned.order_NK.flatten()[order_W]
    # The first assignments in a row and block, row by row; the others go to one place at the end.
    rank_M = assigned.first_NK.flatten().cumsum(0) - 1
    place_M = rank_M.masked_fill(~assigned.first_NK.flatten(), num_wide)
    wide_W = order_W.new_zeros(num_wide + 1).scatter_(0, place_M, assigned.wide_NK.flatten())
    ends_N = assigned.first_NK.sum(dim=1).cumsum(0)
    starts_N = ends_N - assigned.first_NK.sum(dim=1)
    return Brim(source_W, wide_W[:num_wide], starts_N, entry_W)


def dense_brim(is_assigned_BN: Tensor) -> Tensor:
    """(B, N) a BRIM by Occult's algorithms 3 and 5 to the letter, for tests and reading.

    Args:
        is_assigned_BN: (B, N) bool, whether a row has an assignment in a block.
    """
    brim_BN = torch.full(is_assigned_BN.shape, -1)
    counter = 0
    for block, is_assigned_N in enumerate(is_assigned_BN.tolist()):
        for row, is_assigned in enumerate(is_assigned_N):
            if is_assigned:
                brim_BN[block, row] = counter
                counter += 1
    return brim_BN


def scatter_rows(rows_ND: Tensor, source_W: Tensor) -> Tensor:
    """(W, D) a replica of its narrow row for each wide one."""
    return rows_ND.index_select(0, source_W)


def merge_rows(rows_WD: Tensor, wide_W: Tensor, starts_N: Tensor) -> Tensor:
    """(N, D) fp32, the sum of each narrow row's replicas, added one after the other in the order of
    their blocks. Arguments as in `Brim`."""
    if rows_WD.numel() == 0 or len(starts_N) == 0:
        return rows_WD.new_zeros(len(starts_N), rows_WD.shape[1], dtype=torch.float32)
    return F.embedding_bag(wide_W, rows_WD.float(), starts_N, mode="sum")


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, source_W: Tensor, wide_W: Tensor, starts_N: Tensor
    ) -> Tensor:
        ctx.save_for_backward(wide_W, starts_N)
        return scatter_rows(rows_ND, source_W)

    @staticmethod
    def backward(ctx: Any, grad_WD: Tensor) -> tuple[Tensor, None, None, None]:
        return merge_rows(grad_WD, *ctx.saved_tensors).to(grad_WD.dtype), None, None, None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_WD: Tensor, source_W: Tensor, wide_W: Tensor, starts_N: Tensor
    ) -> Tensor:
        ctx.save_for_backward(source_W)
        return merge_rows(rows_WD, wide_W, starts_N).to(rows_WD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        return scatter_rows(grad_ND, *ctx.saved_tensors), None, None, None


def scatter(rows_ND: Tensor, brim: Brim) -> Tensor:
    """(W, D) scattering: a replica for each wide row. Gradients are merged, in fp32."""
    return _Scatter.apply(rows_ND, brim.source_W, brim.wide_W, brim.starts_N)


def merge(rows_WD: Tensor, brim: Brim) -> Tensor:
    """(N, D) merging: replicas added up in fp32 and rounded once. Gradients are scattered."""
    return _Merge.apply(rows_WD, brim.source_W, brim.wide_W, brim.starts_N)
