"""What a model is narrowed with, checked so that every rank raises where one would."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from narrowcast.allgather.wire import NarrowcastError, SettingsError
from narrowcast.torch_internals import ParamGroup, param_groups, why_no_groups
from narrowcast.volume import named


def sharded_groups(model: nn.Module | Iterable[nn.Module]) -> list[ParamGroup]:
    """The parameter groups of a model, or of several, that FSDP2 shards.

    Raises:
        ValueError: there are none.
    """
    models = [model] if isinstance(model, nn.Module) else model
    models = list(models) if isinstance(models, Iterable) else [models]
    if not all(isinstance(one, nn.Module) for one in models):
        raise ValueError(f"model = {model!r}; allowed: a torch.nn.Module, or several")
    groups = param_groups(*models)
    if not groups:
        raise ValueError(why_no_groups(*models))
    return groups


@named()
def check_settings(
    groups: list[ParamGroup], settings: dict[str, Any], error: ValueError | None
) -> None:
    """Compares settings and parameters among the ranks that shard them together.

    Args:
        groups: of the model. Every rank of their process groups must call this.
        settings: by name.
        error: what is wrong with them on this rank, if anything.

    Raises:
        ValueError: this rank's ``error``, or another's.
        SettingsError: the ranks differ.
    """
    shapes = [(group.name, group.params, group.numels) for group in groups]
    mine = (str(error) if error else "", settings, repr(shapes))
    for process_group in {group.process_group: None for group in groups}:
        theirs: list[Any] = [None] * process_group.size()
        dist.all_gather_object(theirs, mine, process_group)
        ranks = dist.get_process_group_ranks(process_group)
        for rank, (message, *_) in zip(ranks, theirs, strict=True):
            if message and error is None:
                error = ValueError(f"on rank {rank}: {message}")
        for name in settings if error is None else ():
            by_rank = {r: other[1][name] for r, other in zip(ranks, theirs, strict=True)}
            if len({repr(value) for value in by_rank.values()}) > 1:
                raise SettingsError(f"ranks were given different settings of {name!r}: {by_rank}")
        if error is None and len({other[2] for other in theirs}) > 1:
            raise SettingsError(
                f"ranks {ranks} shard different parameters over the same process group: build the "
                "same model with the same fully_shard calls on every rank"
            )
    if error is not None:
        raise error


@named()
def raise_alike(
    error: NarrowcastError | None, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raises, on every rank of ``group``, the ``error`` of the first one that has any.

    Costs one small all-reduce where none has. Every rank must call this.
    """
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if failed.item():
        errors: list[NarrowcastError | None] = [None] * group.size()
        dist.all_gather_object(errors, error, group)
        raise next(found for found in errors if found is not None)
