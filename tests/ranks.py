"""Runs functions on gloo ranks: processes that stay up from test to test, one thread each."""

import contextlib
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest

_TIMEOUT_S = 240
# Imported once, and not by each rank.
_PRELOADED = ["torch.distributed.fsdp", "narrowcast", "torchtitan.train", "torchtitan_ext.cpu"]
_MANY_GROUPS = 64  # of all ranks


@dataclass(frozen=True)
class Raised:
    """What a rank returns in place of a result when its function raised."""

    type: str
    message: str
    traceback: str


class Ranks:
    """A process group of ``world_size`` gloo ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, f"{self._folder.name}/store", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def outcomes(self, function: Callable, *args: Any, timeout_s: float = _TIMEOUT_S) -> list[Any]:
        """What ``function(*args)`` returned on each rank, or ``Raised``.

        Fails the test, and ends the ranks, if one does not answer in time: it hangs.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        results, ended = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout_s):
                self.end()
                pytest.fail(f"rank {rank} gave no answer in {timeout_s} s")
            result, is_over = pipe.recv()
            results.append(result)
            ended.append(is_over)
        if any(ended):
            self.end()
        return results

    def run(self, function: Callable, *args: Any) -> list[Any]:
        """What ``function(*args)`` returned on each rank; fails the test if one raised."""
        results = self.outcomes(function, *args)
        for rank, result in enumerate(results):
            if isinstance(result, Raised):
                pytest.fail(f"rank {rank} raised\n{result.traceback}")
        return results

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _share_subgroups() -> dict[tuple, Any]:
    """Meshes of one layout use the same groups from test to test. New groups cost threads, and what
    DTensor has worked out for a mesh, a second or more a run, is kept for the mesh's groups.

    Returns:
        The groups, of which each rank has the same ones, its own or not.
    """
    import torch.distributed as dist
    from torch.distributed import device_mesh

    made: dict[tuple, Any] = {}
    new_group = dist.new_group

    def shared_group(ranks: list[int] | None = None, **kwargs: Any) -> Any:
        if ranks is None:  # of all, for its maker alone
            return new_group(**kwargs)
        key = (tuple(ranks), kwargs.get("backend"), kwargs.get("group_desc"))
        if key not in made:
            made[key] = new_group(ranks, **kwargs)
        return made[key]

    dist.new_group = device_mesh.new_group = shared_group
    return made


def _end_subgroups(made: dict[tuple, Any]) -> None:
    """Ends the process groups that earlier functions made, once they are many: a thread of each
    wakes up a hundred times a second. All ranks have returned from those functions by now."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if len(made) < _MANY_GROUPS:
        return
    _clear_sharding_prop_cache()  # keeps meshes, and with them the names of their groups
    gc.collect()
    made.clear()
    for group in [g for g in dist.distributed_c10d._world.pg_map if g is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from narrowcast.errors import job_of

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    groups = _share_subgroups()
    with contextlib.suppress(EOFError):
        while True:
            function, args = pipe.recv()
            _end_subgroups(groups)
            try:
                result = function(*args)
            except BaseException as error:  # SystemExit and torch's CheckpointException too
                result = Raised(type(error).__name__, str(error), traceback.format_exc())
            pipe.send((result, job_of(None).error is not None))  # after which no group works
