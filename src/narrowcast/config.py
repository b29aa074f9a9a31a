"""Every setting, said once: one frozen dataclass a feature. `section.py` says what comes of it."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from narrowcast.section import (
    Section,
    check_left_at_default,
    checked,
    integer,
    is_integer,
    is_number,
    is_patterns,
    is_text,
    rule,
)

# Shorter chunks are more calls of tensor operations: on a CPU a gather takes 7 % longer with half
# as many values, 27 % with a quarter, and no less with twice as many.
MAX_CHUNK_VALUES = 1 << 18

_OLD_COMPRESSIONS = {"value": "delta", "coded": "entropy", "raw": "none"}


@dataclass(frozen=True, kw_only=True)
class TopologyConfig(Section):
    path = "narrowcast.topology"

    ranks_per_node: int | str = checked(
        "auto",
        '"auto" or an integer of at least 1',
        lambda value: value == "auto" or (is_integer(value) and value >= 1),
    )
    """
    Consecutive ranks of the job that are on the same node, and share its link to the others.
    Gathers and gradients of several ranks on each of several nodes cross between nodes compressed,
    and are completed within each node; those within one node are left to baseline FSDP2. "auto": as
    many as torchrun started on each node (LOCAL_WORLD_SIZE). 1: every rank has a link of its own.
    """


@dataclass(frozen=True, kw_only=True)
class AllGatherConfig(Section):
    path = "narrowcast.all_gather"
    renamed: ClassVar = {
        "treatment": "compression",
        "exponent_exchange": "exponent_coding",
        "coder": "entropy_coder",
    }
    renamed_values: ClassVar = {
        "compression": _OLD_COMPRESSIONS,
        "exponent_coding": {"difference": "delta"},
    }

    enable: bool = False
    """Gather FSDP parameters through narrowcast's lossless compression, not baseline FSDP2."""

    compression: Literal["auto", "observe", "delta", "exponent", "entropy", "none"] = "auto"
    """
    What receivers cache between gathers, and so what is left to send. "auto": for each shard what
    reduces step time on this very link, within cache_budget_gib, or baseline FSDP2 where nothing
    does; chosen after warmup_steps of baseline FSDP2, and undone within 30 steps if that made the
    median step slower by more than 5 % and by more than noise (where at least 10 steps before the
    choice were timed). "observe": baseline FSDP2, and a report of what "auto" would choose.
    "delta": the values (2 bytes a bf16 parameter) are cached, and the entropy-coded difference is
    sent. "exponent": the exponents (1 byte a parameter), and sign, mantissa and the change of the
    exponents are sent. "entropy": nothing, and sign, mantissa and entropy-coded exponents are sent.
    "none": all bits are sent.
    """

    cache_budget_gib: float = checked(
        4.0, "a number of at least 0", lambda value: is_number(value) and value >= 0
    )
    """
    Memory in GiB that compression "auto" may cache on a rank, and "observe" reckons with. A hard
    limit. The table of choices says what more would gain.
    """

    cache_device: Literal["device", "cpu"] = "device"
    """
    Where receivers cache: in the memory of the device, or in pinned memory of the host, fetched
    back ahead of use.
    """

    selection: Literal["exact", "ratio"] = "exact"
    """
    How compression "auto" chooses under the budget. "exact": the least time of all choices, by an
    integer program. "ratio": the rule of the CIERA paper, by gain over memory while it lasts.
    """

    warmup_steps: int = integer(30, at_least=3)
    """
    Steps of baseline FSDP2 that compressions "auto" and "observe" sample, in at most 2 % of their
    time, before they choose.
    """

    reselect_interval: int = integer(100, at_least=0)
    """
    Steps from one choice of compression "auto" to the next. A compression is changed where that
    gains more until the next choice than the cold cache costs. 0 means that the first choice stays.
    "observe" reports as often, and changes nothing.
    """

    exponent_coding: Literal["delta", "blocks"] = "delta"
    """
    How compression "exponent" sends exponents: the entropy-coded difference to the cached ones, or
    a bitmap and the exponents of the blocks that changed, which is the form of the CIERA paper.
    """

    block_size: int = integer(512, at_least=1, at_most=MAX_CHUNK_VALUES)
    """Values per block of exponent_coding "blocks"."""

    block_check: Literal["compare", "hash"] = "compare"
    """
    How the sender notices changed blocks. "compare": exactly, with the exponents it caches, 1 byte
    a value. "hash": by a 128-bit hash (two SplitMix64), 16 bytes a block.
    """

    entropy_coder: Literal["auto", "zstd"] = "auto"
    """The entropy coder. "auto" takes the fastest one that works on the parameters' device."""

    verify_interval: int = integer(0, at_least=0)
    """
    Every how many gathers of a parameter group the ranks compare checksums of what they rebuilt.
    0 means never.
    """

    parameters: list[str] = field(
        default_factory=lambda: ["*"], metadata=rule("one or more patterns", is_patterns)
    )
    """
    Patterns (fnmatch) of the names of the parameters that are compressed; the others are sent as
    they are. On the command line: A,B,C.
    """

    force: bool = False
    """
    Where no entropy coder runs on the parameters' device (CUDA without a coder on the GPU), every
    coded byte passes through host memory. Then "auto" leaves baseline FSDP2 in place, and another
    compression warns of the cost. true: "auto" chooses all the same, and nothing warns.
    """

    @property
    def chooses(self) -> bool:
        """Whether compressions are chosen by what was measured."""
        return self.compression in ("auto", "observe")

    def _check(self) -> None:
        check_left_at_default(
            self,
            ("cache_budget_gib", "selection", "warmup_steps", "reselect_interval"),
            'compression = "auto" or "observe"',
            self.chooses,
            self.compression,
        )
        check_left_at_default(
            self,
            ("exponent_coding",),
            'compression = "exponent", "auto" or "observe"',
            self.chooses or self.compression == "exponent",
            self.compression,
        )
        check_left_at_default(
            self,
            ("block_check",),
            'exponent_coding = "blocks"',
            self.exponent_coding == "blocks",
            self.exponent_coding,
        )


