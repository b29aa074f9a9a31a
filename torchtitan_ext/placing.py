"""Places the experts of torchtitan's trainer, moves them, and keeps checkpoints in model order."""

import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from narrowcast.config import PlacementConfig
from narrowcast.placement.balance import part_loads
from narrowcast.placement.correlation import MIN_TOKENS
from narrowcast.placement.effort import SECONDS, Effort
from narrowcast.placement.metrics import UNEVEN
from narrowcast.placement.placement import Placement, check_made_for, contiguous, load_placement
from narrowcast.placement.planning import (
    HELD_OUT,
    LayerRouting,
    check,
    placement_of,
    plan_layer,
    routings_of,
)
from narrowcast.placement.relocation import ExpertLayer, PlacedExperts
from narrowcast.placement.trace import RoutingTrace, load_trace
from narrowcast.util import check_writable
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
        planned = self._plan(self._routings(self._watch.trace(on_every_rank=True)))
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
            routings = from_first_rank(
                lambda: list(self._routings(_trace_in(self._config, self._model))),
                _what(self._config),
            )
            return self._plan(routings)
        return None

    def _placement_in(self, file: str | Path, what: str) -> Placement:
        placement = from_first_rank(lambda: _placement_in(file, self._model), what)
        if self._config.file and placement.num_nodes != self._config.nodes:
            logger.warning(
                f"{_SECTION}.nodes = {self._config.nodes} is overridden by {file}, which was "
                f"planned for {placement.num_nodes}"
            )
        return placement

    def _routings(self, trace: RoutingTrace) -> list[LayerRouting]:
        check(trace, self._model["num_ranks"], self._config.nodes)
        return list(routings_of(trace, _effort(self._config, self._model).tokens))

    def _plan(self, routings: list[LayerRouting]) -> Placement:
        """The placement that a trace leads to. Each rank plans some layers, and all get all: in
        this very process, since one that trains, with threads and a device, is not to be forked."""
        config, ranks = self._config, self._model["num_ranks"]
        num_layers, world_size = len(routings), dist.get_world_size()
        effort = _effort(config, self._model, len(routings[0].fitted_TK))
        planned_by_rank = from_every_rank(
            lambda: {
                layer: plan_layer(
                    routings[layer],
                    num_ranks=ranks,
                    num_nodes=config.nodes,
                    method=config.method,
                    max_load=config.max_load or None,
                    cross_node_weight=config.cross_node_weight or None,
                    restarts=effort.restarts,
                ).experts_E
                for layer in range(dist.get_rank(), num_layers, world_size)
            }
        )
        everyones = {
            layer: experts_E for some in planned_by_rank for layer, experts_E in some.items()
        }
        experts_by_layer = [everyones[i] for i in range(num_layers)]
        # Its model and layers are the trace's too.
        planned = placement_of(self.placement, experts_by_layer, ranks, config.nodes, config.method)
        self._report(routings, planned)
        return planned

    def _report(self, routings: list[LayerRouting], planned: Placement) -> None:
        ranks, names = self._model["num_ranks"], self._model["layers"]
        tokens = len(routings[0].judged_TK)
        rows, load = [], []
        for placement in (self.placement, planned):
            rank_of = list(zip(routings, placement.ranks_LE, strict=True))
            sent = sum(routing.rows(rank_E) for routing, rank_E in rank_of)
            rows.append(sent / tokens / len(routings))
            load_LR = [part_loads(routing.load_E, rank_E, ranks) for routing, rank_E in rank_of]
            load.append([float(load_R.max() / load_R.mean()) for load_R in load_LR])
        logger.info(
            f"placement planned from {len(routings[0].fitted_TK)} tokens, and judged on {tokens} "
            f"later ones: {rows[0]:.3f} -> {rows[1]:.3f} ranks a token; load of the busiest rank "
            f"over the mean {max(load[0]):.2f} -> {max(load[1]):.2f}"
        )
        if self._config.method != "rows" and max(load[1]) > UNEVEN * max(load[0]):
            logger.warning(
                f"placement: the busiest rank is to get {max(load[1]):.2f} times the mean load, "
                f'and had {max(load[0]):.2f}. {_SECTION}.method = "rows" bounds it'
            )
        for name, busiest in zip(names, load[1], strict=True):
            if 0 < self._config.max_load < busiest - 1e-6:
                logger.warning(
                    f"{_SECTION}.max_load = {self._config.max_load} cannot be reached in "
                    f"{name}: {busiest:.3f} is the least that was found"
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


def _effort(
    config: PlacementConfig, model: dict[str, Any], num_fitted: int | None = None
) -> Effort:
    return Effort.of(SECONDS, model["num_experts"], num_fitted, config.nodes)


def _watched(config: PlacementConfig, model: dict[str, Any]) -> dict[str, Any]:
    # As many as are fitted on, and as later ones judge what was fitted.
    tokens = round(_effort(config, model).tokens / (1 - HELD_OUT))
    return {
        "section": f"{_SECTION}.after_steps",
        "num_steps": config.after_steps,
        "max_bytes": token_bytes(model) * tokens,
    }


def _folder(config: Any) -> Path:
    return Path(config.dump_folder) / "placement"


def _plan_of_step(config: Any, step: int) -> Path:
    return _folder(config) / f"step-{step:08}.json"
