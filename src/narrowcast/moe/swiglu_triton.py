"""SwiGLU experts over BRIM_1 in Triton.

    x_SD --scattering product: w1, w3, probability--> h_NF --merging product: w2--> y_SD
    SFD                                               EPD                           SFD

The fast path of ``swiglu``, whose x_ND and y_ND (k copies of the tokens) are never materialized
here (Occult, section 3.1 and appendix A.2). ``kernels`` has the kernels; this file launches them.

Saved for backward are x, gate and up, the latter two (N, F). The hidden rows are recomputed.
"""

import math
from typing import Any

import torch
from torch import Tensor

from narrowcast.moe.kernels import (
    merge_product,
    scatter_swiglu,
    scatter_swiglu_backward,
    weight_gradient,
)
from narrowcast.moe.swiglu import ExpertRows

# A program computes a tile of BLOCK x BLOCK, or x NARROW where it holds several of them, and INNER
# terms of its sums at a time. With two bytes a value no tile spills registers, and all fit in
# 99 KiB.
_HALF = {"BLOCK": 128, "INNER": 64, "num_warps": 8, "num_stages": 3}
_FLOAT = {"BLOCK": 32, "INNER": 32, "num_warps": 4, "num_stages": 2}


def swiglu_experts(
    x_SD: Tensor, rows: ExpertRows, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor
) -> Tensor:
    """Return (S, D) for each row the sum of its experts' outputs, weighted by their probabilities.

    It computes what ``swiglu.swiglu_experts`` computes, on a GPU, without x_ND and y_ND.

    Args:
        x_SD: (S, D) rows that arrived, of any row stride. Multiples of 16 bytes are fastest.
        rows: the local experts that they go to.
        w1_eFD, w2_eDF, w3_eFD: contiguous weights of the e local experts; w1 is the gate.

    Raises:
        ValueError: a weight is not contiguous.
    """
    for name, weight in (("w1", w1_eFD), ("w2", w2_eDF), ("w3", w3_eFD)):
        if not weight.is_contiguous():
            raise ValueError(
                f"{name} has strides {tuple(weight.stride())} for shape {tuple(weight.shape)}; the "
                "kernels read contiguous weights: call .contiguous() on it"
            )
    weights = w1_eFD, w2_eDF, w3_eFD
    experts = rows.brim.source_W, rows.offsets_e
    return _SwigluExperts.apply(_readable(x_SD), rows.prob_N, *weights, *experts)


