"""narrowcast in torchtitan: TOML configuration, and the plugins it switches on.

    torchrun ... -m torchtitan_ext.train --job.config_file x.toml
    torchrun ... -m torchtitan.train --module torchtitan_ext --config from_toml \\
        --job.config_file x.toml

Importing this package imports no torchtitan, which must be installed all the same.
"""

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from narrowcast.config import (
    AllGatherConfig,
    DispatchConfig,
    NarrowcastConfig,
    PlacementConfig,
    ReduceScatterConfig,
    RoutingTraceConfig,
    VolumeConfig,
)

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

    from torchtitan_ext.config import JobConfig, with_narrowcast

if importlib.util.find_spec("torchtitan") is None:
    raise ModuleNotFoundError(
        "torchtitan_ext needs torchtitan: pip install 'narrowcast[torchtitan]'", name="torchtitan"
    )

__all__ = [
    "AllGatherConfig",
    "DispatchConfig",
    "JobConfig",
    "NarrowcastConfig",
    "PlacementConfig",
    "ReduceScatterConfig",
    "RoutingTraceConfig",
    "VolumeConfig",
    "from_toml",
    "with_narrowcast",
]


def from_toml() -> "Trainer.Config":
    """The torchtitan config function that reads the TOML file of ``--job.config_file``.

    torchtitan passes its config functions nothing, so that the flag is read from ``sys.argv``.

    Raises:
        ValueError: the flag is missing, or the file is wrong (``toml.load.TomlError``).
    """
    from torchtitan_ext.compat import apply
    from torchtitan_ext.toml.load import load_config

    apply()
    return load_config(_config_file(sys.argv[1:]))


def __getattr__(name: str) -> Any:
    """Import on demand what needs torchtitan."""
    if name in ("JobConfig", "with_narrowcast"):
        from torchtitan_ext import config

        return getattr(config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _config_file(args: list[str]) -> str:
    """The value of the last ``--job.config_file FILE`` or ``--job.config_file=FILE``.

    As everywhere on torchtitan's command line, ``-`` may stand for ``_``.
    """
    flags = [arg.partition("=") for arg in args]
    files = [
        value if equals else "".join(args[i + 1 : i + 2])
        for i, (flag, equals, value) in enumerate(flags)
        if flag.replace("_", "-") == "--job.config-file"
    ]
    if not files or not files[-1]:
        raise ValueError("--job.config_file is required: --job.config_file my_job.toml")
    return files[-1]
