"""narrowcast's sections of torchtitan's config tree, and the call that adds them to one."""

import dataclasses
import functools
import types
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:
    from torchtitan.config import Configurable
    from torchtitan.trainer import Trainer


# narrowcast.allgather.chunks.MAX_CHUNK_VALUES, which would take an import of torch.
MAX_BLOCK_SIZE = 262144


@dataclass(kw_only=True, slots=True)
class AllGatherConfig:
    enable: bool = False
    """Gather FSDP parameters through narrowcast's lossless coding instead of plain FSDP2."""

    compression: Literal["auto", "observe", "delta", "exponent", "entropy", "none"] = "auto"
    """
    What receivers keep between gathers, and so what is left to send. "auto": for each shard what
    pays on this very link, within cache_budget_gib, or plain FSDP2 where nothing pays; chosen after
    warmup_steps of plain FSDP2. "observe": plain FSDP2, and a report of what "auto" would choose.
    "delta": the values (2 bytes a bf16 parameter), and the coded difference is sent. "exponent":
    the exponents (1 byte a parameter), and sign, mantissa and the change of the exponents are sent.
    "entropy": nothing, and sign, mantissa and coded exponents are sent. "none": nothing is coded.
    """

    cache_budget_gib: float = field(default=4.0, metadata={"allowed": "a number of at least 0"})
    """
    Memory in GiB that compression "auto" may keep on a rank, and "observe" reckons with. A hard
    limit. The table of choices says what more would gain.
    """

    cache_device: Literal["device", "cpu"] = "device"
    """
    Where receivers keep it: in the memory of the device, or in pinned memory of the host, fetched
    back ahead of use.
    """

    selection: Literal["exact", "ratio"] = "exact"
    """
    How compression "auto" chooses under the budget. "exact": the least time of all choices, by an
    integer program. "ratio": the rule of the CIERA paper, by gain over memory while it lasts.
    """

    warmup_steps: int = field(default=30, metadata={"allowed": "an integer of at least 3"})
    """
    Steps of plain FSDP2 that compressions "auto" and "observe" watch, in at most 2 % of their time,
    before they choose.
    """

    reselect_interval: int = field(default=100, metadata={"allowed": "an integer of at least 0"})
    """
    Steps from one look of compression "auto" at its choice to the next. A compression is changed
    where that gains more until the next look than the cold cache costs. 0 means never. "observe"
    looks, and changes nothing.
    """

    exponent_coding: Literal["delta", "blocks"] = "delta"
    """
    How compression "exponent" sends exponents: the coded difference to the kept ones, or a bitmap
    and the exponents of the blocks that changed, which is the form of the CIERA paper.
    """

    block_size: int = field(
        default=512, metadata={"allowed": f"an integer from 1 to {MAX_BLOCK_SIZE}"}
    )
    """Values per block of exponent_coding "blocks"."""

    block_check: Literal["compare", "hash"] = "compare"
    """
    How the sender notices changed blocks. "compare": exactly, with the exponents it keeps, 1 byte
    a value. "hash": by a 128-bit hash (two SplitMix64), 16 bytes a block.
    """

    entropy_coder: Literal["auto", "zstd"] = "auto"
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
    Patterns (fnmatch) of the names of the parameters that are compressed; the others are gathered
    raw. On the command line: A,B,C.
    """

    def __post_init__(self) -> None:
        _check(
            "narrowcast.all_gather",
            self,
            block_size=_is_int(self.block_size, at_least=1) and self.block_size <= MAX_BLOCK_SIZE,
            verify_interval=_is_int(self.verify_interval, at_least=0),
            parameters=_is_patterns(self.parameters),
            cache_budget_gib=_is_number(self.cache_budget_gib) and self.cache_budget_gib >= 0,
            warmup_steps=_is_int(self.warmup_steps, at_least=3),
            reselect_interval=_is_int(self.reselect_interval, at_least=0),
        )
        for name in ("cache_budget_gib", "selection", "warmup_steps", "reselect_interval"):
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if value != default and self.compression not in ("auto", "observe"):
                raise ValueError(
                    f"narrowcast.all_gather.{name} = {value!r}: works with compression = "
                    f'"auto" or "observe", not "{self.compression}": leave it '
                    f"out, or at {default!r}"
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

    compression: Literal["entropy", "none"] = "entropy"
    """
    "entropy": the bits that bf16 gradients cast to fp32 hold, exponents and zeros entropy-coded.
    "none": all bits, by the same exchange and with the same sum.
    """

    entropy_coder: Literal["auto", "zstd"] = "auto"
    """Entropy coder. "auto" takes the fastest one that works on the gradients' device."""

    def __post_init__(self) -> None:
        _check("narrowcast.reduce_scatter", self)


