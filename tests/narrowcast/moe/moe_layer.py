"""An MoE layer of SwiGLU experts: whole, in fp64, and over ranks, with deduplicated tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from narrowcast.moe.dispatch import Dispatched, combine, dispatch
from narrowcast.moe.hop import Counter, Level, count_nothing, one_level, two_levels
from narrowcast.moe.swiglu import swiglu_experts

Results = dict[str, Tensor]
"""Of a forward and a backward: y, and the gradients of x, prob, w1, w2 and w3, or None."""
Levels = tuple[Level, ...]
Experts = Callable[[Dispatched, Results], Tensor]
WEIGHTS = ("w1", "w2", "w3")


@dataclass(frozen=True)
class MoELayer:
    """The tokens of all ranks, one after the other, and all experts.

    Attributes:
        leaves: x (T, D), prob (T, K) fp32, w1 (E, F, D), w2 (E, D, F), w3 (E, F, D).
        ids_TK: (T, K) int64, E for none.
        grad_y_TD: gradient that comes back.
        tokens_R: tokens of each rank.
    """

    leaves: Results
    ids_TK: Tensor
    grad_y_TD: Tensor
    tokens_R: tuple[int, ...]

    @property
    def num_experts(self) -> int:
        return len(self.leaves["w1"])

    def share(self, rank: int) -> "MoELayer":
        """Return the share of a rank: its tokens, which may select any expert, and its experts."""
        leaves = {name: self.part(name, leaf, rank) for name, leaf in self.leaves.items()}
        ids_TK, grad_y_TD = (self.part("y", of_TK, rank) for of_TK in (self.ids_TK, self.grad_y_TD))
        return MoELayer(leaves, ids_TK, grad_y_TD, self.tokens_R[rank : rank + 1])

    def part(self, name: str, result: Tensor, rank: int) -> Tensor:
        """A rank's own part of one of the results."""
        if name.startswith("w"):
            return result.chunk(len(self.tokens_R))[rank]
        return result.split(self.tokens_R)[rank]

    def exact(self) -> Results:
        leaves = fresh({name: leaf.double() for name, leaf in self.leaves.items()})
        y_TD = moe_output(leaves, self.ids_TK)
        return results(y_TD, leaves, self.grad_y_TD.double())


def random_layer(
    tokens_R: Sequence[int],
    num_experts: int,
    top_k: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    allowed: Sequence[int] | None = None,
    dim: int = 16,
    hidden_dim: int = 8,
) -> MoELayer:
    """A layer whose tokens each select ``top_k`` of the experts, or of those that are allowed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    num_tokens = sum(tokens_R)
    chosen = torch.tensor(range(num_experts) if allowed is None else allowed)
    order_TE = torch.rand(num_tokens, len(chosen), generator=generator).argsort(dim=1)
    leaves = {
        "x": normal(num_tokens, dim).to(dtype),
        "prob": torch.rand(num_tokens, top_k, generator=generator),
        "w1": (normal(num_experts, hidden_dim, dim) / dim**0.5).to(dtype),
        "w2": (normal(num_experts, dim, hidden_dim) / hidden_dim**0.5).to(dtype),
        "w3": (normal(num_experts, hidden_dim, dim) / dim**0.5).to(dtype),
    }
    ids_TK = chosen[order_TE[:, :top_k]]
    return MoELayer(leaves, ids_TK, normal(num_tokens, dim).to(dtype), tuple(tokens_R))


def moe_output(leaves: Results, ids_TK: Tensor) -> Tensor:
    """(T, D) every expert's output for every token, times its probability, summed."""
    x_TD, prob_TK, w1_EFD, w2_EDF, w3_EFD = leaves.values()
    num_experts = len(w1_EFD)
    prob_TE = prob_TK.new_zeros(len(x_TD), num_experts + 1).scatter(1, ids_TK, prob_TK)
    gate_ETF, up_ETF = (x_TD @ w.transpose(1, 2) for w in (w1_EFD, w3_EFD))
    y_ETD = F.silu(gate_ETF) * up_ETF @ w2_EDF.transpose(1, 2)
    return (y_ETD * prob_TE[:, :num_experts].T[:, :, None]).sum(0)


def fresh(leaves: Results) -> Results:
    """Leaves without a history."""
    return {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}


def results(y_TD: Tensor, leaves: Results, grad_y_TD: Tensor) -> Results:
    y_TD.backward(grad_y_TD)
    return {"y": y_TD.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def error(result: Tensor | None, exact: Tensor) -> float:
    """The norm of the difference, relative; absolute where nothing but zero is right."""
    if result is None:
        return torch.inf
    norm = exact.norm().item()
    return (result.double() - exact).norm().item() / (norm or 1)


def levels_of_four() -> dict[str, Levels]:
    world = dist.group.WORLD
    return {"one level": one_level(world), "two levels": two_levels(world, 2)}


def swiglu(dispatched: Dispatched, leaves: Results) -> Tensor:
    return swiglu_experts(dispatched.x_SD, dispatched.rows, *(leaves[name] for name in WEIGHTS))


def deduplicated(
    layer: MoELayer,
    levels: Levels,
    rank: int,
    experts: Experts = swiglu,
    count: Counter = count_nothing,
) -> Results:
    """This rank's part of the results."""
    share = layer.share(rank)
    leaves = fresh(share.leaves)
    arguments = leaves["x"], leaves["prob"], share.ids_TK, layer.num_experts, levels, count
    dispatched = dispatch(*arguments)
    y_TD = combine(experts(dispatched, leaves), dispatched, count)
    return results(y_TD, leaves, share.grad_y_TD)
