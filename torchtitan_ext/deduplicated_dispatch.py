"""torchtitan's dispatcher and experts, by which a token crosses once to each rank.

Both come in by torchtitan's own overrides, which `[narrowcast.dispatch] deduplicate = true` lists:
names and layout of parameters stay torchtitan's. Between the two goes what `RoutedExperts` passes
on as it is: a row for each token that arrived, and `ExpertRows` in the place of counts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from narrowcast.moe import swiglu
from narrowcast.moe.dispatch import Dispatched, combine, dispatch
from narrowcast.moe.hop import Counter, Hop, Level, count_nothing, one_level
from narrowcast.moe.swiglu import ExpertRows


@dataclass
class Hooks:
    """What others put into a dispatcher once the trainer is built.

    Attributes:
        slots_E: (E,) the slot of each expert; None where expert e is in slot e.
        count: is told of the bytes.
        on_dispatch: is told of every dispatch.
        meanwhile: runs while tokens are under way.
    """

    slots_E: Tensor | None = None
    count: Counter = count_nothing
    on_dispatch: Callable[[tuple[Hop, ...]], None] | None = None
    meanwhile: Callable[[], None] | None = None


class DeduplicatingTokenDispatcher(AllToAllTokenDispatcher):
    """Sends a token once to each expert-parallel rank, and gets one partial sum from each."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.hooks = Hooks()
        self.levels: tuple[Level, ...] = ()

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        super().wire_meshes(ep_mesh=ep_mesh)
        if ep_mesh is not None:
            self.levels = one_level(ep_mesh.get_group())

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Any, Any]:
        """As torchtitan's, but for one row for each token and rank in the place of one for each
        token and expert, and `ExpertRows` in the place of tokens for each expert."""
        slots_E = self.hooks.slots_E
        dispatched = dispatch(
            x_TD,
            topk_scores_TK,
            topk_expert_ids_TK if slots_E is None else _slots(topk_expert_ids_TK, slots_E),
            self.num_experts,
            self.levels,
            self.hooks.count,
            self.hooks.meanwhile,
        )
        if self.hooks.on_dispatch is not None:
            self.hooks.on_dispatch(dispatched.hops)
        return dispatched.x_SD, dispatched.rows, dispatched

    def combine(self, routed_output_RD: Tensor, metadata: Dispatched, x_TD: Tensor) -> Tensor:
        """(T, D) sums of what each rank gives back for this rank's tokens."""
        return combine(routed_output_RD, metadata, self.hooks.count)


def _slots(ids_TK: Tensor, slots_E: Tensor) -> Tensor:
    """(T, K) the slot of each expert; of one that does not exist its number, which `dispatch`
    refuses on every rank alike."""
    existing_TK = ids_TK.clamp(0, len(slots_E) - 1)
    return torch.where(ids_TK == existing_TK, slots_E[existing_TK], ids_TK)


class DeduplicatedExperts(GroupedExperts):
    """torchtitan's SwiGLU experts on rows that stand for several of them, each summed already."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        kernels: Literal["torch", "triton"] = "torch"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.swiglu_experts = swiglu.swiglu_experts
        if config.kernels == "triton":
            from narrowcast.moe import swiglu_triton

            self.swiglu_experts = swiglu_triton.swiglu_experts

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: ExpertRows) -> Tensor:
        """In bf16, as torchtitan has it."""
        weights = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        local = [(w.to_local() if isinstance(w, DTensor) else w).bfloat16() for w in weights]
        return self.swiglu_experts(x_RD.bfloat16(), num_tokens_per_expert_E, *local).type_as(x_RD)


@override(
    target=AllToAllTokenDispatcher.Config,
    description="a token crosses once to each rank",
    exact=True,
)
def dispatcher(cfg: AllToAllTokenDispatcher.Config) -> DeduplicatingTokenDispatcher.Config:
    """Of the standard dispatcher alone: others number and send experts in ways of their own."""
    return derive(cfg, DeduplicatingTokenDispatcher.Config)


@override(target=GroupedExperts.Config, description="experts on rows of several", exact=True)
def experts(
    cfg: GroupedExperts.Config, *, kernels: Literal["torch", "triton"] = "torch"
) -> DeduplicatedExperts.Config:
    return derive(cfg, DeduplicatedExperts.Config, kernels=kernels)


OVERRIDES = tuple(f"{__name__}.{factory.__name__}" for factory in (dispatcher, experts))
