"""SwiGLU experts over BRIM_1 in Triton: products that scatter as they read and merge as they write.

    x_SD --scattering product: w1, w3, probability--> h_NF --merging product: w2--> y_SD
    SFD                                               EPD                           SFD

The fast path of `swiglu.py`, whose x_ND and y_ND (k copies of the tokens) never exist here (Occult,
section 3.1 and appendix A.2). Four kernels:

    _scatter_swiglu            SFD -> EPD    gate, up and the modulated hidden rows
    _merge_product             EPD -> SFD    forward: hidden w2; backward: dgate w1 + dup w3
    _scatter_swiglu_backward   SFD -> EPD    dgate, dup, dprob, and the hidden rows again
    _weight_gradient           EPD, SFD -> weights

Kept for backward are x, gate and up: two (N, F) tensors. Hidden rows are made again.

Tiles are cut from each expert's own run of rows, so that none is empty but for the last ones of the
grid, which end at once: the host knows N, not what each expert has (footnote 2's condensing). All
sums are made in fp32 and in one order, without atomics: experts are merged one launch after the
other (footnote 3), and within an expert no row occurs twice. Two runs repeat to the bit.

In the kernels' shapes M are the rows of a tile, C its columns, K what is summed over.
"""

import math
from typing import Any

import torch
from torch import Tensor

from narrowcast.moe.swiglu import ExpertRows

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "the kernels of narrowcast.moe need triton: pip install 'narrowcast[torchtitan]'",
        name=error.name,
    ) from error

# A program makes a tile of BLOCK x BLOCK, or x NARROW where it holds several of them, INNER terms
# of its sums at a time. With two bytes a value none spills registers, and all fit in 99 KiB.
_HALF = {"BLOCK": 128, "INNER": 64, "num_warps": 8, "num_stages": 3}
_FLOAT = {"BLOCK": 32, "INNER": 32, "num_warps": 4, "num_stages": 2}


@triton.jit
def _rows_of_tile(tile, ends_ptr, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Tiles cover the experts' runs of rows, one expert after the other. Returns the tile's expert,
    EXPERTS for none, its first row, its rows (M,) and which of them are its expert's (M,)."""
    expert_E = tl.arange(0, EXPERTS)
    is_expert_E = expert_E < num_experts
    end_E = tl.load(ends_ptr + expert_E, mask=is_expert_E, other=0)
    start_E = tl.load(ends_ptr + expert_E - 1, mask=is_expert_E & (expert_E > 0), other=0)
    tiles_E = tl.cdiv(end_E - start_E, BLOCK)
    tile_end_E = tl.cumsum(tiles_E)
    expert = tl.sum((tile_end_E <= tile).to(tl.int32))
    first_row_E = start_E + (tile - tile_end_E + tiles_E) * BLOCK
    first_row = tl.sum(tl.where(expert_E == expert, first_row_E, 0))
    row_M = first_row + tl.arange(0, BLOCK)
    return expert, first_row, row_M, row_M < tl.sum(tl.where(expert_E == expert, end_E, 0))


@triton.jit
def _run_of_expert(expert, ends_ptr):
    """Where an expert's rows start and end."""
    return tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0), tl.load(ends_ptr + expert)