class _SwigluExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        x_SD, prob_N, w1_eFD, w2_eDF, w3_eFD, source_N, offsets_e = tensors
        num_experts, hidden_dim, dim = w1_eFD.shape
        gate_NF, up_NF, hidden_NF = (x_SD.new_empty(len(source_N), hidden_dim) for _ in range(3))
        grid, tiling = _scatter_tiling(source_N, w1_eFD)
        scatter_swiglu[grid](
            x_SD,
            *_stride(x_SD),
            source_N,
            offsets_e,
            prob_N,
            w1_eFD,
            w3_eFD,
            gate_NF,
            up_NF,
            hidden_NF,
            num_experts,
            dim,
            hidden_dim,
            **tiling,
        )
        ctx.save_for_backward(*tensors, gate_NF, up_NF)
        return _merge((hidden_NF,), (w2_eDF,), (1, hidden_dim), x_SD, source_N, offsets_e)

    @staticmethod
    def backward(ctx: Any, grad_y_SD: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, gate_NF, up_NF = ctx.saved_tensors
        x_SD, prob_N, w1_eFD, w2_eDF, w3_eFD, source_N, offsets_e = tensors
        grad_y_SD = _readable(grad_y_SD)
        num_experts, hidden_dim, dim = w1_eFD.shape
        grid, tiling = _scatter_tiling(source_N, w1_eFD)
        grad_gate_NF, grad_up_NF, hidden_NF = (torch.empty_like(gate_NF) for _ in range(3))
        grad_prob_NC = prob_N.new_empty(len(prob_N), grid[0])
        scatter_swiglu_backward[grid](
            grad_y_SD,
            *_stride(grad_y_SD),
            source_N,
            offsets_e,
            prob_N,
            w2_eDF,
            gate_NF,
            up_NF,
            grad_gate_NF,
            grad_up_NF,
            hidden_NF,
            grad_prob_NC,
            num_experts,
            dim,
            hidden_dim,
            **tiling,
        )
        experts = source_N, offsets_e
        gradients, weights = (grad_gate_NF, grad_up_NF), (w1_eFD, w3_eFD)
        return (
            _merge(gradients, weights, (dim, 1), x_SD, *experts),
            grad_prob_NC.sum(dim=1),
            _transposed_product(grad_gate_NF, x_SD, w1_eFD, (dim, 1), *experts),
            _transposed_product(hidden_NF, grad_y_SD, w2_eDF, (1, hidden_dim), *experts),
            _transposed_product(grad_up_NF, x_SD, w3_eFD, (dim, 1), *experts),
            None,
            None,
        )


def _merge(
    wide: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    strides: tuple[int, int],
    x_SD: Tensor,
    source_N: Tensor,
    offsets_e: Tensor,
) -> Tensor:
    """Return (S, D) in the dtype of x: the sum of wide rows (N, F) times weights whose strides
    along F and D are given, merged."""
    merged_SD = torch.zeros(x_SD.shape, dtype=torch.float32, device=x_SD.device)
    num_rows, hidden_dim = wide[0].shape
    dim = x_SD.shape[1]
    tiling = _tiling(x_SD)
    block = tiling["BLOCK"]
    # An expert has at most one row for each row that arrived.
    grid = _cdiv(dim, block), _cdiv(min(len(x_SD), num_rows), block)
    for expert in range(len(offsets_e)):
        merge_product[grid](
            wide,
            weights,
            merged_SD,
            source_N,
            offsets_e,
            expert,
            dim,
            hidden_dim,
            *strides,
            **tiling,
        )
    return merged_SD.to(x_SD.dtype)


def _transposed_product(
    wide_NF: Tensor,
    narrow_SD: Tensor,
    weight: Tensor,
    strides: tuple[int, int],
    source_N: Tensor,
    offsets_e: Tensor,
) -> Tensor:
    """Return the gradient of a weight whose strides along F and D are given."""
    grad = torch.empty_like(weight)
    hidden_dim, dim = wide_NF.shape[1], narrow_SD.shape[1]
    # Rows are loaded by indices that are loaded first: one tile ahead takes two more stages.
    tiling = dict(_tiling(weight))
    tiling["num_stages"] += 2
    block = tiling["BLOCK"]
    grid = _cdiv(dim, block), _cdiv(hidden_dim, block), len(offsets_e)
    weight_gradient[grid](
        wide_NF,
        narrow_SD,
        *_stride(narrow_SD),
        source_N,
        offsets_e,
        grad,
        dim,
        hidden_dim,
        *strides,
        **tiling,
    )
    return grad


def _scatter_tiling(source_N: Tensor, w1_eFD: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return grid and tile sizes of the kernels that scatter, with as many row tiles as the experts
    can need."""
    num_experts, hidden_dim, _ = w1_eFD.shape
    tiling = _tiling(w1_eFD)
    narrow = 64 if w1_eFD.dtype.itemsize == 2 else 32
    grid = _cdiv(hidden_dim, narrow), len(source_N) // tiling["BLOCK"] + num_experts
    return grid, {**tiling, "NARROW": narrow, "EXPERTS": 1 << (num_experts - 1).bit_length()}


def _cdiv(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _tiling(values: Tensor) -> dict[str, int]:
    return _HALF if values.dtype.itemsize == 2 else _FLOAT


def _readable(rows_SD: Tensor) -> Tensor:
    """Return the rows, copied if a row is not contiguous, as in expanded gradients."""
    return rows_SD if rows_SD.stride(1) == 1 else rows_SD.contiguous()


def _stride(rows_SD: Tensor) -> tuple[int, int]:
    """Return the row stride in units, and the unit in elements: 16 bytes, or the largest part of it
    that divides the stride. The compiler must know it to load 16 bytes at a time."""
    unit = math.gcd(rows_SD.stride(0), 16 // rows_SD.dtype.itemsize)
    return rows_SD.stride(0) // unit, unit
