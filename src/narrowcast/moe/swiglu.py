"""SwiGLU experts over BRIM_1 in plain torch: from received rows (SFD) to one partial sum a row.

    x_SD --scatter--> x_ND --w1, w3--> h_NF --probability--> h_NF --w2--> y_ND --merge--> y_SD

Routing probabilities are applied to the intermediate tokens, as in Occult (algorithms 2 and 7), so
that the outputs of a row are already summed: y is the sum over its local experts of
w2 (p silu(w1 x) w3 x). This is the reference of ``swiglu_triton``, which materializes neither x_ND
nor y_ND.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowcast.moe.brim import Brim, merge, scatter


@dataclass(frozen=True)
class ExpertRows:
    """Which rows of a rank go to which of its e experts.

    Attributes:
        brim: BRIM_1, from the S rows that arrived to N rows, one for each row and expert.
        offsets_e: (e,) int32, where the rows of each expert end among the N.
        prob_SJ: (S, J) fp32 routing probabilities, to which the entries of ``brim.entry_W`` refer.
            Autograd tracks them.
    """

    brim: Brim
    offsets_e: Tensor
    prob_SJ: Tensor

    @property
    def prob_N(self) -> Tensor:
        """(N,) the probability of each row at its expert."""
        return self.prob_SJ.flatten()[self.brim.entry_W]


def modulated_swiglu(gate_NF: Tensor, up_NF: Tensor, prob_N: Tensor) -> Tensor:
    """Return (N, F) p silu(gate) up, computed in fp32 and rounded once. Only its inputs are saved
    for backward."""
    return _ModulatedSwiglu.apply(gate_NF, up_NF, prob_N)


def swiglu_experts(
    x_SD: Tensor, rows: ExpertRows, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor
) -> Tensor:
    """Return (S, D) for each row the sum of its experts' outputs, weighted by their probabilities.

    Args:
        x_SD: (S, D) rows that arrived, in the dtype of the weights.
        rows: the local experts that they go to.
        w1_eFD, w2_eDF, w3_eFD: weights of the e local experts; w1 is the gate.

    Raises:
        ValueError: torch's grouped product does not support the width D or F.
    """
    multiple = 16 // w1_eFD.element_size()
    if any(width % multiple for width in w1_eFD.shape[1:]):
        raise ValueError(
            f"w1 has shape {tuple(w1_eFD.shape)}: torch's grouped product in {w1_eFD.dtype} needs "
            f"rows of a multiple of 16 bytes: pad D and F to multiples of {multiple}"
        )
    x_ND = scatter(x_SD, rows.brim)
    gate_NF = grouped_mm(x_ND, w1_eFD, rows.offsets_e)
    up_NF = grouped_mm(x_ND, w3_eFD, rows.offsets_e)
    hidden_NF = modulated_swiglu(gate_NF, up_NF, rows.prob_N)
    return merge(grouped_mm(hidden_NF, w2_eDF, rows.offsets_e), rows.brim)


def grouped_mm(x_NI: Tensor, weight_eOI: Tensor, offsets_e: Tensor) -> Tensor:
    """Return (N, O) each row times the transposed weight of its expert, as in torchtitan."""
    return F.grouped_mm(x_NI, weight_eOI.transpose(-2, -1), offs=offsets_e)


class _ModulatedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_NF: Tensor, up_NF: Tensor, prob_N: Tensor) -> Tensor:
        ctx.save_for_backward(gate_NF, up_NF, prob_N)
        hidden_NF = F.silu(gate_NF.float()).mul_(up_NF).mul_(prob_N[:, None])
        return hidden_NF.to(gate_NF.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate_NF, up_NF, prob_N = ctx.saved_tensors
        gate32_NF = gate_NF.float()
        grad_NF = grad_NF.float()
        silu_NF = F.silu(gate32_NF).mul_(grad_NF)
        grad_prob_N = (silu_NF * up_NF).sum(dim=1)
        grad_up_NF = silu_NF.mul_(prob_N[:, None]).to(up_NF.dtype)
        grad_NF = (grad_NF * up_NF).mul_(prob_N[:, None])
        grad_gate_NF = torch.ops.aten.silu_backward(grad_NF, gate32_NF).to(gate_NF.dtype)
        return grad_gate_NF, grad_up_NF, grad_prob_N
