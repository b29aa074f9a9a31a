"""Triton kernels of SwiGLU experts: products that scatter as they read and merge as they write.

``swiglu_triton`` launches them:

    scatter_swiglu            SFD -> EPD    gate, up and the modulated hidden rows
    merge_product             EPD -> SFD    forward: hidden w2; backward: dgate w1 + dup w3
    scatter_swiglu_backward   SFD -> EPD    dgate, dup, dprob, and the hidden rows again
    weight_gradient           EPD, SFD -> weights

Row tiles are cut from the consecutive rows of each expert, so that only the last tiles of the grid
are empty, and these return at once: the host knows N, not the rows of each expert (condensing, in
footnote 2 of Occult). All sums are computed in fp32 and in one order, without atomics: experts are
merged one launch after the other (footnote 3), and within an expert no row occurs twice. Two runs
are bitwise identical.

In the shapes of the kernels M are the rows of a tile, C its columns, and K the terms of a sum.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "the kernels of narrowcast.moe need triton: pip install 'narrowcast[torchtitan]'",
        name=error.name,
    ) from error


@triton.jit
def _rows_of_tile(tile, ends_ptr, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Tiles cover the rows of the experts, one expert after the other. Returns the expert of a tile
    (EXPERTS for none), its first row, its rows (M,), and which of them are the expert's (M,)."""
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
def _rows_of_expert(expert, ends_ptr):
    """Returns where the rows of an expert start and end."""
    return tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0), tl.load(ends_ptr + expert)


@triton.jit
def scatter_swiglu(
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
    """Computes gate, up and p silu(gate) up (EPD) from x (SFD).

    Programs: (column tiles of F, row tiles).
    """
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
def scatter_swiglu_backward(
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
    """Computes the gradients of gate and up, and the hidden rows again (EPD), from the gradient of
    y (SFD). It writes a partial sum of dprob for each column tile, (N, column tiles).

    Programs: (column tiles of F, row tiles).
    """
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
def merge_product(
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
    """Computes a w for the rows of one expert (EPD), summed over the pairs of the two tuples, and
    adds it to their rows of out (SFD, fp32).

    Programs: (column tiles of D, as many row tiles as an expert can have).
    """
    start, end = _rows_of_expert(expert, ends_ptr)
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
def weight_gradient(
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
    """Computes the gradient of a weight whose strides are given: the wide rows of each expert (EPD,
    F), transposed, times the narrow rows (SFD, D) that they belong to, row after row. It is zero
    for an expert without rows.

    Programs: (tiles of D, tiles of F, experts).
    """
    expert = tl.program_id(2)
    start, end = _rows_of_expert(expert, ends_ptr)
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
