"""Bidirectional Re-Index Matrices: which rows of one token state belong to which rows of another.

Occult (section 3.1, appendix A.2) defines three states of the tokens of an MoE layer,

    ORI   the tokens as the layer receives them, (T, D)
    SFD   a row for each token and rank that holds any of its experts: what is sent, (S, D)
    EPD   a row for each token and expert, which exists within the experts only, (N, F)

and a matrix between each two. BRIM_0 (ranks, T) holds the row in SFD of a token on a rank. BRIM_1
(local experts, S) holds the row in EPD of a row in SFD at an expert. An entry without a row is -1.
Wide rows are numbered block by block (rank by rank, or expert by expert), and by token within each.

    scattering   narrow -> wide    a row is read once for each of its replicas
    merging      wide -> narrow    replicas are summed in fp32, in the order of their blocks

Most entries of a BRIM are -1. ``Brim`` stores the others: O(rows x k), built without a loop over
blocks or rows, and without synchronizing with the device. ``dense_brim`` is the algorithm as the
paper prints it; tests compare ``Brim.dense`` with it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Brim:
    """A BRIM from N narrow rows to W wide rows in B blocks, in compressed form.

    Attributes:
        source_W: (W,) int64, the narrow row that each wide row is a replica of.
        wide_W: (W,) int64, the wide rows of the first narrow row in the order of their blocks, then
            those of the second, and so on.
        starts_N: (N,) int64, where the wide rows of each narrow row start in ``wide_W``.
        entry_W: (W,) int64, the entry of the flat (N, K) assignments that each wide row stands for:
            the first one, where several are in one block.
    """

    source_W: Tensor
    wide_W: Tensor
    starts_N: Tensor
    entry_W: Tensor

    def dense(self, counts_B: Tensor) -> Tensor:
        """Return (B, N) the matrix of the paper, -1 where there is no row.

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
        order_NK: (N, K) int64, the column that each of them had before sorting.
        first_NK: (N, K) bool, whether it is the first assignment of its row to its block.
        counts_B: (B,) int64, wide rows of each block.
        wide_order_M: (N * K,) int64, entries of the flat ``block_NK``: those of the wide rows come
            first, in the order of the wide rows.
    """

    block_NK: Tensor
    order_NK: Tensor
    first_NK: Tensor
    counts_B: Tensor
    wide_order_M: Tensor

    @property
    def wide_NK(self) -> Tensor:
        """(N, K) the wide row of each assignment; undefined where it has none."""
        wide_M = torch.zeros_like(self.wide_order_M)
        wide_M[self.wide_order_M] = torch.arange(len(wide_M), device=wide_M.device)
        index_K = torch.arange(self.block_NK.shape[1], device=wide_M.device)
        return wide_M.view_as(self.block_NK).gather(1, index_K - self.ordinal_NK)

    @property
    def ordinal_NK(self) -> Tensor:
        """(N, K) the index of each assignment among those of its row and block, from 0."""
        index_K = torch.arange(self.block_NK.shape[1], device=self.block_NK.device)
        return index_K - (index_K * self.first_NK).cummax(dim=1).values


def assign(block_NK: Tensor, num_blocks: int) -> Assignments:
    """Assign narrow rows to blocks: ranks (BRIM_0) or local experts (BRIM_1).

    Args:
        block_NK: (N, K) integers, the block of each assignment; ``num_blocks`` for none.
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
    """Return the BRIM of assignments (Occult, algorithms 3 and 5).

    Args:
        assigned: assignments of N rows.
        num_wide: W, the sum of their counts, which the host knows by now.
    """
    top_k = max(assigned.block_NK.shape[1], 1)
    order_W = assigned.wide_order_M[:num_wide]
    source_W = order_W // top_k
    entry_W = source_W * top_k + assigned.order_NK.flatten()[order_W]
    # The first assignments of a row to a block, row by row. The others go to one entry at the end.
    rank_M = assigned.first_NK.flatten().cumsum(0) - 1
    index_M = rank_M.masked_fill(~assigned.first_NK.flatten(), num_wide)
    wide_W = order_W.new_zeros(num_wide + 1).scatter_(0, index_M, assigned.wide_NK.flatten())
    ends_N = assigned.first_NK.sum(dim=1).cumsum(0)
    starts_N = ends_N - assigned.first_NK.sum(dim=1)
    return Brim(source_W, wide_W[:num_wide], starts_N, entry_W)


def dense_brim(is_assigned_BN: Tensor) -> Tensor:
    """Return (B, N) a BRIM by algorithms 3 and 5 of Occult as printed, for tests and readers.

    Args:
        is_assigned_BN: (B, N) bool, whether a row has an assignment to a block.
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
    """Return (W, D) a replica of its narrow row for each wide row."""
    return rows_ND.index_select(0, source_W)


def merge_rows(rows_WD: Tensor, wide_W: Tensor, starts_N: Tensor) -> Tensor:
    """Return (N, D) fp32 the sum of the replicas of each narrow row, added one after the other in
    the order of their blocks. The arguments are those of ``Brim``."""
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
    """Return (W, D) a replica for each wide row. Gradients are merged in fp32."""
    return _Scatter.apply(rows_ND, brim.source_W, brim.wide_W, brim.starts_N)


def merge(rows_WD: Tensor, brim: Brim) -> Tensor:
    """Return (N, D) the sums of the replicas, in fp32 and rounded once. Gradients are scattered."""
    return _Merge.apply(rows_WD, brim.source_W, brim.wide_W, brim.starts_N)