@dataclass(kw_only=True, slots=True)
class RoutingTraceConfig:
    enable: bool = False
    """
    Record which experts the tokens of chosen steps select in every MoE layer, into one file that
    `narrowcast trace show` and `narrowcast placement plan` read. Training is not changed.
    """

    file: str = field(
        default="routing_trace.safetensors", metadata={"allowed": "a path, not empty"}
    )
    """Where the trace goes, after the last recorded step. Relative to dump_folder."""

    first_step: int = field(default=1, metadata={"allowed": "an integer of at least 1"})
    """The first recorded step."""

    num_steps: int = field(default=1, metadata={"allowed": "an integer of at least 1"})
    """How many steps are recorded."""

    interval: int = field(default=1, metadata={"allowed": "an integer of at least 1"})
    """Every how many steps one is recorded, from first_step on."""

    scores: bool = False
    """Record the routing scores of the selected experts too: 4 bytes each, where an id takes 1."""

    max_mib: int = field(default=256, metadata={"allowed": "an integer of at least 1"})
    """
    Limit of the file's size. Where the tokens of the chosen steps take more, evenly spaced ones of
    every step are recorded.
    """

    def __post_init__(self) -> None:
        _check(
            "narrowcast.routing_trace",
            self,
            file=_is_text(self.file) and bool(self.file),
            first_step=_is_int(self.first_step, at_least=1),
            num_steps=_is_int(self.num_steps, at_least=1),
            interval=_is_int(self.interval, at_least=1),
            max_mib=_is_int(self.max_mib, at_least=1),
        )


