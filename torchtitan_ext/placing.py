"""Places the experts of torchtitan's trainer, moves them, and keeps checkpoints in model order."""

import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from narrowcast.experts.correlation import MIN_TOKENS
from narrowcast.experts.files import check_writable
from narrowcast.experts.metrics import UNEVEN, measure
from narrowcast.experts.placement import Placement, check_made_for, contiguous, load_placement
from narrowcast.experts.planning import (
    check,
    placement_of,
    plan_layer,
    sample,
    tokens_to_plan_from,
)
from narrowcast.experts.relocation import ExpertLayer, PlacedExperts
from narrowcast.experts.routing import RoutingTrace, load_trace
from torchtitan_ext.config import PlacementConfig
from torchtitan_ext.job import Job
from torchtitan_ext.placed_dispatch import check_placeable, place
from torchtitan_ext.private import around_checkpoints, check_checkpoints, moe_layers, owner
from torchtitan_ext.tracing import (
    RoutingWatch,
    check_watch,
    describe,
    describe_job,
    from_every_rank,
    from_first_rank,
    gathered,
    naming,
    token_bytes,
)

_MIB = 1 << 20
_SECTION = "narrowcast.placement"


class PlacementRun:
    """What `[narrowcast.placement]` asks of a trainer, whose job has passed `check_placement`.
    Every rank makes one alike.

    Attributes:
        experts: the handle that moves them.
        placement: where they live now.

    Raises:
        ValueError: the file or trace to start with cannot be read any more.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._config: PlacementConfig = trainer.config.narrowcast.placement
        self._model = describe(trainer, _SECTION)
        self._watch: RoutingWatch | None = None
        self._next_plan: int | None = None
        self._checked = False
        self.placement = contiguous(
            self._model["model"],
            self._model["layers"],
            self._model["num_experts"],
            self._model["num_ranks"],
            self._config.nodes,
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
        if self._config.after_steps:
            self._watch = RoutingWatch(trainer, **_watched(self._config, self._model))
            self._next_plan = self._config.after_steps
        if first is not None:
            self._move_to(first)

    def during(self, step: int) -> AbstractContextManager:
        """Watch a step, if a plan is to be made of it."""
        watched = self._next_plan is not None and step > self._next_plan - self._config.after_steps
        return self._watch.recording(step) if watched else nullcontext()

    def after(self, step: int) -> None:
        """Plan and move, once enough steps were watched. Every rank calls it, after each step."""
        if not self._checked:  # the optimizer keeps its state from the first step on
            self.experts.check()
            self._checked = True
        if step != self._next_plan:
            return
        every = self._config.every_steps
        self._next_plan = step + every if every else None
        planned = self._plan(self._watch.trace(on_every_rank=True))
        if dist.get_rank() == 0:
            try:
                planned.save(self._file(step))
            except OSError as error:
                logger.error(f"{_SECTION}: {error}. Training goes on; a resumed run will plan anew")
        self._move_to(planned)

    def remove(self) -> None:
        """Watch no more. The experts stay where they are, and tokens find them there."""
        if self._watch is not None:
            self._watch.remove()

    def _first_placement(self) -> Placement | None:
        """The placement of `file` or `trace`, which the first rank reads for all."""
        if self._config.file:
            return self._placement_in(self._config.file, _what(self._config))
        if self._config.trace:
            trace = from_first_rank(
                lambda: _trace_in(self._config, self._model), _what(self._config)
            )
            return self._plan(sample(trace))
        return None

    def _placement_in(self, file: str | Path, what: str) -> Placement:
        placement = from_first_rank(lambda: _placement_in(file, self._model), what)
        if self._config.file and placement.num_nodes != self._config.nodes:
            logger.warning(
                f"{_SECTION}.nodes = {self._config.nodes} is overridden by {file}, which was "
                f"planned for {placement.num_nodes}"
            )
        return placement

    def _plan(self, trace: RoutingTrace) -> Placement:
        """The placement that a trace leads to. Each rank plans some layers, and all get all."""
        config, ranks = self._config, self._model["num_ranks"]
        check(trace, ranks, config.nodes)
        num_layers, world_size = len(trace.layers), dist.get_world_size()
        planned_by_rank = from_every_rank(
            lambda: {
                layer: plan_layer(
                    trace,
                    layer,
                    num_ranks=ranks,
                    num_nodes=config.nodes,
                    method=config.method,
                    max_load=config.max_load or None,
                    cross_node_weight=config.cross_node_weight or None,
                )
                for layer in range(dist.get_rank(), num_layers, world_size)
            }
        )
        everyones = {
            layer: experts_E for some in planned_by_rank for layer, experts_E in some.items()
        }
        planned = placement_of(
            trace, [everyones[i] for i in range(num_layers)], ranks, config.nodes, config.method
        )
        self._report(trace, planned)
        return planned

    def _report(self, trace: RoutingTrace, planned: Placement) -> None:
        before, after = measure(trace, self.placement), measure(trace, planned)
        rows = [
            sum(m.rows_per_token for m in metrics) / len(metrics) for metrics in (before, after)
        ]
        load = [max(m.busiest_load for m in metrics) for metrics in (before, after)]
        logger.info(
            f"placement planned from {trace.num_tokens} tokens: {rows[0]:.3f} -> {rows[1]:.3f} "
            f"ranks a token; load of the busiest rank over the mean {load[0]:.2f} -> {load[1]:.2f}"
        )
        if not self._config.max_load and load[1] > UNEVEN * load[0]:
            logger.warning(
                f"placement: the busiest rank is to get {load[1]:.2f} times the mean load, and had "
                f"{load[0]:.2f}. {_SECTION}.max_load bounds it"
            )
        for metrics in after:
            if 0 < self._config.max_load < metrics.busiest_load:
                logger.warning(
                    f"{_SECTION}.max_load = {self._config.max_load} cannot be reached in "
                    f"{metrics.layer}: {metrics.busiest_load:.3f} is the least that was found"
                )

    def _move_to(self, placement: Placement) -> None:
        index = [placement.layers.index(layer.name) for layer in self.experts.layers]
        sent = self.experts.move_to(placement.experts_LE[index])
        self.placement = placement
        logger.info(f"experts moved: this rank sent {sent / _MIB:.2f} MiB")

    def _after_loading(self) -> None:
        """Go on with the latest plan of the run that was loaded, and else watch anew."""
        step, after_steps = self._trainer.step, self._config.after_steps
        if not after_steps or step == 0:
            return
        names = (
            re.fullmatch(r"step-(\d+)\.json", f.name)
            for f in _folder(self._trainer.config).glob("*")
        )
        planned = gathered([int(name[1]) for name in names if name])[0]
        latest = max((s for s in planned if s <= step), default=None)
        self._next_plan = step + after_steps
        if latest is None:
            return
        try:
            self._move_to(self._placement_in(self._file(latest), f"the plan of step {latest}"))
        except ValueError as error:  # on every rank
            logger.warning(f"{error}. Steps up to {self._next_plan} are watched for another")
            return
        every = self._config.every_steps
        self._next_plan = max(latest + every, step + after_steps) if every else None

    def _file(self, step: int) -> Path:
        return _plan_of_step(self._trainer.config, step)


def check_placement(job: Job) -> None:
    """Whether `[narrowcast.placement]` can work with a job, but for the files that it names.

    Raises:
        ValueError: it cannot; the message names what and why.
    """
    config, training = job.config.narrowcast.placement, job.config.training
    degree = job.config.parallelism.expert_parallel_degree
    if degree == 1:
        raise ValueError(
            f"{_SECTION} cannot work with parallelism.expert_parallel_degree = 1: all experts "
            "are on one rank. Give a degree above 1, or no placement"
        )
    if degree % config.nodes:
        raise ValueError(
            f"{_SECTION}.nodes = {config.nodes} does not divide "
            f"parallelism.expert_parallel_degree = {degree}"
        )
    if config.after_steps > training.steps:
        raise ValueError(
            f"{_SECTION}.after_steps = {config.after_steps}, but training ends with "
            f"training.steps = {training.steps}"
        )
    check_checkpoints(owner(type(job.config.checkpoint)))
    model = describe_job(job, _SECTION)
    if model["num_experts"] % degree:
        raise ValueError(
            f"{_SECTION} cannot work with {model['num_experts']} experts and "
            f"parallelism.expert_parallel_degree = {degree}: give a degree that divides the experts"
        )
    for name, moe in job.moe_layers.items():
        check_placeable(moe.routed_experts.token_dispatcher, name)
    if config.after_steps:
        check_watch(job, **_watched(config, model))
        if job.sequences_a_step is None:
            return
        tokens = job.sequences_a_step * training.seq_len
        if config.after_steps * tokens < MIN_TOKENS:
            raise ValueError(
                f"{_SECTION}.after_steps = {config.after_steps}: with {tokens} tokens a step that "
                f"is less than the {MIN_TOKENS} tokens that a placement takes. Watch more steps"
            )


def check_placement_files(job: Job) -> None:
    """Raise a ValueError if the files that the section names are not of this job, or plans cannot
    be written."""
    config, model = job.config.narrowcast.placement, describe_job(job, _SECTION)
    with naming(_what(config)):
        if config.file:
            _placement_in(config.file, model)
        elif config.trace:
            _trace_in(config, model)
        else:
            check_writable(_plan_of_step(job.config, 0))


def _what(config: PlacementConfig) -> str:
    """The key that switches placement on, for messages."""
    if config.file:
        return f'{_SECTION}.file = "{config.file}"'
    return f'{_SECTION}.trace = "{config.trace}"' if config.trace else f"{_SECTION}.after_steps"


def _placement_in(file: str | Path, model: dict[str, Any]) -> Placement:
    placement = load_placement(file)
    placement.check(**{k: model[k] for k in ("model", "layers", "num_experts", "num_ranks")})
    return placement.in_order(model["layers"])


def _trace_in(config: PlacementConfig, model: dict[str, Any]) -> RoutingTrace:
    trace = load_trace(config.trace)
    check_made_for("trace", trace, **{k: model[k] for k in ("model", "layers", "num_experts")})
    check(trace, model["num_ranks"], config.nodes)
    return trace


def _watched(config: PlacementConfig, model: dict[str, Any]) -> dict[str, Any]:
    return {
        "section": f"{_SECTION}.after_steps",
        "num_steps": config.after_steps,
        "max_bytes": token_bytes(model) * tokens_to_plan_from(model["num_experts"]),
    }


def _folder(config: Any) -> Path:
    return Path(config.dump_folder) / "placement"


def _plan_of_step(config: Any, step: int) -> Path:
    return _folder(config) / f"step-{step:08}.json"
