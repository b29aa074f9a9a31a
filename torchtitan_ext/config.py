"""narrowcast's sections of torchtitan's config tree, and the call that adds them to one."""

import dataclasses
import functools
import types
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:
    from torchtitan.config import Configurable
    from torchtitan.trainer import Trainer


# narrowcast.allgather.comm.MAX_RUN_VALUES, which would take an import of torch.
MAX_BLOCK_SIZE = 131072


@dataclass(kw_only=True, slots=True)
class AllGatherConfig:
    enable: bool = False
    """Gather FSDP parameters through narrowcast's lossless coding instead of plain FSDP2."""

    treatment: Literal["value", "exponent", "coded", "raw"] = "value"
    """
    What receivers keep between gathers, and so what is left to send. "value": the values
    (2 bytes a bf16 parameter), and the coded difference is sent. "exponent": the exponents
    (1 byte a parameter), and sign, mantissa and the change of the exponents are sent. "coded":
    nothing, and sign, mantissa and coded exponents are sent. "raw": nothing is coded.
    """

    exponent_exchange: Literal["difference", "blocks"] = "difference"
    """
    How treatment "exponent" sends exponents: the coded difference to the kept ones, or a bitmap
    and the exponents of the blocks that changed, which is the form of the CIERA paper.
    """

    block_size: int = field(
        default=512, metadata={"allowed": f"an integer from 1 to {MAX_BLOCK_SIZE}"}
    )
    """Values per block of exponent_exchange "blocks"."""

    block_check: Literal["compare", "hash"] = "compare"
    """
    How the sender notices changed blocks. "compare": exactly, with the exponents it keeps, 1 byte
    a value. "hash": by a 128-bit hash (two SplitMix64), 16 bytes a block.
    """

    coder: Literal["auto", "zstd"] = "auto"
    """Entropy coder. "auto" takes the fastest one that works on the parameters' device."""

    verify_interval: int = field(default=0, metadata={"allowed": "an integer of at least 0"})
    """
    Every how many gathers of a parameter group the ranks compare checksums of what they rebuilt.
    0 means never.
    """

    parameters: list[str] = field(
        default_factory=lambda: ["*"], metadata={"allowed": "one or more patterns"}
    )
    """
    Patterns (fnmatch) of the names of the parameters that are treated; the others are gathered raw.
    On the command line: A,B,C.
    """

    def __post_init__(self) -> None:
        _check(
            "narrowcast.all_gather",
            self,
            block_size=_is_int(self.block_size, at_least=1) and self.block_size <= MAX_BLOCK_SIZE,
            verify_interval=_is_int(self.verify_interval, at_least=0),
            parameters=_is_patterns(self.parameters),
        )


@dataclass(kw_only=True, slots=True)
class ReduceScatterConfig:
    enable: bool = False
    """
    Send gradients coded, each contribution to its owner, which sums them in the order of the ranks.
    Every contribution arrives to the last bit. The sum is one in fp32 (or the reduce dtype) in a
    fixed order: a run repeats to the bit, whatever the backend. It is plain FSDP2's to the bit at
    two ranks; at more, where the backend sums in another order, it differs as two orders do.
    """

    treatment: Literal["coded", "raw"] = "coded"
    """
    "coded": the bits that bf16 gradients cast to fp32 hold, exponents and zeros entropy-coded.
    "raw": all bits, by the same exchange and with the same sum.
    """

    coder: Literal["auto", "zstd"] = "auto"
    """Entropy coder. "auto" takes the fastest one that works on the gradients' device."""

    def __post_init__(self) -> None:
        _check("narrowcast.reduce_scatter", self)


@dataclass(kw_only=True, slots=True)
class VolumeConfig:
    enable: bool = True
    """
    Count the bytes of every collective, and what plain torch would have sent, and report both in
    TensorBoard and on the console.
    """

    def __post_init__(self) -> None:
        _check("narrowcast.volume", self)


@dataclass(kw_only=True, slots=True)
class NarrowcastConfig:
    all_gather: AllGatherConfig = field(default_factory=AllGatherConfig)
    reduce_scatter: ReduceScatterConfig = field(default_factory=ReduceScatterConfig)
    volume: VolumeConfig = field(default_factory=VolumeConfig)


@dataclass(kw_only=True, slots=True)
class JobConfig:
    config_file: str = ""
    """TOML file that this configuration was read from. Empty where it came from Python."""


def allowed_values(config_field: dataclasses.Field) -> str:
    """What a field of our sections accepts, in words; empty where its type says all."""
    if get_origin(config_field.type) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(config_field.type))
    if config_field.type is bool:
        return "true or false"
    return config_field.metadata.get("allowed", "")


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


def _is_int(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _is_patterns(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) and v for v in value)


def _check(section: str, config: Any, **holds: bool) -> None:
    """Raise a ValueError for the first key whose value is not allowed.

    Literals and booleans are checked by their type, other keys by what `holds` says of them.
    """
    for f in fields(config):
        value = getattr(config, f.name)
        if get_origin(f.type) is Literal:
            allowed = value in get_args(f.type)
        elif f.type is bool:
            allowed = isinstance(value, bool)
        else:
            allowed = holds[f.name]
        if not allowed:
            raise ValueError(f"{section}.{f.name} = {value!r}: must be {allowed_values(f)}")
