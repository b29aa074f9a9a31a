"""Profiles a job: how long its collectives take, how often its exponents change, and which settings
of narrowcast are worthwhile.

    torchrun --nproc-per-node 8 -m torchtitan_ext.profile --job.config_file x.toml

It trains some steps as baseline FSDP2 does, and measures them: figures 1 to 5 of the CIERA paper,
and the TOML lines that this job should have. Any flag of torchtitan may follow.
``docs/profile.md`` describes what it writes to ``dump_folder/profile``.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools.logging import init_logger

from narrowcast.util import write_text
from torchtitan_ext.launch import LAUNCHED, is_speaker, prepared, quiet
from torchtitan_ext.profile.figures import draw
from torchtitan_ext.profile.job import Profile, check_profile, folder_of, parse_profile
from torchtitan_ext.profile.measure import ProfileError, profile

_NAME = "torchtitan_ext.profile"


def launch(ranks: int | None, flags: Sequence[str]) -> int:
    """Profile on ranks of this machine, or as one of the ranks that torchrun has started.

    Args:
        ranks: to start; None for one for each accelerator.
        flags: of ``torchtitan_ext.train``, and of the profile.

    Returns:
        The exit code within torchrun. Elsewhere this process becomes torchrun's, so that each ends
        when the other does.

    Raises:
        ValueError, ImportError, OSError: there are no two ranks, or flags or files are wrong.
    """
    if "RANK" in os.environ:
        if ranks is not None:
            raise ValueError(f"--ranks {ranks}: torchrun has started the ranks: leave it out")
        main(list(flags))
        return 0
    given_flags = sys.argv[1:]
    with quiet():  # errors are reported here, once, and not by torchrun
        asked = parse_profile(flags)
    ranks = _ranks_of_this_machine(ranks)
    with quiet():
        check_profile(asked, world_size=ranks)
    sys.argv[1:] = given_flags
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "torchtitan_ext.profile", *flags]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def main(flags: list[str] | None = None) -> None:
    """Profile as one of the ranks. Where flags or files are wrong, all ranks print a short message
    and exit with code 2."""
    flags = sys.argv[1:] if flags is None else flags
    init_logger()

    def prepare() -> Profile:
        asked = parse_profile(flags)
        check_profile(asked)
        missing = [name for name in LAUNCHED if not os.environ.get(name)]
        if missing and not dist.is_initialized():
            raise ValueError(
                f"{', '.join(missing)} not set: start the ranks by torchrun, or all of it by "
                "narrowcast profile --ranks N"
            )
        return asked

    asked = prepared(_NAME, prepare)
    try:
        measured = profile(asked.config, asked.steps)
    except ProfileError as error:
        if is_speaker():
            print(f"{_NAME}: {error}", file=sys.stderr)
        sys.exit(2)
    if dist.get_rank() == 0:
        print(f"\n{write(measured, folder_of(asked.config), asked.files)}")
    dist.destroy_process_group()


def write(measured: dict[str, Any], folder: Path, files: Sequence[Path]) -> str:
    """Write a profile to ``files``, and its figures into a folder.

    Returns:
        The text to be printed.
    """
    for file in files:
        write_text(file, json.dumps(measured, indent=1, allow_nan=False) + "\n")
    drawn = draw(measured, folder)
    recommended = measured["recommendation"]
    return (
        f"{recommended['text']}\n\n{recommended['toml']}\n"
        f"Wrote {', '.join(map(str, files))} and {drawn[0].name} to {drawn[-1].name}"
    )


def _ranks_of_this_machine(ranks: int | None) -> int:
    """The number of ranks to start.

    Raises:
        ValueError: it is less than two, or this machine has fewer accelerators.
    """
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else None
    ranks = devices if ranks is None else ranks
    if ranks is None or ranks < 2:
        given = "there is no accelerator" if ranks is None else f"{ranks} rank"
        raise ValueError(f"{given}: parameters are gathered by 2 ranks or more: give --ranks N")
    if devices is not None and ranks > devices:
        raise ValueError(f"--ranks {ranks}: this machine has {devices} accelerators: give no more")
    return ranks
