"""Profiles a job: what its collectives take, how often its exponents change, and what would pay.

    torchrun --nproc-per-node 8 -m torchtitan_ext.profile --job.config_file x.toml

It trains some steps as plain FSDP2 would, and watches: figures 1 to 5 of the CIERA paper, and the
TOML lines that this job should have. Any flag of torchtitan may follow. ``docs/profile.md`` tells
what it writes to ``dump_folder/profile``.
"""

import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowcast.util import write_text
from torchtitan_ext.launch import LAUNCHED, prepared, quiet, speaks
from torchtitan_ext.profile import figures
from torchtitan_ext.profile.job import STEPS, STEPS_FLAG, folder_of, observed_job, prepare_profile
from torchtitan_ext.profile.recommendation import recommend

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

_NAME = "torchtitan_ext.profile"
_PROFILED_STEPS = 2
_PIECES_A_STEP = 4.0  # that are looked at in the warm-up

# What names of collectives hold, written without underscores, in gloo's events and NCCL's kernels.
_COLLECTIVES = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "sendrecv": "all_to_all",
}
_MEASURES = (
    "Time of every collective from when it starts on a rank until it is done there, by torch's "
    "profiler, of the rank that waits least for the others; two at once count twice. Bytes: what "
    "the rank sends that sends most."
)


class ProfileError(ValueError):
    """A job cannot be profiled in so many steps; raised on every rank alike."""


def launch(ranks: int | None, flags: Sequence[str]) -> int:
    """Profiles on so many ranks of this machine (None: one for each accelerator), or, within
    torchrun, as one of its ranks. Returns the exit code there; elsewhere this process becomes
    torchrun's, so that it ends when torchrun does, and the other way round.

    Raises:
        ValueError, ImportError, OSError: there are no two ranks, or flags or files are wrong.
    """
    if "RANK" in os.environ:
        if ranks is not None:
            raise ValueError(f"--ranks {ranks}: torchrun has started the ranks: leave it out")
        main(list(flags))
        return 0
    import torch

    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else None
    ranks = devices if ranks is None else ranks
    if ranks is None or ranks < 2:
        given = "there is no accelerator" if ranks is None else f"{ranks} rank"
        raise ValueError(f"{given}: parameters are gathered by 2 ranks or more: give --ranks N")
    if devices is not None and ranks > devices:
        raise ValueError(f"--ranks {ranks}: this machine has {devices} accelerators: give no more")
    given_flags = sys.argv[1:]
    with quiet():  # what is wrong is said here, once, and not by torchrun
        prepare_profile(flags, world_size=ranks)
    sys.argv[1:] = given_flags
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "torchtitan_ext.profile", *flags]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def main(flags: list[str] | None = None) -> None:
    """A rank of it. Exits with code 2 and a short message where flags or files are wrong, on every
    rank alike."""
    flags = sys.argv[1:] if flags is None else flags
    import torch.distributed as dist
    from torchtitan.tools.logging import init_logger

    init_logger()

    def prepare() -> tuple[int, "Trainer.Config"]:
        found = prepare_profile(flags)
        missing = [name for name in LAUNCHED if not os.environ.get(name)]
        if missing and not dist.is_initialized():
            raise ValueError(
                f"{', '.join(missing)} not set: start the ranks by torchrun, or all of it by "
                "narrowcast profile --ranks N"
            )
        return found

    steps, config = prepared(_NAME, prepare)
    try:
        measured = profile(config, steps)
    except ProfileError as error:
        if speaks():
            print(f"{_NAME}: {error}", file=sys.stderr)
        sys.exit(2)
    if dist.get_rank() == 0:
        print(f"\n{write(measured, folder_of(config))}")
    dist.destroy_process_group()


def write(measured: dict[str, Any], folder: Path) -> str:
    """Writes a profile and its figures, and returns what to tell of them."""
    file = folder / "profile.json"
    write_text(file, json.dumps(measured, indent=1, allow_nan=False) + "\n")
    drawn = figures.draw(measured, folder)
    recommended = measured["recommendation"]
    return (
        f"{recommended['text']}\n\n{recommended['toml']}\n"
        f"Wrote {file} and {drawn[0].name} to {drawn[-1].name}"
    )


