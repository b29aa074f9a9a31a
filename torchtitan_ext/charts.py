"""What TensorBoard lays out: the charts that a configuration will have data for."""

from collections.abc import Callable
from dataclasses import dataclass

from narrowcast.config import NarrowcastConfig
from narrowcast.telemetry.changes import SHARD_TYPES
from narrowcast.telemetry.step_volume import COLLECTIVES, OF_PARAMETERS

COMPRESSIONS = ("delta", "exponent", "entropy", "none")


@dataclass(frozen=True)
class Chart:
    """Lines that are drawn together.

    Attributes:
        title: above them.
        tags: of scalars, without ``narrowcast/``, or regular expressions of tags.
        has_data: whether a configuration logs any of them.
    """

    title: str
    tags: tuple[str, ...]
    has_data: Callable[[NarrowcastConfig], bool]


def layout(config: NarrowcastConfig) -> dict[str, dict[str, list]]:
    """The custom scalars of TensorBoard: charts by title, in groups, that will have data."""
    groups = {
        group: {
            chart.title: ["Multiline", [f"narrowcast/{tag}" for tag in chart.tags]]
            for chart in charts
            if chart.has_data(config)
        }
        for group, charts in CHARTS.items()
    }
    return {group: charts for group, charts in groups.items() if charts}


def _counts(config: NarrowcastConfig) -> bool:
    return config.volume.enable


def _caches(config: NarrowcastConfig) -> bool:
    gathers = config.all_gather
    caches = gathers.compression in ("auto", "delta", "exponent")
    return config.volume.enable and gathers.enable and caches


def _counts_changes(config: NarrowcastConfig) -> bool:
    """Values or exponents are cached, of which exponents can be compared, or shards are sampled."""
    gathers = config.all_gather
    has_exponents = gathers.compression == "exponent" and not (
        gathers.exponent_coding == "blocks" and gathers.block_check == "hash"
    )
    return _counts_changed_values(config) or (_caches(config) and has_exponents)


def _counts_changed_values(config: NarrowcastConfig) -> bool:
    """Values are cached, or shards are sampled."""
    gathers = config.all_gather
    has_values = gathers.compression == "delta" or gathers.chooses
    return config.volume.enable and gathers.enable and has_values


def _counts_zeros(config: NarrowcastConfig) -> bool:
    return config.volume.enable and config.reduce_scatter.enable


def _counts_tokens(config: NarrowcastConfig) -> bool:
    return config.volume.enable and config.dispatch.deduplicate


def _counts_nodes(config: NarrowcastConfig) -> bool:
    return _counts_tokens(config) and config.dispatch.nodes > 1


def _chooses(config: NarrowcastConfig) -> bool:
    return config.all_gather.enable and config.all_gather.chooses


def _chooses_gradients(config: NarrowcastConfig) -> bool:
    return config.reduce_scatter.enable and config.reduce_scatter.chooses


def _by_shard_type(title: str, tag: str, has_data: Callable[[NarrowcastConfig], bool]) -> Chart:
    return Chart(title, tuple(f"{tag}/{kind}" for kind in SHARD_TYPES), has_data)


CHARTS: dict[str, tuple[Chart, ...]] = {
    "Communication volume": (
        Chart(
            "bytes sent a step, by collective",
            tuple(f"bytes/{name}" for name in COLLECTIVES),
            _counts,
        ),
        Chart(
            "bytes that the baseline would send at least (ring)",
            tuple(f"plain_bytes/{name}" for name in COLLECTIVES),
            _counts,
        ),
        Chart(
            "ratio of sent to baseline",
            ("ratio/all", "ratio/all_gather", "ratio/reduce_scatter"),
            _counts,
        ),
        Chart(
            "bits a parameter",
            tuple(
                f"bits_per_parameter/{part}"
                for part in ("first_gather", "later_gathers", "gradients")
            ),
            _counts,
        ),
        Chart(
            "bits a parameter that enter a node: sent, and of the baseline (ring)",
            ("bits_per_parameter/into_node", "bits_per_parameter/into_node_plain"),
            _counts,
        ),
        Chart(
            "bytes that enter a node a step: sent, and of the baseline (ring)",
            tuple(
                f"{bytes}/{name}"
                for bytes in ("bytes_into_node", "plain_bytes_into_node")
                for name in OF_PARAMETERS
            ),
            _counts,
        ),
        Chart(
            "bytes sent within a node a step",
            tuple(f"bytes_within_node/{name}" for name in OF_PARAMETERS),
            _counts,
        ),
        Chart("share of gradients that are zero", ("zero_gradients",), _counts_zeros),
        Chart("memory of caches", ("cache_bytes",), _caches),
    ),
    "Tokens sent to experts, by layer": (
        Chart("ranks a token (C_T)", ("rows_per_token/.*",), _counts_tokens),
        Chart("nodes a token", ("nodes_per_token/.*",), _counts_nodes),
        Chart("share of rows removed", ("rows_removed/.*",), _counts_tokens),
        Chart("share of assignments on the token's own rank", ("local_share/.*",), _counts_tokens),
        Chart("rows that the worst rank sends a step", ("worst_rank_rows/.*",), _counts_tokens),
        Chart("bytes that the worst rank sends a step", ("worst_rank_bytes/.*",), _counts_tokens),
    ),
    "Selection of compressions": (
        Chart(
            "share of parameters by compression",
            tuple(f"selection/share/{name}" for name in COMPRESSIONS),
            _chooses,
        ),
        Chart(
            "seconds of a step's gathers: baseline and as chosen, predicted",
            ("selection/plain_seconds", "selection/predicted_seconds"),
            _chooses,
        ),
        Chart("memory of the chosen caches", ("selection/cache_bytes",), _chooses),
        Chart("shards changed since the first choice", ("selection/changed_shards",), _chooses),
        Chart("share of the time spent on sampling", ("selection/sampling_share",), _chooses),
        Chart("choices of gathers that were undone", ("selection/undone",), _chooses),
        Chart(
            "share of gradients that are compressed",
            ("selection/gradients/share/entropy",),
            _chooses_gradients,
        ),
        Chart(
            "seconds of a step's reductions: baseline and as chosen, predicted",
            ("selection/gradients/plain_seconds", "selection/gradients/predicted_seconds"),
            _chooses_gradients,
        ),
        Chart(
            "choices of gradients that were undone",
            ("selection/gradients/undone",),
            _chooses_gradients,
        ),
    ),
    "Changes since the last step": (
        _by_shard_type("share of changed exponents", "changed_exponents", _counts_changes),
        _by_shard_type("share of changed blocks", "changed_blocks", _counts_changes),
        _by_shard_type("share of changed values", "changed_values", _counts_changed_values),
    ),
}
