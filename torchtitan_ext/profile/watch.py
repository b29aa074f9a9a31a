"""What a profile observes of a training job: step times, exponents, and collectives."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from narrowcast import util
from narrowcast.autotune.change_profile import ChangeRecorder

_PROFILED_STEPS = 2

# What names of collectives contain, without underscores, in gloo's events and NCCL's kernels.
_COLLECTIVES = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "sendrecv": "all_to_all",
}


class StepWatch:
    """Observes a trainer after each of its steps.

    Args:
        trainer: whose parameters are sharded in ``groups``.
        groups: parameter groups.
        recorder: of changes of exponents.
        warmup: the step after which collectives are profiled, and steps settled.

    Attributes:
        seconds: by step, of those in which collectives were not profiled.
        collectives: kind and seconds of each collective of the profiled steps, as they began.
        profiled: number of profiled steps.
        learning_rate: of the last step.
    """

    def __init__(
        self, trainer: Any, groups: Sequence[Any], recorder: ChangeRecorder, warmup: int
    ) -> None:
        self.recorder = recorder
        self.seconds: dict[int, float] = {}
        self.collectives: list[tuple[str, float]] = []
        self.profiled = 0
        self.learning_rate = 0.0
        self._trainer, self._warmup = trainer, warmup
        # gloo's reduce-scatter is an all-reduce, which only its size distinguishes from others.
        self._reduced = {sum(group.numels) * group.process_group.size() for group in groups}
        self._on_cpu = trainer.device.type == "cpu"
        activity = torch.profiler.ProfilerActivity
        self._profiler = torch.profiler.profile(
            activities=[activity.CPU if self._on_cpu else activity.CUDA], record_shapes=True
        )
        self._is_profiling = False
        self._ended = 0.0

    def after_step(self) -> None:
        """Every rank must call it after each step."""
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
            self._trainer.narrowed.selection.sampler.chunks_per_step = 0.0
            self._profiler.start()
            self._is_profiling = True
        util.now(self._trainer.device)
        dist.barrier()  # so that no rank waits in the next step for another's observation
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
        """The kind of a collective's event; None for other events."""
        name = event.name()
        if not name.startswith("gloo:" if self._on_cpu else ("ncclDevKernel", "ncclKernel")):
            return None
        if "barrier" in name:
            return None  # the profile's own
        joined = name.lower().replace("_", "")
        kind = next((kind for part, kind in _COLLECTIVES.items() if part in joined), "other")
        if self._on_cpu and kind == "all_reduce" and event.shapes():
            (shape, *_) = event.shapes()
            if len(shape) == 1 and shape[0] in self._reduced:
                return "reduce_scatter"
        return kind


def seconds_per_step(
    by_rank: Sequence[Sequence[tuple[str, float]]], num_steps: int
) -> dict[str, float]:
    """Seconds of collectives in a step by kind, of the rank that waits least for the others.

    That rank is taken for each collective where all ranks have as many of the kind, and for all
    collectives of the kind otherwise.

    Args:
        by_rank: kind and seconds of each collective of ``num_steps`` steps.
    """
    kinds = Counter(kind for of_rank in by_rank for kind, _ in of_rank)
    totals = {}
    for kind in sorted(kinds):
        seconds = [[s for other, s in of_rank if other == kind] for of_rank in by_rank]
        if len({len(of_rank) for of_rank in seconds}) == 1:
            total = sum(map(min, zip(*seconds, strict=True)))
        else:
            total = min(sum(of_rank) for of_rank in seconds if of_rank)
        totals[kind] = total / num_steps
    return totals
