"""``[narrowcast.placement]``: moves a trainer's experts, and keeps checkpoints in model order."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from narrowcast.config import PlacementConfig
from narrowcast.placement.placement import Placement, contiguous
from narrowcast.placement.relocation import ExpertLayer, PlacedExperts
from torchtitan_ext.across_ranks import from_first_rank, gathered
from torchtitan_ext.placement.dispatcher import place
from torchtitan_ext.placement.planner import Planner
from torchtitan_ext.placement.source import (
    SECTION,
    given_key,
    plan_file,
    planned_steps,
    read_placement,
    read_trace,
)
from torchtitan_ext.private import around_checkpoints, moe_layers
from torchtitan_ext.routed_model import RoutedModel
from torchtitan_ext.traces.watch import MIB, RoutingWatch


@dataclass
class Schedule:
    """When the routers of a run are recorded, and when a placement is planned from that.

    Attributes:
        after_steps: recorded steps before each plan; 0 where a run does not plan.
        every_steps: from one plan to the next; 0 where there is one plan only.
        next_plan: the step after which the next plan is made; None if there is none.
    """

    after_steps: int
    every_steps: int
    next_plan: int | None

    @classmethod
    def of(cls, config: PlacementConfig) -> "Schedule":
        return cls(config.after_steps, config.every_steps, config.after_steps or None)

    def is_recorded(self, step: int) -> bool:
        return self.next_plan is not None and step > self.next_plan - self.after_steps

    def planned(self, step: int) -> None:
        """A plan was made after ``step``."""
        self.next_plan = step + self.every_steps if self.every_steps else None

    def resumed(self, step: int) -> None:
        """The run goes on after ``step`` without a plan."""
        self.next_plan = step + self.after_steps

    def resumed_with(self, planned: int, step: int) -> None:
        """The run goes on after ``step`` with the plan made after step ``planned``."""
        self.planned(planned)
        if self.next_plan is not None:
            self.next_plan = max(self.next_plan, step + self.after_steps)


class PlacementRun:
    """The experts of a trainer, placed as the section says.

    The job has passed ``check_placement``. Every rank must make one and call it alike.

    Attributes:
        experts: the handle that moves them.
        placement: their current placement.

    Raises:
        ValueError: the file or the trace to begin with cannot be read any more.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._config: PlacementConfig = trainer.config.narrowcast.placement
        self._model = model = RoutedModel.of_trainer(trainer, SECTION)
        self._planner = Planner(self._config, model)
        self._schedule = Schedule.of(self._config)
        self._checked = False
        self.placement = contiguous(
            model.model, model.layers, model.num_experts, model.num_ranks, self._config.nodes
        )
        first = self._first_placement()
        moes = {n: moe for part in trainer.model_parts for n, moe in moe_layers(part).items()}
        layers = [
            ExpertLayer.of(name, dict(moe.routed_experts.inner_experts.named_parameters()))
            for name, moe in moes.items()
        ]
        self.experts = PlacedExperts(layers, trainer.optimizers)
        around_checkpoints(trainer.checkpointer, self.experts.in_model_order, self._after_loading)
        for moe, layer in zip(moes.values(), layers, strict=True):
            place(moe.routed_experts.token_dispatcher, layer)
        self._watch = (
            RoutingWatch(trainer, self._planner.recording()) if self._config.after_steps else None
        )
        if first is not None:
            self._move_to(first)

    def during(self, step: int) -> AbstractContextManager:
        """A context that records a step, if a plan is to be made from it."""
        return self._watch.recording(step) if self._schedule.is_recorded(step) else nullcontext()

    def after(self, step: int) -> None:
        """Plan and move if enough steps were recorded. Every rank must call it after each step."""
        if not self._checked:  # the optimizer has its state from the first step on
            self.experts.check()
            self._checked = True
        if step != self._schedule.next_plan:
            return
        self._schedule.planned(step)
        trace = self._watch.trace(on_every_rank=True)
        planned = self._planner.plan(self._planner.routings(trace), self.placement)
        if dist.get_rank() == 0:
            try:
                planned.save(self._file(step))
            except OSError as error:
                logger.error(f"{SECTION}: {error}. Training goes on; a resumed run will plan anew")
        self._move_to(planned)

    def remove(self) -> None:
        """Stop recording. The experts stay where they are, and tokens are sent to them there."""
        if self._watch is not None:
            self._watch.remove()

    def _first_placement(self) -> Placement | None:
        """The placement of ``file`` or ``trace``, which the first rank reads for all."""
        key = given_key(self._config)
        if self._config.file:
            return self._read(self._config.file, key)
        if self._config.trace:
            routings = from_first_rank(
                lambda: self._planner.routings(read_trace(self._config, self._model)), key
            )
            return self._planner.plan(routings, self.placement)
        return None

    def _read(self, file: str | Path, source: str) -> Placement:
        placement = from_first_rank(lambda: read_placement(file, self._model), source)
        if self._config.file and placement.num_nodes != self._config.nodes:
            logger.warning(
                f"{SECTION}.nodes = {self._config.nodes} is overridden by {file}, which was "
                f"planned for {placement.num_nodes}"
            )
        return placement

    def _move_to(self, placement: Placement) -> None:
        index = [placement.layers.index(layer.name) for layer in self.experts.layers]
        sent = self.experts.move_to(placement.experts_LE[index])
        self.placement = placement
        logger.info(f"experts moved: this rank sent {sent / MIB:.2f} MiB")

    def _after_loading(self) -> None:
        """Go on with the latest plan of the run that was loaded, or record anew without one."""
        step = self._trainer.step
        if not self._config.after_steps or step == 0:
            return
        planned = gathered(planned_steps(self._trainer.config))[0]
        latest = max((s for s in planned if s <= step), default=None)
        self._schedule.resumed(step)
        if latest is None:
            return
        try:
            self._move_to(self._read(self._file(latest), f"the plan of step {latest}"))
        except ValueError as error:  # on every rank
            logger.warning(f"{error}. Steps up to {self._schedule.next_plan} are recorded anew")
            return
        self._schedule.resumed_with(latest, step)

    def _file(self, step: int) -> Path:
        return plan_file(self._trainer.config, step)
