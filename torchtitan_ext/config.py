"""Adds narrowcast's sections to a torchtitan config, and its plugins to what the config builds."""

import dataclasses
import functools
import types
from dataclasses import dataclass, field, fields
from typing import Any

from torchtitan.config import Configurable
from torchtitan.trainer import Trainer

from narrowcast.config import NarrowcastConfig
from torchtitan_ext.metrics import MetricsPlugin
from torchtitan_ext.plugin import TrainerPlugin
from torchtitan_ext.private import owner


@dataclass(kw_only=True, slots=True)
class JobConfig:
    config_file: str = ""
    """TOML file that this configuration was read from. Empty where it came from Python."""


def with_narrowcast(
    base: Trainer.Config,
    narrowcast: NarrowcastConfig | None = None,
    *,
    job: JobConfig | None = None,
) -> Trainer.Config:
    """A copy of ``base`` whose ``build()`` returns the same trainer, with narrowcast in it.

    For a torchtitan config function: ``return with_narrowcast(base, NarrowcastConfig(...))``. The
    class of the result derives from ``type(base)`` and has the fields ``narrowcast`` and ``job``,
    so that the command line can override them. ``base`` itself is not changed.

    Args:
        base: config of a torchtitan trainer, or of a subclass of it. If this function returned it,
            it keeps its sections where no new ones are given.
        narrowcast: our sections. Default: ``NarrowcastConfig()``, which only counts bytes.
        job: where the configuration came from. Default: ``JobConfig()``.
    """
    given = {"narrowcast": narrowcast, "job": job}
    extended = _mixed_in(
        base, TrainerPlugin, (("narrowcast", NarrowcastConfig), ("job", JobConfig))
    )
    return dataclasses.replace(
        extended,
        metrics=_mixed_in(base.metrics, MetricsPlugin),
        **{name: section for name, section in given.items() if section is not None},
    )


def _mixed_in(
    config: Configurable.Config,
    plugin: type,
    sections: tuple[tuple[str, type], ...] = (),
) -> Any:
    """A config with the same values, whose ``build()`` returns an object with ``plugin`` in it."""
    if issubclass(owner(type(config)), plugin):
        return config
    extended_cls = _extended_class(type(config), plugin, sections)
    return extended_cls(
        **{f.name: getattr(config, f.name) for f in fields(config) if f.init},
    )


@functools.cache
def _extended_class(config_cls: type, plugin: type, sections: tuple[tuple[str, type], ...]) -> type:
    """A subclass of ``config_cls`` with ``sections``, whose owner also derives from ``plugin``."""
    base_owner = owner(config_cls)
    extended_cls = dataclasses.make_dataclass(
        "Config",
        [(name, cls, field(default_factory=cls)) for name, cls in sections],
        bases=(config_cls,),
        namespace={
            "__doc__": config_cls.__doc__,
            "__module__": __name__,
            "__qualname__": f"Narrowcast{base_owner.__name__}.Config",
        },
        kw_only=True,
        slots=True,
    )
    # Defining a class that has a Config makes it that Config's owner (Configurable).
    types.new_class(
        f"Narrowcast{base_owner.__name__}",
        (plugin, base_owner),
        exec_body=lambda namespace: namespace.update(Config=extended_cls, __module__=__name__),
    )
    return extended_cls
