"""Communication volume on torchtitan's own metric path: TensorBoard scalars and the console."""

from collections.abc import Sequence
from typing import Any

import torch
import torchtitan.tools.utils as titan_utils
from torchtitan.tools.logging import logger

from narrowcast.attribution import counted_as
from narrowcast.autotune.controller import Controller
from narrowcast.autotune.gradient_controller import GradientController
from narrowcast.config import NarrowcastConfig
from narrowcast.telemetry.ledger import Ledger
from narrowcast.telemetry.over_ranks import reduce_over_ranks
from narrowcast.telemetry.step_volume import StepVolume
from torchtitan_ext.charts import layout
from torchtitan_ext.private import tensorboard_writers

_MIB = 1 << 20


class MetricsPlugin:
    """Mixed into torchtitan's metrics processor: logs the volume of each logged step, and what the
    selection has chosen.

    Attributes:
        ledger: of the trainer; None where volume is not counted.
        selections: the controllers that choose compressions, of gathers and of gradients.
    """

    ledger: Ledger | None = None
    selections: Sequence[Controller | GradientController] = ()

    @property
    def sample_interval(self) -> int:
        """Steps from one to the next in which what takes a pass over the data is counted: those
        that are logged; 0 where nobody reads it, as the console has none of it."""
        config = self.config
        return config.log_freq if config.enable_tensorboard or config.enable_wandb else 0

    def lay_out(self, config: NarrowcastConfig) -> None:
        """Lay out the charts of TensorBoard that will have data."""
        for writer in tensorboard_writers(self.logger):
            writer.add_custom_scalars(layout(config))

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
        for selection in self.selections:
            extra_metrics = {**(extra_metrics or {}), **selection.scalars()}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if volume is not None:
            logger.info(console_line(step, volume))


def console_line(step: int, volume: StepVolume) -> str:
    """The line of the log about a step, summed over its collectives."""
    sent, baseline = sum(volume.sent.values()) / _MIB, sum(volume.plain.values()) / _MIB
    # An algorithm sends at least that much for the baseline; backends may send more.
    line = f"step: {step:2}  sent: {sent:.2f} MiB, baseline at least {baseline:.2f} MiB"
    line += f" ({volume.ratio:.0%})"
    if volume.first.parameters:
        line += f"  bits a parameter: first gather {volume.first.bits_per_parameter:.2f}"
    if volume.later.parameters:
        line += f", later {volume.later.bits_per_parameter:.2f}"
    if volume.gradients.parameters:
        line += f", gradients {volume.gradients.bits_per_parameter:.2f}"
    bits, plain_bits = volume.bits_into_node
    if plain_bits:
        line += f"; into a node {bits:.2f} (baseline {plain_bits:.2f})"
    return line