@dataclass(frozen=True, kw_only=True)
class ReduceScatterConfig(Section):
    path = "narrowcast.reduce_scatter"
    renamed: ClassVar = {"treatment": "compression", "coder": "entropy_coder"}
    renamed_values: ClassVar = {"compression": _OLD_COMPRESSIONS}

    enable: bool = False
    """
    Send gradients compressed, each contribution to its owner, which sums them in the order of the
    ranks. Every contribution arrives bitwise identical. The sum is one in fp32 (or the reduce
    dtype) in a fixed order: a run repeats bit for bit, whatever the backend. It is baseline FSDP2's
    bit for bit at two ranks; at more, where the backend sums in another order, it differs as two
    orders do.
    """

    compression: Literal["auto", "entropy", "none"] = "auto"
    """
    "auto": for each parameter group "entropy" where that reduces step time on this very link, or
    baseline FSDP2's own reduce-scatter where it does not; chosen after warmup_steps of baseline
    FSDP2, and undone within 30 steps if that made the median step slower by more than 5 % and by
    more than noise. The choice goes by measured times, so at more than two ranks a run with "auto"
    does not repeat bit for bit: where the backend sums in another order, the order depends on the
    choice. All ranks must take their steps together. "entropy": the bits that bf16 gradients cast
    to fp32 hold, with exponents and zeros entropy-coded. "none": all bits, by the same exchange and
    with the same sum.
    """

    warmup_steps: int = integer(30, at_least=3)
    """
    Steps of baseline FSDP2 whose gradients compression "auto" samples, in at most 1 % of their
    time, before it chooses.
    """

    reselect_interval: int = integer(100, at_least=0)
    """
    Steps from one choice of compression "auto" to the next. 0 means that the first choice stays.
    A choice waits while another of the job, of gathers or of gradients, is on trial.
    """

    entropy_coder: Literal["auto", "zstd"] = "auto"
    """The entropy coder. "auto" takes the fastest one that works on the gradients' device."""

    force: bool = False
    """
    Where no entropy coder runs on the gradients' device (CUDA without a coder on the GPU), every
    coded byte passes through host memory. Then "auto" leaves baseline FSDP2 in place, and "entropy"
    warns of the cost. true: "auto" chooses all the same, and nothing warns.
    """

    @property
    def chooses(self) -> bool:
        """Whether compressions are chosen by what was measured."""
        return self.compression == "auto"

    def _check(self) -> None:
        check_left_at_default(
            self,
            ("warmup_steps", "reselect_interval"),
            'compression = "auto"',
            self.chooses,
            self.compression,
        )


@dataclass(frozen=True, kw_only=True)
class RoutingTraceConfig(Section):
    path = "narrowcast.routing_trace"

    enable: bool = False
    """
    Record which experts the tokens of chosen steps select in every MoE layer, into one file that
    `narrowcast trace show` and `narrowcast placement plan` read. Training is not changed.
    """

    file: str = checked(
        "routing_trace.safetensors",
        "a path, not empty",
        lambda value: is_text(value) and bool(value),
    )
    """Where the trace goes, after the last recorded step. Relative to dump_folder."""

    first_step: int = integer(1, at_least=1)
    """The first recorded step."""

    num_steps: int = integer(1, at_least=1)
    """How many steps are recorded."""

    interval: int = integer(1, at_least=1)
    """Every how many steps one is recorded, from first_step on."""

    scores: bool = False
    """Record the routing scores of the selected experts too: 4 bytes each, where an id takes 1."""

    max_mib: int = integer(256, at_least=1)
    """
    Limit of the file's size. Where the tokens of the chosen steps take more, evenly spaced ones of
    every step are recorded.
    """