def profile(config: "Trainer.Config", steps: int = STEPS) -> dict[str, Any]:
    """Trains the job for some steps and returns its profile, as strict JSON holds it. The same on
    every rank, but for the selection of pipeline stages, which is that of the rank's own. Saves no
    checkpoint, and logs to ``dump_folder/profile``."""
    import torch.distributed as dist

    from narrowcast.autotune import calibration, change_profile, choice_report
    from narrowcast.fsdp2 import param_groups
    from narrowcast.telemetry.over_ranks import reduce_over_ranks

    observed = observed_job(config, steps)
    warmup = observed.narrowcast.all_gather.warmup_steps
    trainer = observed.build()
    try:
        trainer.checkpointer.save = lambda *_, **__: None
        groups = param_groups(*trainer.model_parts)
        block_size = observed.narrowcast.all_gather.block_size
        # More than training has room for; the steps whose time is taken come after the choice.
        trainer.narrowed.selection.sampler.pieces_a_step = _PIECES_A_STEP
        watch = _Watch(trainer, groups, change_profile.ChangeRecorder(groups, block_size), warmup)
        trainer.optimizers.register_step_post_hook(lambda *_: watch.after_step())
        trainer.train()
        if max(watch.seconds, default=0) < steps:
            raise ProfileError(
                f"the job's data ended before step {steps}: give fewer by {STEPS_FLAG}"
            )
        controller = trainer.narrowed.selection
        if controller.choice is None:
            raise ProfileError(
                "nothing of the shards was seen in so short a run: its steps have less room than a "
                f"look takes. Give more by {STEPS_FLAG}"
            )
        volume = reduce_over_ranks(trainer.narrowed.ledger.last, trainer.device)
        dist.barrier()
        checks = change_profile.check_seconds(groups, block_size)
        mine = (watch.recorder.recorded(), watch.seconds, watch.collectives, checks)
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        recorded, seconds, collectives, checks = zip(*everyones, strict=True)
        step_seconds = {step: max(one[step] for one in seconds) for step in seconds[0]}
        step_median = statistics.median(
            taken for step, taken in step_seconds.items() if step > warmup
        )
        measured: dict[str, Any] = {
            "job": {
                "name": Path(observed.job.config_file).name or type(config).__qualname__,
                "config_file": observed.job.config_file,
                "world_size": dist.get_world_size(),
                "backend": dist.get_backend(),
                "device": trainer.device.type,
                "parameters": sum(p.numel() for m in trainer.model_parts for p in m.parameters()),
                "steps": steps,
                "settled_after_step": warmup,
                "learning_rate": watch.learning_rate,
            },
            "step_seconds": {
                "median": step_median,
                "of_steps": {str(step): s for step, s in step_seconds.items()},
                "measures": "Wall time of the slowest rank, without the profile's own.",
            },
            "communication": {
                "measures": _MEASURES,
                "profiled_steps": watch.profiled,
                "seconds_per_step": _seconds_a_step(collectives, max(watch.profiled, 1)),
                "bytes_per_step": dict(volume.sent),
            },
            **change_profile.merged(recorded),
            "check_cost": _check_cost(checks, step_median),
            "calibration": calibration.as_json(controller.calibration),
            "selection": choice_report.as_json(controller.problem, controller.choice),
            "reductions": [
                {**dataclasses.asdict(one), "pays": one.is_worthwhile}
                for one in controller.reductions
            ],
        }
        measured["recommendation"] = recommend(
            config.narrowcast,
            controller.problem,
            controller.choice,
            controller.reductions,
            step_median,
        )
        return json.loads(json.dumps(measured, allow_nan=False))
    finally:
        trainer.close()
        gc.enable()  # torchtitan disables it


