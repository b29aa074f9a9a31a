"""What narrowcast adds to torchtitan's trainer, once the trainer has built model and optimizer."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from narrowcast.all_gather import NarrowedModel, narrow_all_gather
from narrowcast.errors import job_of
from narrowcast.fsdp2 import param_groups
from narrowcast.reduce_scatter import NarrowedGradients, narrow_reduce_scatter
from narrowcast.telemetry.counted import CountedModel, count_volume
from narrowcast.telemetry.ledger import Ledger, beyond_baseline
from torchtitan_ext.checking import check_on_every_rank
from torchtitan_ext.dispatching import count_dispatch, deduplicating, set_up_dispatch
from torchtitan_ext.job import Job
from torchtitan_ext.metrics import MetricsPlugin
from torchtitan_ext.placing import PlacementRun
from torchtitan_ext.private import count_token_dispatch, token_dispatchers
from torchtitan_ext.tracing import TraceRun

__all__ = ["MetricsPlugin", "TrainerPlugin"]


class TrainerPlugin:
    """Mixed into a torchtitan trainer whose config has the section `narrowcast`.

    Attributes:
        narrowed: the handle of the narrowed all-gathers; None where they are plain FSDP2's.
        narrowed_gradients: the same of the reduce-scatters.
        placed: where the experts live; None where that is where torchtitan puts them.
    """

    narrowed: NarrowedModel | None = None
    narrowed_gradients: NarrowedGradients | None = None
    placed: PlacementRun | None = None
    _traced: TraceRun | None = None
    _counted: CountedModel | None = None

    def __init__(self, config: Any) -> None:
        if config.narrowcast.dispatch.deduplicate:
            config = deduplicating(config)
        super().__init__(config)
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    def init_distributed(self) -> ParallelDims:
        """As torchtitan's, which builds nothing before it; then every rank checks our sections.

        Raises:
            ValueError: one cannot work with this job; on every rank alike.
        """
        dims = super().init_distributed()
        check_on_every_rank(Job(self.config, dims))
        return dims

    def _set_up(self) -> None:
        """Put into the trainer what the sections ask for."""
        config = self.config
        switches = config.narrowcast
        if switches.dispatch.deduplicate:
            set_up_dispatch(self)
        if switches.placement.enable:
            self.placed = PlacementRun(self)
        if switches.routing_trace.enable:
            self._traced = TraceRun(self)
        if switches.all_gather.enable:
            self.narrowed = _install(
                functools.partial(narrow_all_gather, report=Path(config.dump_folder) / "selection"),
                config,
                "all_gather",
                self.model_parts,
                self.optimizers,
            )
            self.metrics_processor.selection = self.narrowed.selection
        if switches.reduce_scatter.enable:
            self.narrowed_gradients = _install(
                narrow_reduce_scatter, config, "reduce_scatter", self.model_parts, self.optimizers
            )
        if switches.volume.enable and not self._handles():
            self._counted = count_volume(param_groups(*self.model_parts), self.optimizers)
        ledger = self._ledger()
        self.metrics_processor.ledger = ledger
        if ledger is not None:
            if switches.dispatch.deduplicate:
                count_dispatch(self, ledger)
            else:
                for dispatcher in token_dispatchers(self.model_parts):
                    count_token_dispatch(dispatcher, ledger)
            if self.placed is not None:
                self.placed.experts.on_sent = functools.partial(ledger.add, "other", plain_bytes=0)

    def train_step(self, data_iterator: Any) -> None:
        """A step of training, watched where a trace or a placement is to come of it."""
        selection = self.narrowed.selection if self.narrowed is not None else None
        if selection is not None:
            if selection.step == 0:  # the first that this process trains
                _warn_of_a_short_run(self.config, self.step)
            selection.step = self.step - 1
        runs = [run for run in (self.placed, self._traced) if run is not None]
        with contextlib.ExitStack() as stack:
            if self._handles():
                stack.enter_context(job_of(None).informed())
            for run in runs:
                stack.enter_context(run.during(self.step))
            super().train_step(data_iterator)
        with beyond_baseline(self._ledger()):
            for run in runs:
                run.after(self.step)

    def close(self) -> None:
        """Give the model back its own collectives, and close the trainer.

        All of it is done whatever part of it raises; errors are raised then.
        """
        with contextlib.ExitStack() as stack:  # which is left from the last to the first
            stack.callback(super().close)
            for handle in (self.placed, self._traced, *self._handles()):
                if handle is not None:
                    stack.callback(handle.remove)

    def _handles(self) -> list[NarrowedModel | NarrowedGradients | CountedModel]:
        handles = (self.narrowed, self.narrowed_gradients, self._counted)
        return [handle for handle in handles if handle is not None]

    def _ledger(self) -> Ledger | None:
        return next((handle.ledger for handle in self._handles()), None)


def _warn_of_a_short_run(config: Any, first_step: int) -> None:
    gathers, steps = config.narrowcast.all_gather, config.training.steps
    needed = gathers.warmup_steps + (gathers.compression == "auto")  # one to train as was chosen
    if steps - first_step + 1 < needed:
        logger.warning(
            f"narrowcast.all_gather.warmup_steps = {gathers.warmup_steps} is too much from step "
            f"{first_step} to training.steps = {steps}: compression "
            f'"{gathers.compression}" will choose nothing. Train longer, or watch fewer steps'
        )


def _install(
    narrow: Callable, config: Any, section: str, model_parts: list[torch.nn.Module], optimizers: Any
) -> Any:
    """Narrow collectives as a section says, whose keys but `enable` are the arguments.

    Raises:
        ValueError: the model cannot be narrowed; the message names the switch.
    """
    switches = getattr(config.narrowcast, section)
    arguments = {f.name: getattr(switches, f.name) for f in fields(switches) if f.name != "enable"}
    try:
        return narrow(model_parts, optimizers, volume=config.narrowcast.volume.enable, **arguments)
    except ValueError as error:
        raise ValueError(f"narrowcast.{section}.enable = true cannot work here: {error}") from error
