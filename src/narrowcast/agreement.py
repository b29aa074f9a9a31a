"""The checks of a model and its settings, of which every rank raises what one of them finds."""

import hashlib
import logging
import reprlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from narrowcast.attribution import counted_by_caller
from narrowcast.errors import SettingsError
from narrowcast.fsdp2 import ParamGroup, param_groups, shard_world_sizes
from narrowcast.topology import Topology, find_topology

logger = logging.getLogger(__name__)


def sharded_groups(model: nn.Module | Iterable[nn.Module]) -> list[ParamGroup]:
    """The parameter groups of a model, or of several, that FSDP2 shards.

    Raises:
        ValueError: there are none. It is raised on this rank alone: give it to ``check_settings``.
    """
    models = modules_of(model)
    if not all(isinstance(one, nn.Module) for one in models):
        raise ValueError(f"model = {reprlib.repr(model)}; allowed: a torch.nn.Module, or several")
    groups = param_groups(*models)
    if not groups:
        raise ValueError(_why_no_groups(models))
    return groups


def _why_no_groups(models: list[nn.Module]) -> str:
    """Why the models have no sharded parameter group, and what to do about it."""
    modules = [module for model in models for module in model.modules()]
    world_sizes = shard_world_sizes(*models)
    if None in world_sizes:
        return (
            "the model's parameters are replicated on every rank, and not sharded: nothing is "
            "gathered that could be narrowed. Call torch.distributed.fsdp.fully_shard in the place "
            "of replicate"
        )
    if world_sizes:
        return (
            "fully_shard was given a mesh of 1 rank for every parameter of the model: nothing is "
            "gathered that could be narrowed. Shard over 2 ranks or more (in torchtitan: "
            "parallelism.data_parallel_shard_degree is 1 here, or -1 with as many ranks as the "
            "other degrees take)"
        )
    if any(isinstance(module, FSDPModule) for module in modules):
        return (
            "fully_shard was applied to modules without parameters of their own: apply it to those "
            "that have some"
        )
    if any(type(module).__name__.startswith("SimpleFSDP") for module in modules):
        return (
            "the model is sharded by torchtitan's SimpleFSDP (graph_trainer), whose gathers are "
            "part of a compiled graph: narrowcast narrows those of FSDP2 alone. Train it with "
            "torchtitan's own trainer, or switch narrowcast off"
        )
    return (
        "the model was not sharded by FSDP2: call torch.distributed.fsdp.fully_shard on it first"
        + (
            " (its parameters are DTensors, sharded by other means, such as tensor parallelism)"
            if any(isinstance(p, DTensor) for model in models for p in model.parameters())
            else ""
        )
    )


def modules_of(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """A model, or several, as a list."""
    if isinstance(model, nn.Module) or not isinstance(model, Iterable):
        return [model]
    return list(model)


def check_process_group(process_group: Any) -> None:
    """Checks the argument by which ranks could agree on anything else: it is raised on this rank
    alone.

    Raises:
        ValueError: it is no process group.
    """
    if not isinstance(process_group, dist.ProcessGroup | None):
        raise ValueError(
            f"process_group = {reprlib.repr(process_group)}; allowed: a "
            "torch.distributed.ProcessGroup, or None"
        )


def check_no_later_groups(models: list[nn.Module], groups: list[ParamGroup], narrowed: str) -> None:
    """Checks that the models have no parameter groups beside these.

    Raises:
        SettingsError: there are more than when ``narrowed`` was called.
    """
    later = [
        group.name
        for group in param_groups(*models)
        if not any(group.is_same_as(known) for known in groups)
    ]
    if later:
        raise SettingsError(
            f"fully_shard was applied to {', '.join(later)} after {narrowed}, which does not know "
            "these parameters: narrow the model after the last fully_shard"
        )


def topology_of(
    groups: list[ParamGroup], ranks_per_node: int | str, job: dist.ProcessGroup | None
) -> Topology:
    """Where the ranks of these parameter groups are. Every rank of the job must call this."""
    return find_topology(
        ranks_per_node, [one for group in groups for one in group.process_groups], job
    )


def groups_between_nodes(
    groups: list[ParamGroup], topology: Topology, collective: str, *, warns: bool
) -> list[ParamGroup]:
    """The parameter groups that are sharded over several nodes. The others are left to baseline
    FSDP2, which is said once.

    Args:
        collective: of the groups, in the message.
        warns: whether the caller's settings ask for something else.
    """
    far = [group for group in groups if not topology.is_local(group.process_group)]
    if len(far) < len(groups) and dist.get_rank() == 0:
        logger.log(
            logging.WARNING if warns else logging.INFO,
            "narrowcast: the %s of %d of %d parameter groups is left to baseline FSDP2, since all "
            "its ranks are on one node (ranks_per_node = %d). If each rank has a slow link of its "
            "own, give ranks_per_node = 1",
            collective,
            len(groups) - len(far),
            len(groups),
            topology.ranks_per_node,
        )
    return far


@counted_by_caller()
def check_settings(
    groups: list[ParamGroup],
    settings: dict[str, Any],
    error: ValueError | None,
    job: dist.ProcessGroup | None = None,
) -> None:
    """Compares settings and parameters among the ranks that shard them together.

    Args:
        groups: of the model on this rank; none where they could not be had.
        settings: by name.
        error: what is wrong with them on this rank, if anything.
        job: the ranks that call this together; ``None`` stands for all.

    Raises:
        ValueError: this rank's ``error``, or another's; the same on every rank of the job.
        SettingsError: the ranks that shard parameters together differ.
    """
    if not dist.is_initialized():  # no process group: nothing is sharded, and nobody else waits
        assert error is not None
        raise error
    message = str(error) if error is not None else ""
    shapes: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for group in groups:
        ranks = tuple(dist.get_process_group_ranks(group.process_group))
        shapes[ranks].append((group.name, group.params))
    digests = {ranks: hashlib.sha256(repr(of).encode()).hexdigest() for ranks, of in shapes.items()}
    reports: list[Any] = [None] * dist.get_world_size(job)
    dist.all_gather_object(reports, (dist.get_rank(), message, settings, digests), job)
    _raise_first([(rank, wrong) for rank, wrong, *_ in reports if wrong], len(reports))
    sharing: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for rank, _, of_rank, digests in reports:
        for ranks, digest in digests.items():
            sharing[ranks].append((rank, of_rank, digest))
    for ranks, members in sharing.items():
        for name in settings:
            by_rank = {rank: of_rank[name] for rank, of_rank, _ in members}
            if len({repr(value) for value in by_rank.values()}) > 1:
                raise SettingsError(f"ranks were given different settings of {name!r}: {by_rank}")
        if len({digest for *_, digest in members}) > 1 or len(members) < len(ranks):
            raise SettingsError(
                f"ranks {list(ranks)} shard different parameters over the same process group: "
                "build the same model with the same fully_shard calls on every rank"
            )


def _raise_first(wrong: list[tuple[int, str]], num_ranks: int) -> None:
    """Raises the error of the first rank that has one; it names the rank unless all have it."""
    if wrong:
        rank, message = wrong[0]
        alike = len(wrong) == num_ranks and len({text for _, text in wrong}) == 1
        raise ValueError(message if alike else f"on rank {rank}: {message}")
