"""Runs a function over the layers of a model, in processes of one thread each, with a bar."""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from time import perf_counter as seconds
from typing import Any, TypeVar

import torch
from tqdm import tqdm

_WORTH_STARTING = 5.0  # seconds of work, beyond which starting processes is worthwhile
_BYTES_OF_TORCH = 2**28  # memory of a process that has imported torch

T = TypeVar("T")
R = TypeVar("R")


def each(
    function: Callable[[T], R],
    tasks: Iterable[T],
    count: int,
    *,
    processes: int | None = 1,
    bytes_each: int = 0,
    description: str = "",
    progress: bool = False,
) -> list[R]:
    """Return the results of a function for the task of each layer, in the order of the tasks.

    Processes do not inherit the threads and devices of this one. They start their own interpreter,
    which imports the main module: a script that uses several must be guarded by
    ``if __name__ == "__main__"``. They end with this process, also when it is interrupted.

    Args:
        function: a function of a module, or a ``functools.partial`` of one, that can be pickled.
        tasks: consumed as needed, so that few of them are in memory.
        count: number of tasks.
        processes: maximum number of processes; with one, all layers run in this process. None: the
            first layer runs here, and if the others would take long, as many processes are started
            as cores and memory allow.
        bytes_each: memory that a layer needs.
        description: label of the progress bar.
        progress: show the progress bar on stderr.

    Raises:
        ChildProcessError: a process was killed from outside.
        Exception: the first one that the function raised.
    """
    tasks, results = iter(tasks), []
    with tqdm(total=count, desc=description, unit="layer", disable=not progress) as bar:

        def here(some: Iterable[T]) -> None:
            for task in some:
                results.append(function(task))
                bar.update()

        if processes is None:
            start = seconds()
            here(itertools.islice(tasks, 1))
            is_long = (seconds() - start) * (count - 1) > _WORTH_STARTING
            processes = processes_for(bytes_each) if is_long else 1
        processes = min(processes, count - len(results))
        if processes <= 1:
            here(tasks)
            return results
        return results + _elsewhere(function, tasks, count - len(results), processes, bar)


def _elsewhere(
    function: Callable[[T], R], tasks: Iterator[T], count: int, processes: int, bar: tqdm
) -> list[R]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once
    results: list[Any] = [None] * count
    numbered, pending = enumerate(tasks), {}
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start)
    with pool, _ended_on_errors(pool):
        while True:
            while len(pending) < 2 * processes and (following := next(numbered, None)):
                # Pickled here: torch would send tensors through shared memory, which is scarce in
                # containers.
                future = pool.submit(_call, pickle.dumps((function, following[1])))
                pending[future] = following[0]
            if not pending:
                return results
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                results[pending.pop(future)] = pickle.loads(future.result())
                bar.update()


def processes_for(bytes_each: int) -> int:
    """Return how many processes this machine has cores and free memory for."""
    available = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    fitting = int(available[1]) * 1024 // (bytes_each + _BYTES_OF_TORCH)
    return max(1, min(len(os.sched_getaffinity(0)), fitting))


@contextlib.contextmanager
def _ended_on_errors(pool: ProcessPoolExecutor) -> Iterator[None]:
    """Terminate the processes of a pool on any error or interrupt, rather than wait for them."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise ChildProcessError(
                "a process that worked on a layer was killed from outside, as happens when memory "
                "runs out: free some, or allow fewer cores (taskset)"
            ) from error
        raise


def _start() -> None:
    """Initialize a process."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # handled by the parent, which ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _call(pickled: bytes) -> bytes:
    function, task = pickle.loads(pickled)
    return pickle.dumps(function(task))
