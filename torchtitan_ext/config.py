"""narrowcast's sections of torchtitan's config tree, and the call that adds them to one."""

import dataclasses
import functools
import types
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from narrowcast.config import NarrowcastConfig

if TYPE_CHECKING:
    from torchtitan.config import Configurable
    from torchtitan.trainer import Trainer


@dataclass(kw_only=True, slots=True)
class JobConfig:
    config_file: str = ""
    """TOML file that this configuration was read from. Empty where it came from Python."""


def with_narrowcast(
    base: "Trainer.Config",
    narrowcast: NarrowcastConfig | None = None,
    *,
    job: JobConfig | None = None,
) -> "Trainer.Config":
    """A copy of `base` whose `build()` makes the same trainer, with narrowcast in it.

    For a torchtitan config function: `return with_narrowcast(base, NarrowcastConfig(...))`. The
    class of the result derives from `type(base)` and has the fields `narrowcast` and `job`, so
    that the command line can override them. `base` itself is left as it is.

    Args:
        base: config of a torchtitan trainer, or of a subclass of it. One that went through this
            function already keeps its sections where no new ones are given.
        narrowcast: our sections. Default: `NarrowcastConfig()`, which only counts bytes.
        job: where the configuration came from. Default: `JobConfig()`.
    """
    from torchtitan_ext.plugin import MetricsPlugin, TrainerPlugin

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
    config: "Configurable.Config",
    plugin: type,
    sections: tuple[tuple[str, type], ...] = (),
) -> Any:
    """`config` with the same values, built by its owner with `plugin` mixed in."""
    from torchtitan_ext.private import owner

    if issubclass(owner(type(config)), plugin):
        return config
    extended_cls = _extended_class(type(config), plugin, sections)
    return extended_cls(
        **{f.name: getattr(config, f.name) for f in fields(config) if f.init},
    )


@functools.cache
def _extended_class(config_cls: type, plugin: type, sections: tuple[tuple[str, type], ...]) -> type:
    """A subclass of `config_cls` with `sections`, whose owner is a subclass of `plugin` too."""
    from torchtitan_ext.private import owner

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
