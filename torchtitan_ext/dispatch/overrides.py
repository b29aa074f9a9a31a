"""torchtitan's dispatcher and experts, with which a token is sent once to each rank.

Both are torchtitan overrides, which ``[narrowcast.dispatch] deduplicate = true`` lists: names and
layout of parameters stay torchtitan's. ``RoutedExperts`` passes from one to the other, as it is, a
row for each token that arrived, and ``ExpertRows`` in place of the counts of tokens.
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
    """What is set in a dispatcher once the trainer is built.

    Attributes:
        slots_E: (E,) the slot of each expert; None where expert e is in slot e.
        count: is called with the rows and bytes of every exchange.
        on_dispatch: is called with the hops of every dispatch.
        meanwhile: is called while tokens are being sent.
    """

    slots_E: Tensor | None = None
    count: Counter = count_nothing
    on_dispatch: Callable[[tuple[Hop, ...]], None] | None = None
    meanwhile: Callable[[], None] | None = None


class DeduplicatingTokenDispatcher(AllToAllTokenDispatcher):
    """Sends a token once to each expert-parallel rank, and receives one partial sum from each."""

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
        """Send rows to experts as torchtitan does, with one row for each token and rank instead of
        one for each token and expert.

        Returns:
            The rows (S, D) that arrived, the ``ExpertRows`` that say which experts they are for,
            and what ``combine`` needs.
        """
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
        """The sums (T, D) of what each rank returns for this rank's tokens."""
        return combine(routed_output_RD, metadata, self.hooks.count)


def _slots(ids_TK: Tensor, slots_E: Tensor) -> Tensor:
    """The slots (T, K) of experts. An expert that does not exist keeps its number, which
    ``dispatch`` refuses on every rank alike."""
    existing_TK = ids_TK.clamp(0, len(slots_E) - 1)
    return torch.where(ids_TK == existing_TK, slots_E[existing_TK], ids_TK)


class DeduplicatedExperts(GroupedExperts):
    """torchtitan's SwiGLU experts on rows that are for several of them, whose outputs they add."""

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
        """Compute in bf16, as torchtitan does.

        Args:
            x_RD: (R, D) rows that arrived.
            num_tokens_per_expert_E: by torchtitan's name, the ``ExpertRows`` of ``dispatch``.
        """
        weights = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        local = [(w.to_local() if isinstance(w, DTensor) else w).bfloat16() for w in weights]
        return self.swiglu_experts(x_RD.bfloat16(), num_tokens_per_expert_E, *local).type_as(x_RD)


@override(
    target=AllToAllTokenDispatcher.Config,
    description="sends a token once to each rank",
    exact=True,
)
def dispatcher(cfg: AllToAllTokenDispatcher.Config) -> DeduplicatingTokenDispatcher.Config:
    """Override the standard dispatcher alone: others number experts and send rows differently."""
    return derive(cfg, DeduplicatingTokenDispatcher.Config)


@override(
    target=GroupedExperts.Config, description="adds the outputs of a token's experts", exact=True
)
def experts(
    cfg: GroupedExperts.Config, *, kernels: Literal["torch", "triton"] = "torch"
) -> DeduplicatedExperts.Config:
    """Override torchtitan's own experts, with ``kernels`` as in ``[narrowcast.dispatch]``."""
    return derive(cfg, DeduplicatedExperts.Config, kernels=kernels)


OVERRIDES = tuple(f"{__name__}.{factory.__name__}" for factory in (dispatcher, experts))
