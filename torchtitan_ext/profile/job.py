"""Which job a profile trains, and whether it can."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from narrowcast.config import PlacementConfig
from narrowcast.util import check_writable
from torchtitan_ext.launch import is_first_rank
from torchtitan_ext.profile import figures

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

STEPS = 40
_LEAST_STEPS = 6
_SETTLED_STEPS = 10  # at the end, of which all but figure 2 is
STEPS_FLAG = "--profile.steps"


def prepare_profile(
    flags: Sequence[str], world_size: int | None = None
) -> tuple[int, "Trainer.Config"]:
    """The steps and the job that flags ask for.

    Raises:
        ValueError, ImportError, OSError: they are wrong, or files are.
    """
    from torchtitan_ext import compat, cpu
    from torchtitan_ext.checking import check_alone

    compat.apply()
    cpu.apply()
    steps, flags = _take_steps(flags)
    config = _parse(flags)
    check_alone(observed_job(config, steps), is_first_rank=is_first_rank(), world_size=world_size)
    figures.check_drawable()
    if is_first_rank():
        check_writable(folder_of(config) / "profile.json")
    return steps, config


def folder_of(config: "Trainer.Config") -> Path:
    return Path(config.dump_folder) / "profile"


def _take_steps(flags: Sequence[str]) -> tuple[int, list[str]]:
    """Our own flag, and the others.

    Raises:
        ValueError: it is no number of steps.
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


def _parse(flags: Sequence[str]) -> "Trainer.Config":
    from torchtitan.config import ConfigManager

    sys.argv[1:] = ["--module", "torchtitan_ext", "--config", "from_toml", *flags]
    return ConfigManager().parse_args()


def observed_job(config: "Trainer.Config", steps: int) -> "Trainer.Config":
    """The same job, of so many steps, in which nothing is narrowed but all is watched; routing is
    not traced, and experts do not move."""
    replace = dataclasses.replace
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
            # No other look within the profile, which would be counted as communication.
            reselect_interval=interval and max(interval, steps),
        ),
        reduce_scatter=replace(config.narrowcast.reduce_scatter, enable=False),
        routing_trace=replace(config.narrowcast.routing_trace, enable=False),
        placement=PlacementConfig() if placement.after_steps else placement,
        volume=replace(config.narrowcast.volume, enable=True),
    )
    # Learning rates are those that the whole job would have.
    total_steps = config.lr_scheduler.total_steps or config.training.steps
    return replace(
        config,
        dump_folder=str(folder_of(config)),
        training=replace(config.training, steps=steps),
        lr_scheduler=replace(config.lr_scheduler, total_steps=max(total_steps, steps)),
        profiler=replace(config.profiler, enable_profiling=False, enable_memory_snapshot=False),
        narrowcast=narrowcast,
    )
