"""Checks that our sections can work with a job, before anything of it is built.

Every rank can check most of it alone: rules between keys, and what follows from the model. Only
the first rank can check files, because it reads and writes them.
"""

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import torch.distributed as dist
from torchtitan.components.checkpointer.utils import canonical_fqn

from torchtitan_ext.across_ranks import from_every_rank
from torchtitan_ext.dispatch.hooks import check_dispatch, deduplicating
from torchtitan_ext.job import Job, world_size_of
from torchtitan_ext.placement.checks import check_placement, check_placement_files
from torchtitan_ext.traces.run import check_trace, check_trace_file


def check_alone(config: Any, *, is_first_rank: bool, world_size: int | None = None) -> None:
    """Check a job as far as one process can without the others.

    Args:
        config: of a trainer, with or without our sections.
        is_first_rank: whether this process reads and writes files.
        world_size: by default that of the launcher.

    Raises:
        ValueError, ImportError, OSError: a section cannot work with the job; the message names the
            key and the cure.
    """
    job = Job.of(config, world_size_of(config) if world_size is None else world_size)
    if not hasattr(config, "narrowcast"):
        return
    if config.narrowcast.dispatch.deduplicate:
        job = Job(deduplicating(config), job.dims)
    _check(job, is_first_rank)


def check_on_every_rank(job: Job) -> None:
    """Check a job within a process group. An error of any rank is raised on every rank.

    Raises:
        ValueError: a section cannot work with the job.
    """
    if not _sections(job.config.narrowcast):
        return
    from_every_rank(lambda: _check(job, is_first_rank=dist.get_rank() == 0))


def _sections(switches: Any) -> list[str]:
    """The sections that are switched on, apart from the ledger, which works with any job."""
    is_on = {
        "all_gather": switches.all_gather.enable,
        "reduce_scatter": switches.reduce_scatter.enable,
        "dispatch": switches.dispatch.deduplicate,
        "placement": switches.placement.enable,
        "routing_trace": switches.routing_trace.enable,
    }
    return [section for section, on in is_on.items() if on]


def _check(job: Job, is_first_rank: bool) -> None:
    sections = _sections(job.config.narrowcast)
    for section in sections:
        _CHECKS[section](job)
    for section in sections if is_first_rank else ():
        if section in _FILE_CHECKS:
            _FILE_CHECKS[section](job)


def _check_all_gather(job: Job) -> None:
    _check_sharded(job, "all_gather")
    patterns = job.config.narrowcast.all_gather.parameters
    if "*" in patterns:
        return
    names = [canonical_fqn(name) for name, _ in job.model.named_parameters()]
    if not any(fnmatch(name, pattern) for name in names for pattern in patterns):
        raise ValueError(
            f"narrowcast.all_gather.parameters = {patterns!r} matches none of the model's "
            f"parameters, such as {names[0]!r}"
        )


def _check_sharded(job: Job, section: str) -> None:
    dims = job.dims
    if dims is None or dims.dp_shard * dims.cp > 1 or dims.dp_shard * dims.cp * dims.tp > dims.ep:
        return
    raise ValueError(
        f"narrowcast.{section}.enable = true cannot work with "
        f"parallelism.data_parallel_shard_degree = {dims.dp_shard} on {dims.world_size} ranks: no "
        "parameter is sharded over more than one of them. Shard over more, or leave the section out"
    )


_CHECKS: dict[str, Callable[[Job], None]] = {
    "all_gather": _check_all_gather,
    "reduce_scatter": lambda job: _check_sharded(job, "reduce_scatter"),
    "dispatch": check_dispatch,
    "placement": check_placement,
    "routing_trace": check_trace,
}
_FILE_CHECKS: dict[str, Callable[[Job], None]] = {
    "placement": check_placement_files,
    "routing_trace": check_trace_file,
}