class _Watch:
    """Looks at a trainer after each of its steps.

    Attributes:
        seconds: by step, of those that were not profiled.
        collectives: kinds and seconds of all collectives of the profiled steps, as they began.
    """

    def __init__(self, trainer: Any, groups: list[Any], recorder: Any, warmup: int) -> None:
        import torch

        self.recorder = recorder
        self.seconds: dict[int, float] = {}
        self.collectives: list[tuple[str, float]] = []
        self.profiled = 0
        self.learning_rate = 0.0
        self._trainer, self._warmup = trainer, warmup
        # gloo makes its reduce-scatter of an all-reduce, which only its size tells from others.
        self._reduced = {sum(group.numels) * group.process_group.size() for group in groups}
        self._on_cpu = trainer.device.type == "cpu"
        activity = torch.profiler.ProfilerActivity
        self._profiler = torch.profiler.profile(
            activities=[activity.CPU if self._on_cpu else activity.CUDA], record_shapes=True
        )
        self._is_profiling = False
        self._ended = 0.0

    def after_step(self) -> None:
        import torch.distributed as dist

        from narrowcast import util

        step, now = self._trainer.step, util.now(self._trainer.device)
        if self._is_profiling:
            self.profiled += 1
            if self.profiled == _PROFILED_STEPS:
                self._end_profiling()
        elif self._ended:
            self.seconds[step] = now - self._ended
        (optimizer, *_) = self._trainer.optimizers
        self.learning_rate = float(optimizer.param_groups[0]["lr"])
        self.recorder.after_step(step, settled=step > self._warmup)
        if step == self._warmup:
            self._trainer.narrowed.selection.sampler.pieces_a_step = 0.0
            self._profiler.start()
            self._is_profiling = True
        util.now(self._trainer.device)
        dist.barrier()  # none waits in the next step for another's look at this one
        self._ended = time.perf_counter()

    def _end_profiling(self) -> None:
        self._profiler.stop()
        self._is_profiling = False
        events = sorted(
            self._profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()
        )
        for event in events:
            kind = self._kind(event)
            if kind is not None:
                self.collectives.append((kind, 1e-9 * event.duration_ns()))

    def _kind(self, event: Any) -> str | None:
        """Of a collective's event; None of other events."""
        name = event.name()
        if not name.startswith("gloo:" if self._on_cpu else ("ncclDevKernel", "ncclKernel")):
            return None
        if "barrier" in name:
            return None  # ours
        plain = name.lower().replace("_", "")
        kind = next((kind for part, kind in _COLLECTIVES.items() if part in plain), "other")
        if self._on_cpu and kind == "all_reduce" and event.shapes():
            (shape, *_) = event.shapes()
            if len(shape) == 1 and shape[0] in self._reduced:
                return "reduce_scatter"
        return kind


def _seconds_a_step(
    of_ranks: Sequence[list[tuple[str, float]]], num_steps: int
) -> dict[str, float]:
    """By kind, of the rank that waits least for the others: in each collective, where all ranks
    have as many of the kind, and in all of them otherwise."""
    kinds = Counter(kind for one in of_ranks for kind, _ in one)
    totals = {}
    for kind in sorted(kinds):
        seconds = [[s for other, s in one if other == kind] for one in of_ranks]
        if len({len(one) for one in seconds}) == 1:
            total = sum(map(min, zip(*seconds, strict=True)))
        else:
            total = min(sum(one) for one in seconds if one)
        totals[kind] = total / num_steps
    return totals


def _check_cost(of_ranks: Sequence[dict[str, float]], step_seconds: float) -> dict[str, Any]:
    from narrowcast.autotune.change_profile import INTERVALS

    seconds = {name: max(one[name] for one in of_ranks) for name in ("hash", "compare")}
    shares = {
        name: [s / interval / (step_seconds + s / interval) for interval in INTERVALS]
        for name, s in seconds.items()
    }
    return {
        "measures": "Seconds that the slowest rank takes to check all its shards, measured alone; "
        "of a step's time with its checks, not overlapped, computed.",
        "seconds": seconds,
        "intervals": list(INTERVALS),
        "share_of_step": shares,
    }


if __name__ == "__main__":
    main()
