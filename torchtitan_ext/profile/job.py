"""Which job a profile trains, and whether it can."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchtitan.trainer import Trainer

from narrowcast.config import PlacementConfig
from narrowcast.util import check_writable
from torchtitan_ext.checking import check_alone
from torchtitan_ext.compat import apply
from torchtitan_ext.job import parse_job
from torchtitan_ext.launch import is_first_rank
from torchtitan_ext.profile.figures import check_drawable

STEPS = 40
_LEAST_STEPS = 6
_SETTLED_STEPS = 10  # at the end; all figures but the second are about these
STEPS_FLAG = "--profile.steps"


def parse_profile(flags: Sequence[str]) -> tuple[int, Trainer.Config]:
    """The number of steps and the job that flags ask for.

    Raises:
        ValueError, ImportError, OSError: flags or the TOML file are wrong.
    """
    apply()
    steps, flags = _take_steps(flags)
    return steps, parse_job(flags)


def check_profile(config: Trainer.Config, steps: int, world_size: int | None = None) -> None:
    """Check that a job can be profiled, as far as one process can without the others.

    Args:
        world_size: by default that of the launcher.

    Raises:
        ValueError, ImportError, OSError: a section cannot work with the job, matplotlib is
            missing, or files cannot be read or written.
    """
    check_alone(observed_job(config, steps), is_first_rank=is_first_rank(), world_size=world_size)
    check_drawable()
    if is_first_rank():
        check_writable(folder_of(config) / "profile.json")


def folder_of(config: Trainer.Config) -> Path:
    """The folder of the profile of a job."""
    return Path(config.dump_folder) / "profile"


def observed_job(config: Trainer.Config, steps: int) -> Trainer.Config:
    """The same job with ``steps`` steps, in which nothing is narrowed but everything is measured.
    Routing is not traced, and experts do not move."""
    warmup = steps - min(_SETTLED_STEPS, steps // 2)
    interval = config.narrowcast.all_gather.reselect_interval
    placement = config.narrowcast.placement
    narrowcast = replace(
        config.narrowcast,
        all_gather=replace(
            config.narrowcast.all_gather,
            enable=True,
            compression="observe",
            warmup_steps=warmup,
            # A second choice within the profile would be counted as communication.
            reselect_interval=interval and max(interval, steps),
        ),
        reduce_scatter=replace(config.narrowcast.reduce_scatter, enable=False),
        routing_trace=replace(config.narrowcast.routing_trace, enable=False),
        placement=PlacementConfig() if placement.after_steps else placement,
        volume=replace(config.narrowcast.volume, enable=True),
    )
    # Learning rates are those of the whole job.
    total_steps = config.lr_scheduler.total_steps or config.training.steps
    return replace(
        config,
        dump_folder=str(folder_of(config)),
        training=replace(config.training, steps=steps),
        lr_scheduler=replace(config.lr_scheduler, total_steps=max(total_steps, steps)),
        profiler=replace(config.profiler, enable_profiling=False, enable_memory_snapshot=False),
        narrowcast=narrowcast,
    )


def _take_steps(flags: Sequence[str]) -> tuple[int, list[str]]:
    """The value of the profile's own flag, and the other flags.

    Raises:
        ValueError: the value is no number of steps.
    """
    rest: list[str] = []
    given: str | None = None
    remaining = iter(flags)
    for flag in remaining:
        name, equals, value = flag.partition("=")
        if name == STEPS_FLAG:
            given = value if equals else next(remaining, "")
        else:
            rest.append(flag)
    if given is None:
        return STEPS, rest
    if not given.isdecimal() or int(given) < _LEAST_STEPS:
        raise ValueError(f"{STEPS_FLAG} {given}: must be an integer of at least {_LEAST_STEPS}")
    return int(given), rest
