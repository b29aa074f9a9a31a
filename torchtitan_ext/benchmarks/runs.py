"""One run of the training job: starts its ranks, follows their log, and reads their results.

A run does what ``torchrun --nproc-per-node N -m torchtitan_ext.train FLAGS`` does, through
torchrun's own launcher, without two waits: each rank is a new process forked from one that has
imported torchtitan, because imports take longer than everything else that starts a small job; and
at the end the first rank does not sleep for two seconds, because the launcher waits for the others.
"""

import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import LaunchConfig, elastic_launch

from torchtitan_ext import train as training
from torchtitan_ext.private import skip_final_sleep

# What a rank imports before it reads its configuration.
_PRELOADED = [
    "torchtitan.train",
    "torchtitan_ext.cpu",
    "torchtitan_ext.models",
    "torchtitan_ext.toml.load",
    "torch.utils.tensorboard",
    __name__,
]
_FOLLOW_INTERVAL_S = 0.3
_TAIL_LINES = 20
_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Run:
    """The results of a run.

    Attributes:
        scalars: by TensorBoard's tag, in the order of steps.
        parameters: the model's tensors after the last step, whole.
        parameter_count: of the model, as torchtitan counts them.
    """

    scalars: dict[str, list[float]]
    parameters: dict[str, Tensor]
    parameter_count: int


class RunError(RuntimeError):
    """A rank of a run failed; the message has the end of its log, and where all of it is."""


def train(
    folder: Path, flags: Sequence[str], world_size: int, on_line: Callable[[str], None]
) -> None:
    """Run the job on ``world_size`` ranks of this machine to its end. From the main thread only.

    Args:
        folder: the job's dump folder, new or empty. What ranks print goes to ``folder/logs``.
        flags: of ``torchtitan_ext.train``, without the dump folder.
        on_line: called with every line that the first rank logs, in another thread.

    Raises:
        RunError: a rank failed. All are stopped by then, as they are after any other exception.
    """
    # As torchrun has it. Read when torch is imported: before the ranks' parent process starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    launch = elastic_launch(
        LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.OUT),
        ),
        _train_rank,
    )
    with _signal_handlers_kept(), _following(folder, on_line), _without_log_lines():
        try:
            launch([*flags, "--dump_folder", str(folder)])
        except ChildFailedError as error:
            rank, _ = error.get_first_failure()
            raise RunError(_failure(folder, rank, error)) from None


def read_run(folder: Path, steps: int) -> Run:
    """The results of a run of so many steps.

    Raises:
        ValueError: the folder does not hold such a run.
    """
    found = re.search(r"size: ([\d,]+) total parameters", _log_text(folder, rank=0))
    if not found:
        raise ValueError(f"{folder} holds no run, or the log of one that built no model: run again")
    return Run(
        scalars=read_scalars(folder),
        parameters=read_parameters(folder, step=steps),
        parameter_count=int(found[1].replace(",", "")),
    )


def read_scalars(folder: Path) -> dict[str, list[float]]:
    """The TensorBoard scalars of a run, by tag, in the order of steps.

    Raises:
        ValueError: the folder holds no event file, or those of several runs.
    """
    files = sorted(folder.rglob("events.out.tfevents.*"))
    if len(files) != 1:
        raise ValueError(
            f"{folder} holds {len(files)} event files, where a run leaves one: remove the folder "
            "and run again"
        )
    events = EventAccumulator(str(files[0]), size_guidance={SCALARS: 0})
    events.Reload()
    return {
        tag: [event.value for event in sorted(events.Scalars(tag), key=lambda e: e.step)]
        for tag in events.Tags()["scalars"]
    }


def read_parameters(folder: Path, step: int) -> dict[str, Tensor]:
    """The model's tensors, whole, from the checkpoint that a run saved after a step.

    Raises:
        ValueError: there is no such checkpoint.
    """
    checkpoint = folder / "checkpoint" / f"step-{step}"
    if not (checkpoint / ".metadata").is_file():
        raise ValueError(f"{folder} holds no checkpoint of step {step}: run again")
    reader = dcp.FileSystemReader(checkpoint)
    tensors = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in reader.read_metadata().state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # Says that there is one process, which no_dist=True says too.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _train_rank(flags: list[str]) -> None:
    """The main function of each rank."""
    # One log a rank, with tracebacks and warnings where they occur.
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    skip_final_sleep()
    sys.argv = ["torchtitan_ext.train", *flags]
    training.main()


def _logs(folder: Path, rank: int) -> list[Path]:
    """The rank's log, where torch's launcher puts it."""
    return sorted(folder.glob(f"logs/*/attempt_0/{rank}/stdout.log"))


def _log_text(folder: Path, rank: int) -> str:
    """What a rank logged; empty where it did not start."""
    return "".join(log.read_text(errors="replace") for log in _logs(folder, rank))


def _failure(folder: Path, rank: int, error: ChildFailedError) -> str:
    logs = _logs(folder, rank)
    tail = "\n".join(_log_text(folder, rank).splitlines()[-_TAIL_LINES:])
    return (
        f"run {folder.name} failed on rank {rank}. The end of its log:\n{tail}\n{error}\n"
        f"All of the log: {logs[0] if logs else folder / 'logs'}"
    )


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the signal handlers that torch's launcher replaces to stop the ranks."""
    before = {s: signal.getsignal(s) for s in _STOPPING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _without_log_lines() -> Iterator[None]:
    """Without the log lines of torch's launcher, whose exception says the same."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _following(folder: Path, on_line: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_line`` with each line of the first rank's log, with the last before the end."""
    ended = threading.Event()

    def follow() -> None:
        position = 0
        last_round = False
        while not last_round:
            last_round = ended.wait(_FOLLOW_INTERVAL_S)
            for log in _logs(folder, rank=0)[:1]:
                with log.open("rb") as file:
                    file.seek(position)
                    # A line without an end is not whole yet.
                    whole, end, _ = file.read().rpartition(b"\n")
                position += len(whole + end)
                for line in whole.decode(errors="replace").splitlines():
                    on_line(line)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
