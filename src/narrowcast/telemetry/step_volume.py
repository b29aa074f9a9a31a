"""The records of a training step: what was sent by collective, gather, gradient and MoE layer."""

from collections import Counter
from dataclasses import dataclass, field

from narrowcast.telemetry.changes import SHARD_TYPES, Changes
from narrowcast.telemetry.over_ranks import by_key, largest, summed

COLLECTIVES = ("all_gather", "reduce_scatter", "dispatch", "combine", "other")
OF_PARAMETERS = ("all_gather", "reduce_scatter")  # those counted by node too


@dataclass
class GatherVolume:
    """Parameters gathered, and the bits sent for them, headers included; summed over groups."""

    parameters: int = summed()
    bits: int = summed()

    @property
    def bits_per_parameter(self) -> float:
        return self.bits / self.parameters if self.parameters else 0.0


@dataclass
class GradientVolume(GatherVolume):
    """Contributions to gradients that were sent to their owners, and the bits sent for them.

    Attributes:
        examined: contributions that were searched for zeros; 0 in steps that are not sampled.
        zeros: how many of the examined ones were zero.
    """

    examined: int = summed()
    zeros: int = summed()


@dataclass
class TokenVolume:
    """Tokens of one MoE layer that were sent to their experts, once to each rank.

    Attributes:
        tokens, assignments: of this rank; an assignment is a pair of a token and an expert.
        local: assignments to experts on the token's own rank.
        rank_rows, node_rows: pairs of a token and a rank, and of a token and a node, that holds any
            of its experts. In a two-level dispatch each rank counts the rows that it passes on.
        rows, bytes: sent to other ranks in dispatch and combine, forward and backward.
    """

    tokens: int = summed()
    assignments: int = summed()
    local: int = summed()
    rank_rows: int = summed()
    node_rows: int = summed()
    rows: int = largest()
    bytes: int = largest()

    def scalars(self, layer: str) -> dict[str, float]:
        """Flat TensorBoard scalars of the MoE layer, under ``narrowcast/``."""
        if not self.tokens:
            return {}
        scalars = {
            "rows_per_token": self.rank_rows / self.tokens,
            "rows_removed": 1 - self.rank_rows / self.assignments,
            "local_share": self.local / self.assignments,
            "worst_rank_rows": self.rows,
            "worst_rank_bytes": self.bytes,
        }
        if self.node_rows:
            scalars["nodes_per_token"] = self.node_rows / self.tokens
        return {f"narrowcast/{name}/{layer}": value for name, value in scalars.items()}


@dataclass
class StepVolume:
    """What this rank sent in one step. Over all ranks (``reduce_over_ranks``), bytes, rows and
    memory are those of the largest rank, and all other counts are sums.

    Attributes:
        sent: bytes of each collective.
        plain: bytes that baseline FSDP2 and expert parallelism would have sent at least, by ring
            algorithms; gloo's reduce-scatter sends about twice as much.
        leaving, staying: of the bytes sent of parameters and their gradients, those that leave a
            node for another, and those that stay within it; summed over all ranks. As many enter
            nodes as leave them.
        plain_leaving: what would leave nodes with the baseline, by a ring.
        nodes: of the job.
        replicas: how many times the job holds each parameter.
        first, later: parameter gathers after the optimizer's step, and all further ones (backward,
            or more microbatches). Payloads are padded, so sizes are those of the largest rank.
        gradients: all reductions of the step.
        changes: by kind of shard; empty in steps that are not sampled, and where nothing is cached
            to compare with.
        tokens: by MoE layer; empty where tokens are not deduplicated.
        cache_bytes: memory of the caches at the end of the step.
    """

    sent: Counter[str] = field(default_factory=Counter, metadata=by_key("max", COLLECTIVES))
    plain: Counter[str] = field(default_factory=Counter, metadata=by_key("max", COLLECTIVES))
    leaving: Counter[str] = field(default_factory=Counter, metadata=by_key("sum", OF_PARAMETERS))
    staying: Counter[str] = field(default_factory=Counter, metadata=by_key("sum", OF_PARAMETERS))
    plain_leaving: Counter[str] = field(
        default_factory=Counter, metadata=by_key("sum", OF_PARAMETERS)
    )
    nodes: int = largest()
    replicas: int = largest()
    first: GatherVolume = field(default_factory=GatherVolume)
    later: GatherVolume = field(default_factory=GatherVolume)
    gradients: GradientVolume = field(default_factory=GradientVolume)
    changes: dict[str, Changes] = field(
        default_factory=dict, metadata=by_key(keys=SHARD_TYPES, missing=Changes())
    )
    tokens: dict[str, TokenVolume] = field(default_factory=dict, metadata=by_key())
    cache_bytes: int = largest()

    @property
    def ratio(self) -> float:
        """Bytes sent over bytes that the baseline would have sent."""
        plain = sum(self.plain.values())
        return sum(self.sent.values()) / plain if plain else 1.0

    @property
    def bits_into_node(self) -> tuple[float, float]:
        """Bits a parameter that enter a node in this step, of gathers and reductions together, and
        those that baseline FSDP2 would bring in by a ring. Of a volume reduced over all ranks."""
        parameters = self.nodes * self.first.parameters
        if not parameters:
            return 0.0, 0.0
        sent, plain = (sum(counted.values()) for counted in (self.leaving, self.plain_leaving))
        return 8 * self.replicas * sent / parameters, 8 * self.replicas * plain / parameters

    def scalars(self) -> dict[str, float]:
        """Flat TensorBoard scalars of the step, under ``narrowcast/``."""
        scalars: dict[str, float] = {
            "narrowcast/ratio/all": self.ratio,
            "narrowcast/cache_bytes": self.cache_bytes,
        }
        for name in COLLECTIVES:
            scalars[f"narrowcast/bytes/{name}"] = self.sent[name]
            scalars[f"narrowcast/plain_bytes/{name}"] = self.plain[name]
        for name in ("all_gather", "reduce_scatter"):
            if self.plain[name]:
                scalars[f"narrowcast/ratio/{name}"] = self.sent[name] / self.plain[name]
        if self.first.parameters:
            bits, plain_bits = self.bits_into_node
            scalars["narrowcast/bits_per_parameter/into_node"] = bits
            scalars["narrowcast/bits_per_parameter/into_node_plain"] = plain_bits
        for name in OF_PARAMETERS:
            if self.nodes:
                scalars[f"narrowcast/bytes_into_node/{name}"] = self.leaving[name] / self.nodes
                scalars[f"narrowcast/plain_bytes_into_node/{name}"] = (
                    self.plain_leaving[name] / self.nodes
                )
                scalars[f"narrowcast/bytes_within_node/{name}"] = self.staying[name] / self.nodes
        volumes = {"first_gather": self.first, "later_gathers": self.later}
        for name, volume in (*volumes.items(), ("gradients", self.gradients)):
            if volume.parameters:
                scalars[f"narrowcast/bits_per_parameter/{name}"] = volume.bits_per_parameter
        if self.gradients.examined:
            share = self.gradients.zeros / self.gradients.examined
            scalars["narrowcast/zero_gradients"] = share
        for layer, tokens in self.tokens.items():
            scalars |= tokens.scalars(layer)
        for kind, changes in self.changes.items():
            for name, rate in changes.rates().items():
                scalars[f"narrowcast/{name}/{kind}"] = rate
        return scalars
