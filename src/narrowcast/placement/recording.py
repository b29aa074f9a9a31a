"""Records what the routers of a running job select, and joins the tokens of all ranks."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.placement.trace import RoutingTrace, id_dtype


@dataclass(frozen=True)
class RecordedTokens:
    """What one rank recorded of some layers, with the shapes and fields of ``RoutingTrace``."""

    layers: tuple[str, ...]
    rank: int
    step_T: Tensor
    position_T: Tensor
    ids_LTK: Tensor
    scores_LTK: Tensor | None


class RoutingRecorder:
    """Records what the routers of a model select in some steps.

    A token counts once: only what happens within the forward of the model is recorded, and for each
    layer only the first time. Recomputation in backward is outside of it.

    Args:
        model: the model, whose forward is one microbatch.
        layers: names of its MoE modules; ``record`` refers to them by index.
        num_experts: experts of each layer.
        rank: as in ``RoutingTrace.rank_T``.
        scores: whether to record the scores as well.
        max_tokens: the most tokens of a microbatch, evenly spaced; None for all.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: tuple[str, ...],
        num_experts: int,
        rank: int,
        *,
        scores: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        self.layers = layers
        self._dtype = id_dtype(num_experts)
        self._rank = rank
        self._scores = scores
        self._max_tokens = max_tokens
        self._step: int | None = None
        self._num_tokens = 0  # of the finished microbatches of the step
        self._microbatch: dict[int, _Selected] | None = None
        self._recorded: list[RecordedTokens] = []
        self._hooks = (
            model.register_forward_pre_hook(lambda *_: self._begin()),
            model.register_forward_hook(lambda *_: self._end()),
        )

    @contextlib.contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record the forwards that run within it, as belonging to a step."""
        self._step, self._num_tokens = step, 0
        try:
            yield
        finally:
            self._step = self._microbatch = None

    @torch.no_grad()
    def record(self, layer: int, ids_TK: Tensor, scores_TK: Tensor) -> None:
        """Record what the tokens of this rank selected in a layer, if it is to be recorded."""
        if self._microbatch is None or layer in self._microbatch:
            return
        position_T = evenly_spaced(len(ids_TK), self._max_tokens).to(ids_TK.device)
        self._microbatch[layer] = _Selected(
            num_tokens=len(ids_TK),
            position_T=position_T,
            ids_TK=ids_TK[position_T].to(self._dtype),
            scores_TK=scores_TK[position_T].float() if self._scores else None,
        )

    def take(self) -> RecordedTokens | None:
        """Return what was recorded since the last call, on the CPU; None if nothing was."""
        recorded, self._recorded = self._recorded, []
        return joined(recorded) if recorded else None

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self) -> None:
        if self._step is not None:
            self._microbatch = {}

    def _end(self) -> None:
        microbatch, self._microbatch = self._microbatch, None
        if not microbatch:
            return
        assert len(microbatch) == len(self.layers), "a layer of the model was not recorded"
        selected = [microbatch[layer] for layer in range(len(self.layers))]
        position_T = self._num_tokens + selected[0].position_T.cpu()
        self._num_tokens += selected[0].num_tokens
        self._recorded.append(
            RecordedTokens(
                layers=self.layers,
                rank=self._rank,
                step_T=torch.full_like(position_T, self._step),
                position_T=position_T,
                ids_LTK=torch.stack([layer.ids_TK for layer in selected]).cpu(),
                scores_LTK=(
                    torch.stack([layer.scores_TK for layer in selected]).cpu()
                    if self._scores
                    else None
                ),
            )
        )


@dataclass(frozen=True)
class _Selected:
    """What the recorded tokens of a microbatch of ``num_tokens`` selected in a layer."""

    num_tokens: int
    position_T: Tensor
    ids_TK: Tensor
    scores_TK: Tensor | None


def evenly_spaced(num_tokens: int, at_most: int | None) -> Tensor:
    """Return (T,) ascending indices of at most so many of the tokens; all of them for None."""
    count = num_tokens if at_most is None else min(num_tokens, at_most)
    return torch.arange(count) * num_tokens // max(count, 1)


def joined(recorded: list[RecordedTokens]) -> RecordedTokens:
    """Return the tokens of one rank in the same layers, one part after the other."""
    first = recorded[0]
    return replace(
        first,
        step_T=torch.cat([part.step_T for part in recorded]),
        position_T=torch.cat([part.position_T for part in recorded]),
        ids_LTK=torch.cat([part.ids_LTK for part in recorded], dim=1),
        scores_LTK=(
            None
            if first.scores_LTK is None
            else torch.cat([part.scores_LTK for part in recorded], dim=1)
        ),
    )


def trace_of(
    recorded: list[RecordedTokens], layers: tuple[str, ...], **described: Any
) -> RoutingTrace:
    """Return the trace of what all ranks recorded.

    Args:
        recorded: what each rank recorded. Layers may be spread over ranks (pipeline stages): the
            parts of one ``rank`` then have the same tokens.
        layers: names of the MoE modules of the whole model, in its order.
        described: the other fields of ``RoutingTrace``.
    """
    by_layer: dict[str, list[RecordedTokens]] = {name: [] for name in layers}
    for part in sorted(recorded, key=lambda part: part.rank):
        for name in part.layers:
            by_layer[name].append(part)
    columns = by_layer[layers[0]]
    step_T = torch.cat([part.step_T for part in columns])
    position_T = torch.cat([part.position_T for part in columns])
    rank_T = torch.cat([torch.full_like(part.step_T, part.rank) for part in columns])

    def stacked(tensor_of: Callable[[RecordedTokens], Tensor]) -> Tensor:
        return torch.stack(
            [
                torch.cat([tensor_of(part)[part.layers.index(name)] for part in by_layer[name]])
                for name in layers
            ]
        )

    # A stable sort by step: ranks and positions are in order already.
    order_T = step_T.argsort(stable=True)
    has_scores = columns[0].scores_LTK is not None
    return RoutingTrace(
        layers=layers,
        ids_LTK=stacked(lambda part: part.ids_LTK),
        step_T=step_T,
        rank_T=rank_T,
        position_T=position_T,
        scores_LTK=stacked(lambda part: part.scores_LTK) if has_scores else None,
        **described,
    ).tokens(order_T)
