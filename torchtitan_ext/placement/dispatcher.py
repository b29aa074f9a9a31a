"""torchtitan's all-to-all dispatch to experts that a placement has put on other ranks.

    expert order   rows sorted by expert: how torchtitan gathers them, and adds their outputs
    slot order     the same rows sorted by slot, and so by rank: how they are sent

Router, scores and expert ids are the model's own. Every sum over a token's experts, forward and
backward, is made in expert order, so that it is bitwise identical to torchtitan's wherever experts
live.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common.token_dispatcher import (
    AllToAllDispatchMetadata,
    AllToAllTokenDispatcher,
)
from torchtitan.ops.scatter_add import deterministic_scatter_add

from narrowcast.placement.relocation import ExpertLayer
from torchtitan_ext.dispatch.overrides import DeduplicatingTokenDispatcher
from torchtitan_ext.private import ReorderingTokenDispatcher


@dataclass(frozen=True, kw_only=True)
class PlacedDispatchMetadata(AllToAllDispatchMetadata):
    """``token_indices_experts_sorted_N`` is, for each row in slot order, its place in expert order.

    Attributes:
        tokens_N: (N,) the token of each row, in expert order.
    """

    tokens_N: Tensor


class PlacedTokenDispatcher(ReorderingTokenDispatcher):
    """An ``AllToAllTokenDispatcher`` that sends tokens to the slots of their experts.

    ``place`` turns a dispatcher that already has its mesh into one.

    Attributes:
        layer: the experts, and their slots.
    """

    layer: ExpertLayer

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, Any]:
        routed_input_RD, num_tokens_per_slot_e, metadata = super().dispatch(
            x_TD,
            topk_scores_TK,
            topk_expert_ids_TK,
            num_local_tokens_per_expert_E[self.layer.experts_E],
        )
        rows_N = torch.argsort(topk_expert_ids_TK.view(-1), stable=True)
        placed = PlacedDispatchMetadata(
            **{field.name: getattr(metadata, field.name) for field in fields(metadata)},
            tokens_N=rows_N // self.top_k,
        )
        return routed_input_RD, num_tokens_per_slot_e, placed

    def reordered(
        self, topk_expert_ids_TK: Tensor, rows_ND: Tensor, scores_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same rows and scores in slot order, and the place of each in expert order."""
        experts_N = topk_expert_ids_TK.view(-1).sort(stable=True).values
        slot_order_N = torch.argsort(self.layer.slots_E[experts_N], stable=True)
        return rows_ND[slot_order_N], slot_order_N, scores_N[slot_order_N]

    def combine(
        self, routed_output_RD: Tensor, metadata: PlacedDispatchMetadata, x_TD: Tensor
    ) -> Tensor:
        """Add the outputs of each token's experts in expert order, as torchtitan does."""
        # Each row goes to a place of its own, so that nothing is added out of expert order.
        dim = x_TD.shape[-1]
        rows_ND = super().combine(
            routed_output_RD, metadata, x_TD.new_empty(len(metadata.tokens_N), dim)
        )
        return deterministic_scatter_add(
            torch.zeros_like(x_TD), metadata.tokens_N.reshape(-1, 1).expand(-1, dim), rows_ND
        )


def place(dispatcher: AllToAllTokenDispatcher, layer: ExpertLayer) -> None:
    """Make a dispatcher send tokens to the slots of their experts from now on.

    Its layer has passed ``check_placeable``.
    """
    if isinstance(dispatcher, DeduplicatingTokenDispatcher):
        dispatcher.hooks.slots_E = layer.slots_E
        return
    dispatcher.__class__ = PlacedTokenDispatcher
    dispatcher.layer = layer


def check_placeable(dispatcher: Any, layer: str) -> None:
    """Check that ``place`` can work with the dispatcher of a layer.

    Raises:
        ValueError: it is not torchtitan's standard dispatcher. Others number experts differently.
    """
    if type(dispatcher) not in (AllToAllTokenDispatcher, DeduplicatingTokenDispatcher):
        raise ValueError(
            f"the dispatcher of {layer} is a {type(dispatcher).__name__}: experts are placed "
            'with torchtitan\'s AllToAllTokenDispatcher (moe_comm_backend "standard") alone'
        )