@dataclass(frozen=True, kw_only=True)
class PlacementConfig(Section):
    path = "narrowcast.placement"

    file: str = checked("", "a path; empty for none", is_text)
    """
    Train with the placement of this file (`narrowcast placement plan`). One of file, trace and
    after_steps switches placement on. Losses are those of training without: only where experts
    live changes (with dispatch.deduplicate sums are made rank by rank: losses up to rounding).
    Needs parallelism.expert_parallel_degree > 1.
    """

    trace: str = checked("", "a path; empty for none", is_text)
    """Plan a placement from this trace at the start, and train with it."""

    after_steps: int = integer(0, at_least=0)
    """
    Watch the run's own first so many steps, plan a placement from them, and move the experts.
    0 means never.
    """

    every_steps: int = checked(
        0,
        "0, or an integer of at least after_steps",
        lambda value: is_integer(value) and value >= 0,
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

    nodes: int = integer(1, at_least=1)
    """
    Nodes that the ranks of an expert-parallel group are spread over. A placement is planned for the
    nodes first, then for the ranks of each. Method "rows" keeps groups of a node-limited router on
    one node.
    """

    max_load: float = checked(
        0.0,
        "0, or a number of at least 1",
        lambda value: is_number(value) and (value == 0 or value >= 1),
    )
    """
    Bound on the assignments of the busiest rank over the mean, for method "rows". It comes before
    rows. 0 means 1.1, or what the ranks have without a placement where that is more. As many as
    there are ranks lifts it.
    """

    cross_node_weight: float = checked(
        0.0, "a number of at least 0", lambda value: is_number(value) and value >= 0
    )
    """
    What one more node of a token costs, in rows within a node, for method "rows" and nodes > 1.
    0 means that nodes come first, whatever it costs within them.
    """

    @property
    def enable(self) -> bool:
        return bool(self.file or self.trace or self.after_steps)

    def _check(self) -> None:
        if 0 < self.every_steps < self.after_steps:
            raise ValueError(
                f"{self.path}.every_steps = {self.every_steps}: must be 0, or an integer of at "
                "least after_steps"
            )
        sources = {"file": self.file, "trace": self.trace, "after_steps": self.after_steps}
        given = [f"{name} = {value!r}" for name, value in sources.items() if value]
        if len(given) > 1:
            raise ValueError(f"{self.path}: {' and '.join(given)}: give one of them")
        if self.every_steps and not self.after_steps:
            raise ValueError(
                f"{self.path}.every_steps = {self.every_steps}: works with after_steps, "
                "which is not given"
            )
        bounds = {"max_load": self.max_load, "cross_node_weight": self.cross_node_weight}
        for name, value in bounds.items():
            if value and self.method != "rows":
                raise ValueError(
                    f'{self.path}.{name} = {value}: works with method = "rows", not "{self.method}"'
                )
        if self.cross_node_weight and self.nodes == 1:
            raise ValueError(
                f"{self.path}.cross_node_weight = {self.cross_node_weight}: works with nodes > 1"
            )


@dataclass(frozen=True, kw_only=True)
class DispatchConfig(Section):
    path = "narrowcast.dispatch"

    deduplicate: bool = False
    """
    Send a token once to each expert-parallel rank that holds any of its experts, and get one
    partial sum back, instead of a row for each expert. Routers select the same experts. Sums are
    made in another order than torchtitan's, in fp32, and repeat bit for bit. Needs
    parallelism.expert_parallel_degree > 1.
    """

    nodes: int = integer(1, at_least=1)
    """
    With more than 1: the nodes that an expert-parallel group is spread over. A token crosses once
    to each node, and is passed on within it. Worthwhile where links between nodes are much slower
    than those within. A placement that is planned in the run must be for as many nodes.
    """

    kernels: Literal["torch", "triton"] = "torch"
    """
    What computes the experts. "torch": torch's grouped product, on a copy of a row for each expert.
    "triton": kernels that read and add rows where they are, without the copies. CUDA only.
    """

    def _check(self) -> None:
        for name in ("nodes", "kernels"):
            value = getattr(self, name)
            if value != self.default_of(name) and not self.deduplicate:
                raise ValueError(f"{self.path}.{name} = {value!r}: works with deduplicate = true")


@dataclass(frozen=True, kw_only=True)
class VolumeConfig(Section):
    path = "narrowcast.volume"

    enable: bool = True
    """
    Count the bytes of every collective, and what plain torch would have sent, and report both in
    TensorBoard and on the console.
    """


@dataclass(frozen=True, kw_only=True)
class NarrowcastConfig:
    """All sections, by the names that they have in TOML."""

    topology: TopologyConfig = field(default_factory=TopologyConfig)
    all_gather: AllGatherConfig = field(default_factory=AllGatherConfig)
    reduce_scatter: ReduceScatterConfig = field(default_factory=ReduceScatterConfig)
    routing_trace: RoutingTraceConfig = field(default_factory=RoutingTraceConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    volume: VolumeConfig = field(default_factory=VolumeConfig)
