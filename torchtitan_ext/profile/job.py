"""Which job a profile trains, and whether it can."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.trainer import Trainer

from narrowcast.config import PlacementConfig, TopologyConfig
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
JSON_FLAG = "--json"


@dataclass(frozen=True)
class Profile:
    """What flags ask for.

    Attributes:
        steps: to train.
        config: the job.
        files: the JSON files to write.
    """

    steps: int
    config: Trainer.Config
    files: tuple[Path, ...]


def parse_profile(flags: Sequence[str]) -> Profile:
    """The profile that flags ask for.

    Raises:
        ValueError, ImportError, OSError: flags or the TOML file are wrong.
    """
    apply()
    given_steps, flags = _take(STEPS_FLAG, flags)
    given_file, flags = _take(JSON_FLAG, flags)
    steps = _steps(given_steps)
    if given_file == "":
        raise ValueError(f"{JSON_FLAG}: must be the name of a file")
    config = parse_job(flags)
    files = [folder_of(config) / "profile.json", *([] if given_file is None else [given_file])]
    return Profile(steps, config, tuple(map(Path, files)))


def check_profile(profile: Profile, world_size: int | None = None) -> None:
    """Check that a job can be profiled, as far as one process can without the others.

    Args:
        world_size: by default that of the launcher.

    Raises:
        ValueError, ImportError, OSError: a section cannot work with the job, matplotlib is
            missing, or files cannot be read or written.
    """
    job = observed_job(profile.config, profile.steps)
    check_alone(job, is_first_rank=is_first_rank(), world_size=world_size)
    check_drawable()
    if is_first_rank():
        for file in profile.files:
            check_writable(file)


def folder_of(config: Trainer.Config) -> Path:
    """The folder of the profile of a job."""
    return Path(config.dump_folder) / "profile"


def observed_job(config: Trainer.Config, steps: int) -> Trainer.Config:
    """The same job with ``steps`` steps, in which nothing is narrowed but everything is measured.
    Routing is not traced, and experts do not move. Where all ranks are on one node, within which
    nothing would be narrowed, each is taken for a node of its own."""
    warmup = steps - min(_SETTLED_STEPS, steps // 2)
    interval = config.narrowcast.all_gather.reselect_interval
    placement = config.narrowcast.placement
    topology = config.narrowcast.topology
    if topology.ranks_per_node == "auto" and _is_one_node():
        topology = TopologyConfig(ranks_per_node=1)
    narrowcast = replace(
        config.narrowcast,
        topology=topology,
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


def _is_one_node() -> bool:
    world_size = os.environ.get("WORLD_SIZE")
    return world_size is None or world_size == os.environ.get("LOCAL_WORLD_SIZE")


def _take(flag: str, flags: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of one of the profile's own flags, ``None`` if it was not given, and all others."""
    rest: list[str] = []
    given: str | None = None
    remaining = iter(flags)
    for one in remaining:
        name, equals, value = one.partition("=")
        if name == flag:
            given = value if equals else next(remaining, "")
        else:
            rest.append(one)
    return given, rest


def _steps(given: str | None) -> int:
    """The number of steps.

    Raises:
        ValueError: what was given is no number of steps.
    """
    if given is None:
        return STEPS
    if not given.isdecimal() or int(given) < _LEAST_STEPS:
        raise ValueError(f"{STEPS_FLAG} {given}: must be an integer of at least {_LEAST_STEPS}")
    return int(given)
