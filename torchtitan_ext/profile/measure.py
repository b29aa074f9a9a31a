"""Trains a job for some steps as baseline FSDP2 does, and measures it."""

import dataclasses
import gc
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.trainer import Trainer

from narrowcast.autotune import calibration, change_profile, choice_report
from narrowcast.fsdp2 import ParamGroup, param_groups
from narrowcast.telemetry.over_ranks import reduce_over_ranks
from narrowcast.telemetry.step_volume import StepVolume
from torchtitan_ext.across_ranks import gathered
from torchtitan_ext.profile.job import STEPS, STEPS_FLAG, observed_job
from torchtitan_ext.profile.recommendation import recommend
from torchtitan_ext.profile.watch import StepWatch, seconds_per_step

_SAMPLES_A_STEP = 4.0  # in the warm-up
_MEASURES = (
    "Time of every collective from when it starts on a rank until it is done there, by torch's "
    "profiler, of the rank that waits least for the others; two at once count twice. Bytes: what "
    "the rank sends that sends most."
)


class ProfileError(ValueError):
    """A job cannot be profiled in so many steps; raised on every rank alike."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one rank measured.

    Attributes:
        changes: of exponents.
        seconds: by step.
        collectives: kind and seconds of each, in the profiled steps.
        check_seconds: of a check of all shards, by method.
    """

    changes: change_profile.Recorded
    seconds: dict[int, float]
    collectives: list[tuple[str, float]]
    check_seconds: dict[str, float]


def profile(config: Trainer.Config, steps: int = STEPS) -> dict[str, Any]:
    """Train a job for some steps and measure it. Every rank must call it alike.

    It saves no checkpoint, and logs to ``dump_folder/profile``.

    Returns:
        The profile, as strict JSON can hold it. It is the same on every rank, except for the
        selection of pipeline stages, which is that of the rank's own stage.

    Raises:
        ProfileError: the job's data ended before, or its steps have too little room for samples.
    """
    observed = observed_job(config, steps)
    trainer = observed.build()
    try:
        trainer.checkpointer.save = lambda *_, **__: None
        groups = param_groups(*trainer.model_parts)
        watch = _trained(trainer, groups, steps)
        controller = trainer.narrowed.selection
        volume = reduce_over_ranks(trainer.narrowed.ledger.last, trainer.device)
        by_rank = _measured(watch, groups, observed.narrowcast.all_gather.block_size)
        made = {
            "job": _job(trainer, watch, steps),
            **_report(by_rank, watch, volume, observed.narrowcast.all_gather.warmup_steps),
            "calibration": calibration.as_json(controller.calibration),
            "selection": choice_report.as_json(controller.problem, controller.choice),
            "reductions": [
                {**dataclasses.asdict(one), "is_worthwhile": one.is_worthwhile}
                for one in controller.reductions
            ],
        }
        made["recommendation"] = recommend(
            config.narrowcast,
            controller.problem,
            controller.choice,
            controller.reductions,
            made["step_seconds"]["median"],
        )
        return json.loads(json.dumps(made, allow_nan=False))
    finally:
        trainer.close()
        gc.enable()  # torchtitan disables it


def _trained(trainer: Any, groups: Sequence[ParamGroup], steps: int) -> StepWatch:
    """Train the whole job, observed."""
    switches = trainer.config.narrowcast.all_gather
    # More than training has room for; steps are timed after the choice, when there are no samples.
    trainer.narrowed.selection.sampler.chunks_per_step = _SAMPLES_A_STEP
    recorder = change_profile.ChangeRecorder(groups, switches.block_size)
    watch = StepWatch(trainer, groups, recorder, switches.warmup_steps)
    trainer.optimizers.register_step_post_hook(lambda *_: watch.after_step())
    trainer.train()
    if max(watch.seconds, default=0) < steps:
        raise ProfileError(f"the job's data ended before step {steps}: give fewer by {STEPS_FLAG}")
    if trainer.narrowed.selection.choice is None:
        raise ProfileError(
            "no shard was sampled in so short a run: its steps have less room than a sample takes. "
            f"Give more by {STEPS_FLAG}"
        )
    return watch


def _measured(watch: StepWatch, groups: Sequence[ParamGroup], block_size: int) -> list[Measured]:
    """What each rank measured, in the order of the ranks."""
    dist.barrier()
    checks = change_profile.check_seconds(groups, block_size)
    return gathered(Measured(watch.recorder.recorded(), watch.seconds, watch.collectives, checks))


def _job(trainer: Any, watch: StepWatch, steps: int) -> dict[str, Any]:
    config = trainer.config
    return {
        "name": Path(config.job.config_file).name or type(config).__qualname__,
        "config_file": config.job.config_file,
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "device": trainer.device.type,
        "parameters": sum(p.numel() for m in trainer.model_parts for p in m.parameters()),
        "steps": steps,
        "settled_after_step": config.narrowcast.all_gather.warmup_steps,
        "learning_rate": watch.learning_rate,
    }


def _report(
    by_rank: Sequence[Measured], watch: StepWatch, volume: StepVolume, warmup: int
) -> dict[str, Any]:
    """What all ranks measured together."""
    seconds = {step: max(one.seconds[step] for one in by_rank) for step in by_rank[0].seconds}
    median = statistics.median(taken for step, taken in seconds.items() if step > warmup)
    return {
        "step_seconds": {
            "median": median,
            "of_steps": {str(step): taken for step, taken in seconds.items()},
            "measures": "Wall time of the slowest rank, without the profile's own.",
        },
        "communication": {
            "measures": _MEASURES,
            "profiled_steps": watch.profiled,
            "seconds_per_step": seconds_per_step(
                [one.collectives for one in by_rank], max(watch.profiled, 1)
            ),
            "bytes_per_step": dict(volume.sent),
        },
        **change_profile.merged([one.changes for one in by_rank]),
        "check_cost": _check_cost([one.check_seconds for one in by_rank], median),
    }


def _check_cost(by_rank: Sequence[dict[str, float]], step_seconds: float) -> dict[str, Any]:
    intervals = change_profile.INTERVALS
    seconds = {name: max(one[name] for one in by_rank) for name in ("hash", "compare")}
    shares = {
        name: [s / interval / (step_seconds + s / interval) for interval in intervals]
        for name, s in seconds.items()
    }
    return {
        "measures": "Seconds that the slowest rank takes to check all its shards, measured alone; "
        "of a step's time with its checks, not overlapped, computed.",
        "seconds": seconds,
        "intervals": list(intervals),
        "share_of_step": shares,
    }
