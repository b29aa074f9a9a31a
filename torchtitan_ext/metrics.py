"""Communication volume on torchtitan's own metric path: TensorBoard scalars, layout and console."""

from typing import Any

import torch
import torchtitan.tools.utils as titan_utils
from torchtitan.tools.logging import logger

from narrowcast.attribution import counted_as
from narrowcast.autotune.controller import Controller
from narrowcast.telemetry.changes import SHARD_TYPES
from narrowcast.telemetry.ledger import Ledger
from narrowcast.telemetry.over_ranks import reduce_over_ranks
from narrowcast.telemetry.step_volume import COLLECTIVES, StepVolume
from torchtitan_ext.private import tensorboard_writers

_MIB = 1 << 20


def layout() -> dict[str, dict[str, list]]:
    """TensorBoard's custom scalars: what a dashboard of communication volume opens with."""

    def lines(*tags: str) -> list:
        return ["Multiline", [f"narrowcast/{tag}" for tag in tags]]

    def by_shard_type(what: str) -> list:
        return lines(*(f"{what}/{kind}" for kind in SHARD_TYPES))

    return {
        "Communication volume": {
            "bytes sent a step, by collective": lines(*(f"bytes/{c}" for c in COLLECTIVES)),
            "bytes plain torch would send at least (ring)": lines(
                *(f"plain_bytes/{c}" for c in COLLECTIVES)
            ),
            "ratio of sent to plain": lines(
                "ratio/all", "ratio/all_gather", "ratio/reduce_scatter"
            ),
            "bits a parameter": lines(
                "bits_per_parameter/first_gather",
                "bits_per_parameter/later_gathers",
                "bits_per_parameter/gradients",
            ),
            "share of gradients that are zero": lines("zero_gradients"),
        },
        "Tokens sent to experts, by layer": {
            title: lines(f"{what}/.*")
            for title, what in {
                "ranks a token (C_T)": "rows_per_token",
                "nodes a token": "nodes_per_token",
                "share of rows removed": "rows_removed",
                "share of assignments on the token's own rank": "local_share",
                "rows that the worst rank sends a step": "worst_rank_rows",
                "bytes that the worst rank sends a step": "worst_rank_bytes",
            }.items()
        },
        "Selection of compressions": {
            "share of parameters by compression": lines(
                *(f"selection/share/{t}" for t in ("delta", "exponent", "entropy", "none"))
            ),
            "seconds of a step's gathers: plain and as chosen, predicted": lines(
                "selection/plain_seconds", "selection/predicted_seconds"
            ),
            "memory of caches": lines("selection/cache_bytes", "cache_bytes"),
            "shards changed since the first choice": lines("selection/changed_shards"),
            "share of the time spent on sampling": lines("selection/sampling_share"),
        },
        "Changes since the last step": {
            "share of changed exponents": by_shard_type("changed_exponents"),
            "share of changed blocks": by_shard_type("changed_blocks"),
            "share of changed values": by_shard_type("changed_values"),
        },
    }


class MetricsPlugin:
    """Mixed into torchtitan's metrics processor: adds the last step of `ledger`, and what
    `selection` has chosen, to what it logs."""

    ledger: Ledger | None = None
    selection: Controller | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for writer in tensorboard_writers(self.logger):
            writer.add_custom_scalars(layout())

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log as torchtitan does, with the volume of the step. Every rank must call it."""
        volume = None
        if self.ledger is not None and self.ledger.last is not None:
            with counted_as(self.ledger):
                volume = reduce_over_ranks(self.ledger.last, torch.device(titan_utils.device_type))
            extra_metrics = {**(extra_metrics or {}), **volume.scalars()}
        if self.selection is not None:
            extra_metrics = {**(extra_metrics or {}), **self.selection.scalars()}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if volume is not None:
            logger.info(console_line(step, volume))


def console_line(step: int, volume: StepVolume) -> str:
    """What the log says of a step, summed over its collectives."""
    sent, plain = sum(volume.sent.values()) / _MIB, sum(volume.plain.values()) / _MIB
    # Of plain torch the least that an algorithm sends; backends may send more.
    line = f"step: {step:2}  sent: {sent:.2f} MiB, plain at least {plain:.2f} MiB"
    line += f" ({volume.ratio:.0%})"
    if volume.first.parameters:
        line += f"  bits a parameter: first gather {volume.first.bits_per_parameter:.2f}"
    if volume.later.parameters:
        line += f", later {volume.later.bits_per_parameter:.2f}"
    if volume.gradients.parameters:
        line += f", gradients {volume.gradients.bits_per_parameter:.2f}"
    return line
