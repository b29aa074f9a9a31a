"""Puts the deduplicated dispatch of `[narrowcast.dispatch]` into torchtitan's trainer."""

import functools
from dataclasses import replace
from typing import Any

import torch

from narrowcast.experts.dispatch import Crossing, two_levels
from narrowcast.volume import Ledger
from torchtitan_ext.deduplicated_dispatch import (
    OVERRIDES,
    DeduplicatedExperts,
    DeduplicatingTokenDispatcher,
)
from torchtitan_ext.private import moe_layers, shared_experts_meanwhile
from torchtitan_ext.tracing import describe

_SECTION = "narrowcast.dispatch.deduplicate = true"


def check_dispatch(config: Any) -> None:
    """Whether the section can work with a job, as far as its configuration says.

    Raises:
        ValueError: it cannot; the message names what and why.
    """
    dispatch, degree = config.narrowcast.dispatch, config.parallelism.expert_parallel_degree
    if degree == 1:
        raise ValueError(
            f"{_SECTION} cannot work with parallelism.expert_parallel_degree = 1: no token leaves "
            "its rank. Give a degree above 1"
        )
    if degree % dispatch.nodes:
        raise ValueError(
            f"narrowcast.dispatch.nodes = {dispatch.nodes} does not divide "
            f"parallelism.expert_parallel_degree = {degree}"
        )
    if config.compile.enable and "model" in config.compile.components:
        raise ValueError(
            f"{_SECTION} cannot work with compile.enable = true: rows that are sent while shared "
            "experts compute cannot be traced into one graph. Leave the model out of "
            "compile.components, or set compile.enable = false"
        )
    if dispatch.kernels == "triton" and not torch.cuda.is_available():
        raise ValueError(
            'narrowcast.dispatch.kernels = "triton" needs a CUDA device, and there is none: use '
            '"torch"'
        )


def deduplicating(config: Any) -> Any:
    """A copy of a trainer's config whose overrides put in dispatcher and experts."""
    dispatcher, experts = OVERRIDES
    ours = [dispatcher, (experts, {"kernels": config.narrowcast.dispatch.kernels})]
    override = replace(config.override, imports=[*config.override.imports, *ours])
    return replace(config, override=override)


def set_up_dispatch(trainer: Any) -> None:
    """Give dispatchers what they need of the whole job. Every rank must call it, alike.

    Raises:
        ValueError: a layer of the model has another dispatcher or other experts; the message names
            it.
    """
    model = describe(trainer, _SECTION)
    nodes, levels = trainer.config.narrowcast.dispatch.nodes, None
    degree = trainer.parallel_dims.ep
    if model["num_experts"] % degree:
        raise ValueError(
            f"{_SECTION} cannot work with {model['num_experts']} experts and "
            f"parallelism.expert_parallel_degree = {degree}, which does not divide them"
        )
    if nodes > 1:
        levels = two_levels(trainer.parallel_dims.get_mesh("ep").get_group(), nodes)
    for name, moe in _moe_layers(trainer).items():
        experts, dispatcher = moe.routed_experts.inner_experts, moe.routed_experts.token_dispatcher
        known = {
            experts: (DeduplicatedExperts, "GroupedExperts (SwiGLU, not quantized)"),
            dispatcher: (
                DeduplicatingTokenDispatcher,
                'AllToAllTokenDispatcher (moe_comm_backend "standard")',
            ),
        }
        for module, (ours, theirs) in known.items():
            if not isinstance(module, ours):
                raise ValueError(
                    f"{_SECTION} cannot work here: {name} has a {type(module).__name__}, and "
                    f"deduplication works with torchtitan's {theirs} alone"
                )
        if levels is not None:
            dispatcher.levels = levels
        if moe.shared_experts is not None:
            dispatcher.hooks.meanwhile = shared_experts_meanwhile(moe)


def count_dispatch(trainer: Any, ledger: Ledger) -> None:
    """Count what dispatchers send, layer by layer. Every rank must call it, alike."""
    ledger.count_layers(describe(trainer, _SECTION)["layers"])
    for name, moe in _moe_layers(trainer).items():
        hooks = moe.routed_experts.token_dispatcher.hooks
        hooks.count = functools.partial(ledger.add_rows, name)
        hooks.on_dispatch = functools.partial(_count_tokens, ledger, name)


def _count_tokens(ledger: Ledger, layer: str, crossings: tuple[Crossing, ...]) -> None:
    first, last = crossings[0], crossings[-1]
    tokens = ledger.current.tokens[layer]
    tokens.tokens += first.tokens
    tokens.assignments += first.assignments
    tokens.local += first.local_assignments
    tokens.rank_rows += last.rows
    tokens.node_rows += first.rows if len(crossings) > 1 else 0


def _moe_layers(trainer: Any) -> dict[str, Any]:
    return {n: moe for part in trainer.model_parts for n, moe in moe_layers(part).items()}
