"""SwiGLU experts over BRIM_1 give sums of experts' outputs and their gradients, as fp64 does."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from narrowcast.moe.brim import assign, build_brim
from narrowcast.moe.swiglu import ExpertRows, modulated_swiglu, swiglu_experts
from tests.narrowcast.moe.moe_layer import MoELayer, error, fresh, random_layer, results


def activations(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Gate, up, probabilities and a gradient; gates from where silu is 0 to where it is linear."""
    generator = torch.Generator().manual_seed(0)
    gate_NF, up_NF, grad_NF = (
        torch.randn(64, 96, generator=generator).mul(scale).to(dtype) for scale in (5, 1, 1)
    )
    gate_NF[0, :4] = torch.tensor([-100, 100, 0, -0.0])
    return gate_NF, up_NF, torch.rand(64, generator=generator), grad_NF


@pytest.mark.parametrize(
    ("dtype", "half_unit"), [(torch.float32, 2.0**-21), (torch.bfloat16, 2.0**-8)], ids=str
)
def test_modulated_swiglu_and_its_gradients_are_rounded_once(
    dtype: torch.dtype, half_unit: float
) -> None:
    """To half a unit in the last place; in fp32, of which torch's own are made, to a few."""
    *inputs, grad_NF = activations(dtype)
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    hidden_NF = modulated_swiglu(*ours)
    hidden_NF.backward(grad_NF.clone())
    exact_NF = F.silu(exact[0]) * exact[1] * exact[2][:, None]
    exact_NF.backward(grad_NF.double())
    found = [hidden_NF.detach(), *(leaf.grad for leaf in ours)]
    expected = [exact_NF.detach(), *(leaf.grad for leaf in exact)]
    assert [result.dtype for result in found] == [dtype, dtype, dtype, torch.float32]
    for result, exactly in zip(found[:3], expected[:3], strict=True):
        # The slope of silu passes through zero.
        torch.testing.assert_close(result.double(), exactly, rtol=half_unit, atol=2.0**-20)
    torch.testing.assert_close(found[3].double(), expected[3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_leaves_the_gradient_that_comes_in_as_it_is(dtype: torch.dtype) -> None:
    """Others may read it too, or it may be one value for all."""
    *inputs, grad_NF = activations(dtype)
    before_NF = grad_NF.clone()
    modulated_swiglu(*(tensor.requires_grad_() for tensor in inputs)).backward(grad_NF)
    assert torch.equal(grad_NF, before_NF)
    modulated_swiglu(*inputs).sum().backward()


def test_modulated_swiglu_saves_its_inputs_for_backward_and_nothing_else() -> None:
    inputs = [tensor.requires_grad_() for tensor in activations(torch.bfloat16)[:3]]
    saved: list[int] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor.data_ptr()), lambda _: None):
        modulated_swiglu(*inputs)
    assert sorted(saved) == sorted(tensor.data_ptr() for tensor in inputs)


def by_experts(layer: MoELayer) -> dict[str, Tensor]:
    """The layer as rows that arrived at one rank, in a message with other bytes beside them."""
    leaves = fresh(layer.leaves)
    assigned = assign(layer.ids_TK, layer.num_experts)
    brim = build_brim(assigned, int(assigned.counts_B.sum()))
    offsets_e = assigned.counts_B.cumsum(0, dtype=torch.int32)
    message_SD = F.pad(leaves["x"], (0, 8))
    x_SD = message_SD[:, :-8]
    rows = ExpertRows(brim, offsets_e, leaves["prob"])
    y_SD = swiglu_experts(x_SD, rows, *(leaves[name] for name in ("w1", "w2", "w3")))
    return results(y_SD, leaves, layer.grad_y_TD)


LAYERS = {
    "some places taken by none": random_layer([37], 6, 4, allowed=(0, 1, 2, 3, 4, 5, 6)),
    "experts without rows": random_layer([19], 6, 2, allowed=(1, 4)),
    "every expert": random_layer([9], 5, 5),
    "one expert": random_layer([9], 1, 1),
    "no row for any expert": random_layer([4], 6, 1, allowed=(6,)),
    "no rows": random_layer([0], 6, 2),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_experts_give_what_fp64_gives(layer: MoELayer) -> None:
    exact = layer.exact()
    for name, result in by_experts(layer).items():
        assert result.dtype == torch.float32, name
        assert error(result, exact[name]) < 1e-6, name


def test_experts_without_rows_have_zero_gradients() -> None:
    gradients = by_experts(LAYERS["experts without rows"])
    for name in ("w1", "w2", "w3"):
        has_rows = gradients[name].flatten(1).ne(0).any(dim=1)
        assert has_rows.tolist() == [False, True, False, False, True, False]


def test_widths_that_the_grouped_product_does_not_take_are_named() -> None:
    x_SD, w1_eFD, w2_eDF = torch.ones(2, 8), torch.ones(1, 12, 8), torch.ones(1, 8, 12)
    assigned = assign(torch.zeros(2, 1, dtype=torch.long), 1)
    rows = ExpertRows(build_brim(assigned, 2), assigned.counts_B.int(), torch.ones(2, 1))
    half = [tensor.bfloat16() for tensor in (x_SD, w1_eFD, w2_eDF, w1_eFD)]
    with pytest.raises(ValueError, match=r"\(1, 12, 8\).* multiples of 8"):
        swiglu_experts(half[0], rows, *half[1:])
    assert swiglu_experts(x_SD, rows, w1_eFD, w2_eDF, w1_eFD).shape == (2, 8)