@triton.jit
def _scatter_swiglu(
    x_ptr,
    x_stride,
    STRIDE_UNIT: tl.constexpr,
    source_ptr,
    ends_ptr,
    prob_ptr,
    w1_ptr,
    w3_ptr,
    gate_ptr,
    up_ptr,
    hidden_ptr,
    num_experts,
    dim,
    hidden_dim,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    INNER: tl.constexpr,
):
    """x (SFD) -> gate, up and p silu(gate) up (EPD). Programs: (column tiles of F, row tiles)."""
    expert, first_row, row_M, is_row_M = _rows_of_tile(
        tl.program_id(1), ends_ptr, num_experts, BLOCK, EXPERTS
    )
    if expert == EXPERTS:
        return
    f_C = tl.program_id(0) * NARROW + tl.arange(0, NARROW)
    is_f_C = f_C < hidden_dim
    source_M = tl.load(source_ptr + row_M, mask=is_row_M, other=0)
    x_ptr_M = x_ptr + source_M * (x_stride * STRIDE_UNIT)
    weight = expert.to(tl.int64) * dim * hidden_dim
    gate_MC = tl.zeros((BLOCK, NARROW), tl.float32)
    up_MC = tl.zeros((BLOCK, NARROW), tl.float32)
    for first in range(0, dim, INNER):
        d_K = first + tl.arange(0, INNER)
        is_d_K = d_K < dim
        x_mask_MK = is_row_M[:, None] & is_d_K[None, :]
        x_MK = tl.load(x_ptr_M[:, None] + d_K[None, :], mask=x_mask_MK, other=0.0)
        at_KC = f_C[None, :] * dim + d_K[:, None]
        mask_KC = is_d_K[:, None] & is_f_C[None, :]
        w1_KC = tl.load(w1_ptr + weight + at_KC, mask=mask_KC, other=0.0)
        w3_KC = tl.load(w3_ptr + weight + at_KC, mask=mask_KC, other=0.0)
        gate_MC = tl.dot(x_MK, w1_KC, gate_MC, input_precision="ieee")
        up_MC = tl.dot(x_MK, w3_KC, up_MC, input_precision="ieee")
    prob_M = tl.load(prob_ptr + row_M, mask=is_row_M, other=0.0)
    hidden_MC = gate_MC * tl.sigmoid(gate_MC) * up_MC * prob_M[:, None]
    start = first_row.to(tl.int64) * hidden_dim
    at_MC = tl.arange(0, BLOCK)[:, None] * hidden_dim + f_C[None, :]
    mask_MC = is_row_M[:, None] & is_f_C[None, :]
    dtype = gate_ptr.dtype.element_ty
    tl.store(gate_ptr + start + at_MC, gate_MC.to(dtype), mask=mask_MC)
    tl.store(up_ptr + start + at_MC, up_MC.to(dtype), mask=mask_MC)
    tl.store(hidden_ptr + start + at_MC, hidden_MC.to(dtype), mask=mask_MC)


@triton.jit
def _scatter_swiglu_backward(
    grad_y_ptr,
    grad_y_stride,
    STRIDE_UNIT: tl.constexpr,
    source_ptr,
    ends_ptr,
    prob_ptr,
    w2_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    hidden_ptr,
    grad_prob_ptr,
    num_experts,
    dim,
    hidden_dim,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
    INNER: tl.constexpr,
):
    """The gradient of y (SFD) -> those of gate and up, and the hidden rows again (EPD). dprob comes
    as a sum for each column tile, (N, column tiles). Programs: (column tiles of F, row tiles)."""
    expert, first_row, row_M, is_row_M = _rows_of_tile(
        tl.program_id(1), ends_ptr, num_experts, BLOCK, EXPERTS
    )
    if expert == EXPERTS:
        return
    f_C = tl.program_id(0) * NARROW + tl.arange(0, NARROW)
    is_f_C = f_C < hidden_dim
    source_M = tl.load(source_ptr + row_M, mask=is_row_M, other=0)
    grad_y_ptr_M = grad_y_ptr + source_M * (grad_y_stride * STRIDE_UNIT)
    w2_ptr += expert.to(tl.int64) * dim * hidden_dim
    grad_hidden_MC = tl.zeros((BLOCK, NARROW), tl.float32)
    for first in range(0, dim, INNER):
        d_K = first + tl.arange(0, INNER)
        is_d_K = d_K < dim
        grad_mask_MK = is_row_M[:, None] & is_d_K[None, :]
        grad_y_MK = tl.load(grad_y_ptr_M[:, None] + d_K[None, :], mask=grad_mask_MK, other=0.0)
        mask_KC = is_d_K[:, None] & is_f_C[None, :]
        w2_KC = tl.load(w2_ptr + d_K[:, None] * hidden_dim + f_C[None, :], mask=mask_KC, other=0.0)
        grad_hidden_MC = tl.dot(grad_y_MK, w2_KC, grad_hidden_MC, input_precision="ieee")
    start = first_row.to(tl.int64) * hidden_dim
    at_MC = tl.arange(0, BLOCK)[:, None] * hidden_dim + f_C[None, :]
    mask_MC = is_row_M[:, None] & is_f_C[None, :]
    gate_MC = tl.load(gate_ptr + start + at_MC, mask=mask_MC, other=0.0).to(tl.float32)
    up_MC = tl.load(up_ptr + start + at_MC, mask=mask_MC, other=0.0).to(tl.float32)
    prob_MC = tl.load(prob_ptr + row_M, mask=is_row_M, other=0.0)[:, None]
    sigmoid_MC = tl.sigmoid(gate_MC)
    silu_MC = gate_MC * sigmoid_MC
    slope_MC = sigmoid_MC * (1 + gate_MC * (1 - sigmoid_MC))
    grad_prob_M = tl.sum(grad_hidden_MC * silu_MC * up_MC, axis=1)
    grad_prob_ptr_M = grad_prob_ptr + row_M * tl.num_programs(0) + tl.program_id(0)
    tl.store(grad_prob_ptr_M, grad_prob_M, mask=is_row_M)
    grad_hidden_MC *= prob_MC
    grad_gate_MC = grad_hidden_MC * up_MC * slope_MC
    grad_up_MC = grad_hidden_MC * silu_MC
    hidden_MC = silu_MC * up_MC * prob_MC
    dtype = gate_ptr.dtype.element_ty
    tl.store(grad_gate_ptr + start + at_MC, grad_gate_MC.to(dtype), mask=mask_MC)
    tl.store(grad_up_ptr + start + at_MC, grad_up_MC.to(dtype), mask=mask_MC)
    tl.store(hidden_ptr + start + at_MC, hidden_MC.to(dtype), mask=mask_MC)


