"""What narrowcast hooks into a trainer once model and optimizer are built, and takes out again."""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from narrowcast.agreement import topology_of
from narrowcast.all_gather import NarrowedModel, narrow_all_gather
from narrowcast.autotune.controller import Controller
from narrowcast.autotune.gradient_controller import GradientController
from narrowcast.config import NarrowcastConfig
from narrowcast.errors import job_of
from narrowcast.fsdp2 import param_groups
from narrowcast.reduce_scatter import NarrowedGradients, narrow_reduce_scatter
from narrowcast.telemetry.counted import CountedModel, count_volume
from narrowcast.telemetry.ledger import Ledger, beyond_baseline
from torchtitan_ext.dispatch.hooks import count_dispatch, set_up_dispatch
from torchtitan_ext.placement.run import PlacementRun
from torchtitan_ext.private import count_token_dispatch, token_dispatchers
from torchtitan_ext.traces.run import TraceRun

Handle = NarrowedModel | NarrowedGradients | CountedModel


@dataclass
class Installed:
    """What the sections of a trainer's configuration have hooked into it.

    Attributes:
        narrowed: the handle of the narrowed all-gathers; None where they are baseline FSDP2's.
        narrowed_gradients: the same of the reduce-scatters.
        counted: the handle of the ledger where nothing is narrowed.
        placed: the placed experts; None where they are where torchtitan puts them.
        traced: the recording of a routing trace.
    """

    narrowed: NarrowedModel | None = None
    narrowed_gradients: NarrowedGradients | None = None
    counted: CountedModel | None = None
    placed: PlacementRun | None = None
    traced: TraceRun | None = None

    def install(self, trainer: Any) -> None:
        """Hook in what the sections switch on. Every rank must call it alike.

        Raises:
            ValueError: a section cannot work here. What was hooked in before stays until
                ``remove``.
        """
        switches = trainer.config.narrowcast
        if switches.dispatch.deduplicate:
            set_up_dispatch(trainer)
        if switches.placement.enable:
            self.placed = PlacementRun(trainer)
        if switches.routing_trace.enable:
            self.traced = TraceRun(trainer)
        if switches.all_gather.enable:
            self.narrowed = _narrow(narrow_all_gather, trainer, "all_gather")
        if switches.reduce_scatter.enable:
            self.narrowed_gradients = _narrow(narrow_reduce_scatter, trainer, "reduce_scatter")
        if switches.volume.enable and not self.handles:
            groups = param_groups(*trainer.model_parts)
            topology = topology_of(groups, switches.topology.ranks_per_node, None)
            self.counted = count_volume(groups, trainer.optimizers, topology)
        metrics = trainer.metrics_processor
        if self.ledger is not None:
            self._count_tokens(trainer, self.ledger)
            self.ledger.sample_interval = metrics.sample_interval
        metrics.lay_out(self._with_data(switches))
        metrics.ledger = self.ledger
        metrics.selections = list(self.selections.values())

    def recording(self, step: int) -> AbstractContextManager:
        """A context for a step of training, which records its routing where that is asked for."""
        stack = ExitStack()
        if self.ledger is not None:
            self.ledger.step = step  # not that of the process where the run was resumed
        if self.handles:
            stack.enter_context(job_of(None).informed())
        for run in self._runs:
            stack.enter_context(run.during(step))
        return stack

    def after(self, step: int) -> None:
        """Write a trace, or plan and move, where ``step`` is the one for it. Every rank must call
        it after each step."""
        with beyond_baseline(self.ledger):
            for run in self._runs:
                run.after(step)

    def remove(self) -> None:
        """Take everything out again, whatever part of it raises. Errors are raised then."""
        with contextlib.ExitStack() as stack:
            for handle in (*self._runs, *self.handles):
                stack.callback(handle.remove)

    @property
    def handles(self) -> list[Handle]:
        handles = (self.narrowed, self.narrowed_gradients, self.counted)
        return [handle for handle in handles if handle is not None]

    @property
    def selections(self) -> dict[str, Controller | GradientController]:
        """What chooses compressions, by section."""
        handles = {"all_gather": self.narrowed, "reduce_scatter": self.narrowed_gradients}
        return {
            section: handle.selection
            for section, handle in handles.items()
            if handle is not None and handle.selection is not None
        }

    def _with_data(self, switches: NarrowcastConfig) -> NarrowcastConfig:
        """The sections with those switched off whose collectives were all left to baseline FSDP2,
        as where no entropy coder runs on the device, or where all ranks are on one node."""
        handles = {"all_gather": self.narrowed, "reduce_scatter": self.narrowed_gradients}
        left = {
            section: replace(getattr(switches, section), enable=False)
            for section, handle in handles.items()
            if handle is not None and handle.is_baseline
        }
        return replace(switches, **left)

    @property
    def ledger(self) -> Ledger | None:
        return next((handle.ledger for handle in self.handles), None)

    @property
    def _runs(self) -> list[PlacementRun | TraceRun]:
        return [run for run in (self.placed, self.traced) if run is not None]

    def _count_tokens(self, trainer: Any, ledger: Ledger) -> None:
        if trainer.config.narrowcast.dispatch.deduplicate:
            count_dispatch(trainer, ledger)
        else:
            for dispatcher in token_dispatchers(trainer.model_parts):
                count_token_dispatch(dispatcher, ledger)
        if self.placed is not None:
            self.placed.experts.on_sent = functools.partial(ledger.add, "other", plain_bytes=0)


def _narrow(narrow: Callable, trainer: Any, section: str) -> Any:
    """Narrow the collectives of a trainer as a section says, whose keys except ``enable`` are the
    arguments.

    Raises:
        ValueError: the model cannot be narrowed; the message names the switch.
    """
    narrowcast = trainer.config.narrowcast
    switches = getattr(narrowcast, section)
    arguments = {f.name: getattr(switches, f.name) for f in fields(switches) if f.name != "enable"}
    try:
        return narrow(
            trainer.model_parts,
            trainer.optimizers,
            report=Path(trainer.config.dump_folder) / "selection",
            volume=narrowcast.volume.enable,
            ranks_per_node=narrowcast.topology.ranks_per_node,
            **arguments,
        )
    except ValueError as error:
        raise ValueError(f"narrowcast.{section}.enable = true cannot work here: {error}") from error
