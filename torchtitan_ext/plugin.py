"""narrowcast in torchtitan's trainer: what is mixed into its class."""

import contextlib
from typing import Any

from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from narrowcast.all_gather import NarrowedModel
from narrowcast.reduce_scatter import NarrowedGradients
from torchtitan_ext.checking import check_on_every_rank
from torchtitan_ext.dispatch.hooks import deduplicating
from torchtitan_ext.install import Installed
from torchtitan_ext.job import Job
from torchtitan_ext.placement.run import PlacementRun


class TrainerPlugin:
    """Mixed into a torchtitan trainer whose configuration has the section ``narrowcast``."""

    def __init__(self, config: Any) -> None:
        if config.narrowcast.dispatch.deduplicate:
            config = deduplicating(config)
        self._installed = Installed()
        super().__init__(config)
        try:
            self._installed.install(self)
        except BaseException:
            self.close()
            raise

    @property
    def narrowed(self) -> NarrowedModel | None:
        """The handle of the narrowed all-gathers; None where they are baseline FSDP2's."""
        return self._installed.narrowed

    @property
    def narrowed_gradients(self) -> NarrowedGradients | None:
        """The handle of the narrowed reduce-scatters; None where they are baseline FSDP2's."""
        return self._installed.narrowed_gradients

    @property
    def placed(self) -> PlacementRun | None:
        """The placed experts; None where they are where torchtitan puts them."""
        return self._installed.placed

    def init_distributed(self) -> ParallelDims:
        """Initialize as torchtitan does, which builds nothing before it, and check our sections.

        Raises:
            ValueError: one cannot work with this job; on every rank alike.
        """
        dims = super().init_distributed()
        check_on_every_rank(Job(self.config, dims))
        return dims

    def train_step(self, data_iterator: Any) -> None:
        """Train a step. Its routing is recorded where a trace or a placement is made from it."""
        for section, selection in self._installed.selections.items():
            if selection.step == 0:  # the first that this process trains
                _warn_of_a_short_run(self.config, section, self.step)
            selection.step = self.step - 1
        with self._installed.recording(self.step):
            super().train_step(data_iterator)
        self._installed.after(self.step)

    def close(self) -> None:
        """Give the model back its own collectives, and close the trainer.

        All of it is done whatever part of it raises; errors are raised then.
        """
        with contextlib.ExitStack() as stack:  # which is left from the last to the first
            stack.callback(super().close)
            stack.callback(self._installed.remove)


def _warn_of_a_short_run(config: Any, section: str, first_step: int) -> None:
    switches, steps = getattr(config.narrowcast, section), config.training.steps
    needed = switches.warmup_steps + (switches.compression == "auto")  # one to train as was chosen
    if steps - first_step + 1 < needed:
        logger.warning(
            f"narrowcast.{section}.warmup_steps = {switches.warmup_steps} is too much from step "
            f"{first_step} to training.steps = {steps}: compression "
            f'"{switches.compression}" will choose nothing. Train longer, or with a shorter warm-up'
        )