@triton.jit(do_not_specialize=["expert"])
def _merge_product(
    a_ptrs,
    w_ptrs,
    out_ptr,
    source_ptr,
    ends_ptr,
    expert,
    dim,
    hidden_dim,
    f_stride,
    d_stride,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """a w, summed over the pairs of the two tuples, of one expert's rows (EPD), added to their rows
    of out (SFD, fp32). Programs: (column tiles of D, as many row tiles as there can be)."""
    start, end = _run_of_expert(expert, ends_ptr)
    first_row = start + tl.program_id(1) * BLOCK
    if first_row >= end:
        return
    index_M = tl.arange(0, BLOCK)
    is_row_M = first_row + index_M < end
    d_C = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_d_C = d_C < dim
    a_start = first_row.to(tl.int64) * hidden_dim
    weight = tl.cast(expert, tl.int64) * dim * hidden_dim
    sum_MC = tl.zeros((BLOCK, BLOCK), tl.float32)
    for pair in tl.static_range(len(a_ptrs)):
        for first in range(0, hidden_dim, INNER):
            f_K = first + tl.arange(0, INNER)
            is_f_K = f_K < hidden_dim
            a_ptr_MK = a_ptrs[pair] + a_start + index_M[:, None] * hidden_dim + f_K[None, :]
            a_MK = tl.load(a_ptr_MK, mask=is_row_M[:, None] & is_f_K[None, :], other=0.0)
            w_ptr_KC = w_ptrs[pair] + weight + f_K[:, None] * f_stride + d_C[None, :] * d_stride
            w_KC = tl.load(w_ptr_KC, mask=is_f_K[:, None] & is_d_C[None, :], other=0.0)
            sum_MC = tl.dot(a_MK, w_KC, sum_MC, input_precision="ieee")
    source_M = tl.load(source_ptr + first_row + index_M, mask=is_row_M, other=0)
    out_ptr_MC = out_ptr + source_M[:, None] * dim + d_C[None, :]
    mask_MC = is_row_M[:, None] & is_d_C[None, :]
    tl.store(out_ptr_MC, tl.load(out_ptr_MC, mask=mask_MC, other=0.0) + sum_MC, mask=mask_MC)


@triton.jit
def _weight_gradient(
    wide_ptr,
    narrow_ptr,
    narrow_stride,
    STRIDE_UNIT: tl.constexpr,
    source_ptr,
    ends_ptr,
    out_ptr,
    dim,
    hidden_dim,
    f_stride,
    d_stride,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
):
    """An expert's wide rows (EPD, F) transposed, times the narrow rows (SFD, D) that they belong
    to, row after row: the gradient of a weight whose strides are given, zeros for an expert without
    rows. Programs: (tiles of D, tiles of F, experts)."""
    expert = tl.program_id(2)
    start, end = _run_of_expert(expert, ends_ptr)
    f_M = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d_C = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_f_M = f_M < hidden_dim
    is_d_C = d_C < dim
    sum_MC = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in range(start, end, INNER):
        row_K = first + tl.arange(0, INNER)
        is_row_K = row_K < end
        source_K = tl.load(source_ptr + row_K, mask=is_row_K, other=0)
        wide_ptr_MK = wide_ptr + row_K.to(tl.int64)[None, :] * hidden_dim + f_M[:, None]
        wide_MK = tl.load(wide_ptr_MK, mask=is_f_M[:, None] & is_row_K[None, :], other=0.0)
        narrow_ptr_K = narrow_ptr + source_K * (narrow_stride * STRIDE_UNIT)
        narrow_mask_KC = is_row_K[:, None] & is_d_C[None, :]
        narrow_KC = tl.load(narrow_ptr_K[:, None] + d_C[None, :], mask=narrow_mask_KC, other=0.0)
        sum_MC = tl.dot(wide_MK, narrow_KC, sum_MC, input_precision="ieee")
    out_ptr_MC = out_ptr + expert.to(tl.int64) * dim * hidden_dim
    out_ptr_MC += f_M[:, None] * f_stride + d_C[None, :] * d_stride
    mask_MC = is_f_M[:, None] & is_d_C[None, :]
    tl.store(out_ptr_MC, sum_MC.to(out_ptr.dtype.element_ty), mask=mask_MC)


def swiglu_experts(
    x_SD: Tensor, rows: ExpertRows, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor
) -> Tensor:
    """(S, D) for each row the sum of its local experts' outputs, weighted by their probabilities.

    Does what `swiglu.swiglu_experts` does, on a GPU, without holding x_ND or y_ND.

    Args:
        x_SD: (S, D) rows that arrived, of any row stride; fastest where that is a multiple of 16
            bytes.
        rows: which experts they go to.
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
    places = rows.brim.source_W, rows.offsets_e
    return _SwigluExperts.apply(_readable(x_SD), rows.prob_N, *weights, *places)


class _SwigluExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        x_SD, prob_N, w1_eFD, w2_eDF, w3_eFD, source_N, offsets_e = tensors
        num_experts, hidden_dim, dim = w1_eFD.shape
        gate_NF, up_NF, hidden_NF = (x_SD.new_empty(len(source_N), hidden_dim) for _ in range(3))
        grid, tiling = _scatter_tiling(source_N, w1_eFD)
        _scatter_swiglu[grid](
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
        _scatter_swiglu_backward[grid](
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
    """(S, D) in x's dtype, the sum of wide rows (N, F) times weights whose strides along F and D
    are given, merged."""
    merged_SD = torch.zeros(x_SD.shape, dtype=torch.float32, device=x_SD.device)
    num_rows, hidden_dim = wide[0].shape
    dim = x_SD.shape[1]
    tiling = _tiling(x_SD)
    block = tiling["BLOCK"]
    # An expert has at most one row of each that arrived.
    grid = triton.cdiv(dim, block), triton.cdiv(min(len(x_SD), num_rows), block)
    for expert in range(len(offsets_e)):
        _merge_product[grid](
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
    """The gradient of a weight whose strides along F and D are given."""
    grad = torch.empty_like(weight)
    hidden_dim, dim = wide_NF.shape[1], narrow_SD.shape[1]
    # Rows are loaded by numbers that are loaded: two more stages are one more tile ahead.
    tiling = dict(_tiling(weight))
    tiling["num_stages"] += 2
    block = tiling["BLOCK"]
    grid = triton.cdiv(dim, block), triton.cdiv(hidden_dim, block), len(offsets_e)
    _weight_gradient[grid](
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
    """Grid and sizes of the kernels that scatter: as many row tiles as the experts can need."""
    num_experts, hidden_dim, _ = w1_eFD.shape
    tiling = _tiling(w1_eFD)
    narrow = 64 if w1_eFD.dtype.itemsize == 2 else 32
    grid = triton.cdiv(hidden_dim, narrow), len(source_N) // tiling["BLOCK"] + num_experts
    return grid, {**tiling, "NARROW": narrow, "EXPERTS": triton.next_power_of_2(num_experts)}


def _tiling(values: Tensor) -> dict[str, int]:
    return _HALF if values.dtype.itemsize == 2 else _FLOAT


def _readable(rows_SD: Tensor) -> Tensor:
    """Itself, or a copy where a row is not contiguous, as in gradients that were expanded."""
    return rows_SD if rows_SD.stride(1) == 1 else rows_SD.contiguous()


def _stride(rows_SD: Tensor) -> tuple[int, int]:
    """The row stride in units of 16 bytes, or what divides it, and the unit in elements: what the
    compiler must know to load 16 bytes at a time."""
    unit = math.gcd(rows_SD.stride(0), 16 // rows_SD.dtype.itemsize)
    return rows_SD.stride(0) // unit, unit