@dataclass(kw_only=True, slots=True)
class PlacementConfig:
    file: str = field(default="", metadata={"allowed": "a path; empty for none"})
    """
    Train with the placement of this file (`narrowcast placement plan`). One of file, trace and
    after_steps switches placement on. Losses are those of training without: only where experts
    live changes (with dispatch.deduplicate sums are made rank by rank: losses up to rounding).
    Needs parallelism.expert_parallel_degree > 1.
    """

    trace: str = field(default="", metadata={"allowed": "a path; empty for none"})
    """Plan a placement from this trace at the start, and train with it."""

    after_steps: int = field(default=0, metadata={"allowed": "an integer of at least 0"})
    """
    Watch the run's own first so many steps, plan a placement from them, and move the experts.
    0 means never.
    """

    every_steps: int = field(
        default=0, metadata={"allowed": "0, or an integer of at least after_steps"}
    )
    """
    With after_steps: plan again every so many steps, each time from the after_steps steps before.
    0 means once.
    """

    method: Literal["rows", "pairwise", "occult", "random", "contiguous"] = "rows"
    """
    How a placement is planned. "rows": search on the rows sent, the number of ranks that a token
    goes to. "pairwise": the local search of Expert Coupling on pairs that share a rank. "occult":
    algorithm 1 of Occult. "random" and "contiguous" are for comparison.
    """

    nodes: int = field(default=1, metadata={"allowed": "an integer of at least 1"})
    """
    Nodes that the ranks of an expert-parallel group are spread over. A placement is planned for the
    nodes first, then for the ranks of each. Method "rows" keeps groups of a node-limited router on
    one node.
    """

    max_load: float = field(default=0.0, metadata={"allowed": "0, or a number of at least 1"})
    """
    Bound on the assignments of the busiest rank over the mean, for method "rows". It comes before
    rows. 0 means 1.1, or what the ranks have without a placement where that is more. As many as
    there are ranks lifts it.
    """

    cross_node_weight: float = field(default=0.0, metadata={"allowed": "a number of at least 0"})
    """
    What one more node of a token costs, in rows within a node, for method "rows" and nodes > 1.
    0 means that nodes come first, whatever it costs within them.
    """

    @property
    def enable(self) -> bool:
        return bool(self.file or self.trace or self.after_steps)

    def __post_init__(self) -> None:
        _check(
            "narrowcast.placement",
            self,
            file=_is_text(self.file),
            trace=_is_text(self.trace),
            after_steps=_is_int(self.after_steps, at_least=0),
            every_steps=_is_int(self.every_steps, at_least=0)
            and (self.every_steps == 0 or self.every_steps >= self.after_steps),
            nodes=_is_int(self.nodes, at_least=1),
            max_load=_is_number(self.max_load) and (self.max_load == 0 or self.max_load >= 1),
            cross_node_weight=_is_number(self.cross_node_weight) and self.cross_node_weight >= 0,
        )
        sources = {"file": self.file, "trace": self.trace, "after_steps": self.after_steps}
        given = [f"{name} = {value!r}" for name, value in sources.items() if value]
        if len(given) > 1:
            raise ValueError(f"narrowcast.placement: {' and '.join(given)}: give one of them")
        if self.every_steps and not self.after_steps:
            raise ValueError(
                f"narrowcast.placement.every_steps = {self.every_steps}: works with after_steps, "
                "which is not given"
            )
        bounds = {"max_load": self.max_load, "cross_node_weight": self.cross_node_weight}
        for name, value in bounds.items():
            if value and self.method != "rows":
                raise ValueError(
                    f'narrowcast.placement.{name} = {value}: works with method = "rows", not '
                    f'"{self.method}"'
                )
        if self.cross_node_weight and self.nodes == 1:
            raise ValueError(
                f"narrowcast.placement.cross_node_weight = {self.cross_node_weight}: works with "
                "nodes > 1"
            )


@dataclass(kw_only=True, slots=True)
class DispatchConfig:
    deduplicate: bool = False
    """
    Send a token once to each expert-parallel rank that holds any of its experts, and get one
    partial sum back, instead of a row for each expert. Routers select the same experts. Sums are
    made in another order than torchtitan's, in fp32, and repeat to the bit. Needs
    parallelism.expert_parallel_degree > 1.
    """

    nodes: int = field(default=1, metadata={"allowed": "an integer of at least 1"})
    """
    With more than 1: the nodes that an expert-parallel group is spread over. A token crosses once
    to each node, and is passed on within it. Pays where links between nodes are much slower than
    those within. A placement that is planned in the run must be for as many nodes.
    """

    kernels: Literal["torch", "triton"] = "torch"
    """
    What computes the experts. "torch": torch's grouped product, on a copy of a row for each expert.
    "triton": kernels that read and add rows where they are, without the copies. CUDA only.
    """

    def __post_init__(self) -> None:
        _check("narrowcast.dispatch", self, nodes=_is_int(self.nodes, at_least=1))
        given = {"nodes": self.nodes != 1, "kernels": self.kernels != "torch"}
        for name, is_given in given.items():
            if is_given and not self.deduplicate:
                raise ValueError(
                    f"narrowcast.dispatch.{name} = {getattr(self, name)!r}: works with "
                    "deduplicate = true"
                )


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
    routing_trace: RoutingTraceConfig = field(default_factory=RoutingTraceConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value < float("inf")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


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
