"""``[narrowcast.dispatch]``: checks, sets up and counts the deduplicated dispatch of a trainer."""

import functools
from dataclasses import replace
from typing import Any

import torch

from narrowcast.moe.hop import Hop, two_levels
from narrowcast.telemetry.ledger import Ledger
from torchtitan_ext.dispatch.overrides import (
    OVERRIDES,
    DeduplicatedExperts,
    DeduplicatingTokenDispatcher,
)
from torchtitan_ext.job import Job
from torchtitan_ext.private import moe_layers, shared_experts_meanwhile
from torchtitan_ext.routed_model import RoutedModel

_SECTION = "narrowcast.dispatch.deduplicate = true"


def check_dispatch(job: Job) -> None:
    """Check that the section can work with a job.

    Args:
        job: with the overrides of ``deduplicating``.

    Raises:
        ValueError: it cannot; the message names the key and the cure.
    """
    config = job.config
    dispatch, degree = config.narrowcast.dispatch, config.parallelism.expert_parallel_degree
    if degree == 1:
        raise ValueError(
            f"{_SECTION} cannot work with parallelism.expert_parallel_degree = 1: no token leaves "
            "its rank. Give a degree above 1"
        )
    if degree % dispatch.nodes:
        raise ValueError(
            f"narrowcast.dispatch.nodes = {dispatch.nodes} cannot work with "
            f"parallelism.expert_parallel_degree = {degree}: give a number of nodes "
            "that divides it"
        )
    placement = config.narrowcast.placement
    if placement.enable and not placement.file and dispatch.nodes not in (1, placement.nodes):
        raise ValueError(
            f"narrowcast.placement.nodes = {placement.nodes}, but narrowcast.dispatch.nodes = "
            f"{dispatch.nodes}: plan for the nodes that tokens are sent to, and give both the same"
        )
    if job.is_compiled:
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
    num_experts = RoutedModel.of_job(job, _SECTION).num_experts
    if num_experts % degree:
        raise ValueError(
            f"{_SECTION} cannot work with {num_experts} experts and "
            f"parallelism.expert_parallel_degree = {degree}: give a degree that divides the experts"
        )
    if others := _others(job.moe_layers):
        raise ValueError(f"{_SECTION} cannot work here: {others[0]}")


def deduplicating(config: Any) -> Any:
    """A copy of a trainer's config whose overrides replace dispatcher and experts."""
    dispatcher, experts = OVERRIDES
    others = [entry for entry in config.override.imports if entry not in OVERRIDES]
    imports = [*others, dispatcher, (experts, {"kernels": config.narrowcast.dispatch.kernels})]
    return replace(config, override=replace(config.override, imports=imports))


def set_up_dispatch(trainer: Any) -> None:
    """Set in dispatchers what follows from the whole job. Every rank must call it alike."""
    nodes, levels = trainer.config.narrowcast.dispatch.nodes, None
    if nodes > 1:
        levels = two_levels(trainer.parallel_dims.get_mesh("ep").get_group(), nodes)
    for moe in _moe_layers(trainer).values():
        dispatcher = moe.routed_experts.token_dispatcher
        if levels is not None:
            dispatcher.levels = levels
        if moe.shared_experts is not None:
            dispatcher.hooks.meanwhile = shared_experts_meanwhile(moe)


def _others(layers: dict[str, Any]) -> list[str]:
    """Messages about MoE layers whose dispatcher or experts are not ours."""
    messages = []
    for name, moe in layers.items():
        experts, dispatcher = moe.routed_experts.inner_experts, moe.routed_experts.token_dispatcher
        if not isinstance(experts, DeduplicatedExperts):
            messages.append(
                f"the experts of {name} are {type(experts).__name__}, not torchtitan's own "
                "GroupedExperts (SwiGLU, not quantized). Take these, or deduplicate = false"
            )
        if not isinstance(dispatcher, DeduplicatingTokenDispatcher):
            messages.append(
                f"the dispatcher of {name} is {type(dispatcher).__name__}, not torchtitan's "
                'AllToAllTokenDispatcher: take moe_comm_backend "standard", or deduplicate = false'
            )
    return messages


def count_dispatch(trainer: Any, ledger: Ledger) -> None:
    """Count what dispatchers send, layer by layer. Every rank must call it alike."""
    ledger.count_layers(RoutedModel.of_trainer(trainer, _SECTION).layers)
    for name, moe in _moe_layers(trainer).items():
        hooks = moe.routed_experts.token_dispatcher.hooks
        hooks.count = functools.partial(ledger.add_rows, name)
        hooks.on_dispatch = functools.partial(_count_tokens, ledger, name)


def _count_tokens(ledger: Ledger, layer: str, hops: tuple[Hop, ...]) -> None:
    first, last = hops[0], hops[-1]
    tokens = ledger.current.tokens[layer]
    tokens.tokens += first.tokens
    tokens.assignments += first.assignments
    tokens.local += first.local_assignments
    tokens.rank_rows += last.rows
    tokens.node_rows += first.rows if len(hops) > 1 else 0


def _moe_layers(trainer: Any) -> dict[str, Any]:
    return {n: moe for part in trainer.model_parts for n, moe in moe_layers(part).items()}
