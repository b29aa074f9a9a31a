"""Watches the routers of torchtitan's trainer, and writes routing traces."""

import functools
import re
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torchtitan.tools.logging import logger

from narrowcast.experts.files import check_writable
from narrowcast.experts.recording import RecordedTokens, RoutingRecorder, trace_of
from narrowcast.experts.routing import RoutingTrace, id_dtype
from torchtitan_ext.config import RoutingTraceConfig
from torchtitan_ext.private import moe_layers, on_dispatch

_MIB = 1 << 20


class RoutingWatch:
    """Recorders on every MoE layer of a trainer. Every rank makes one, and asks it, alike.

    Args:
        trainer: whose model has been built, and placed if it is to be.
        section: of the configuration that asks for it, for messages.
        num_steps: that will be recorded before the trace is asked for.
        max_bytes: of the trace. Where it takes more, evenly spaced tokens are recorded.
        scores: whether to record these too.

    Raises:
        ValueError: the model has no MoE layers, or different ones, or is compiled.
    """

    def __init__(
        self, trainer: Any, section: str, *, num_steps: int, max_bytes: int, scores: bool = False
    ) -> None:
        config, dims = trainer.config, trainer.parallel_dims
        if config.compile.enable and "model" in config.compile.components:
            raise ValueError(
                f"{section} cannot work with compile.enable = true: selected experts are recorded "
                "between kernels. Record with compile.enable = false; a compiled run can train "
                "with the placement that comes of it"
            )
        self.model = describe(trainer, section)
        rank_in_stage = dist.get_rank() % (dims.world_size // dims.pp)
        # Tensor-parallel ranks share out the tokens with expert parallelism alone.
        copies = 1 if dims.ep > 1 else dims.tp
        self._is_first_copy = rank_in_stage % copies == 0
        token_ranks = dims.world_size // dims.pp // copies
        num_microbatches = (
            trainer.gradient_accumulation_steps * trainer.num_pipeline_parallel_microbatches
        )
        parts = token_ranks * num_microbatches * num_steps
        self._max_tokens = max_bytes // (token_bytes(self.model, scores) * parts)
        if self._max_tokens == 0:
            raise ValueError(
                f"{section}: {max_bytes / _MIB:.0f} MiB do not hold one token of every rank and "
                f"microbatch of {num_steps} steps: record fewer steps"
            )
        self._section = section
        self._undo: list[Any] = []
        self._recorders = []
        for part in trainer.model_parts:
            layers = moe_layers(part)
            recorder = RoutingRecorder(
                part,
                tuple(layers),
                self.model["num_experts"],
                rank_in_stage // copies,
                scores=scores,
                max_tokens=self._max_tokens,
            )
            self._recorders.append(recorder)
            self._undo.append(recorder.remove)
            for index, moe in enumerate(layers.values()):
                self._undo.append(on_dispatch(moe, functools.partial(recorder.record, index)))

    def recording(self, step: int) -> AbstractContextManager:
        """Record what runs within it, as of a step."""
        stack = ExitStack()
        for recorder in self._recorders:
            stack.enter_context(recorder.recording(step))
        return stack

    def trace(self, *, on_every_rank: bool) -> RoutingTrace | None:
        """What all ranks recorded since the last time. On the first rank alone, or on every one."""
        recorded = [recorder.take() for recorder in self._recorders]
        mine = [part for part in recorded if part is not None and self._is_first_copy]
        theirs = gathered(mine, on_every_rank=on_every_rank)
        if theirs is None:
            return None
        everyones: list[RecordedTokens] = [part for parts in theirs for part in parts]
        described = {name: value for name, value in self.model.items() if name != "top_k"}
        trace = trace_of(everyones, **described)
        most = max(int(part.position_T.max()) + 1 for part in everyones)
        num_ranks, num_steps = len(trace.rank_T.unique()), len(trace.step_T.unique())
        if trace.num_tokens < most * num_ranks * num_steps:
            logger.warning(
                f"{self._section}: the limit of size leaves {trace.num_tokens} tokens: evenly "
                "spaced ones of every step were recorded"
            )
        return trace

    def remove(self) -> None:
        """Leave the model as it was."""
        for undo in self._undo:
            undo()
        self._undo = []


class TraceRun:
    """Records the steps that `[narrowcast.routing_trace]` asks for, and writes them."""

    def __init__(self, trainer: Any) -> None:
        self._config: RoutingTraceConfig = trainer.config.narrowcast.routing_trace
        self._file = Path(trainer.config.dump_folder) / self._config.file
        self._watch = RoutingWatch(
            trainer,
            "narrowcast.routing_trace",
            num_steps=self._config.num_steps,
            max_bytes=self._config.max_mib * _MIB,
            scores=self._config.scores,
        )
        first, interval = self._config.first_step, self._config.interval
        self._steps = range(first, first + self._config.num_steps * interval, interval)
        self._last = self._steps[-1]
        if self._last > trainer.config.training.steps:
            raise ValueError(
                f"narrowcast.routing_trace records up to step {self._last}, but training ends with "
                f"training.steps = {trainer.config.training.steps}"
            )
        from_first_rank(
            lambda: check_writable(self._file),
            f'narrowcast.routing_trace.file = "{self._config.file}"',
        )
        self._begun = self._written = False

    def during(self, step: int) -> AbstractContextManager:
        """Record a step, if it is one of the chosen."""
        if not self._begun and step > self._steps[0]:  # resumed
            left = sum(chosen >= step for chosen in self._steps)
            logger.warning(f"routing trace: {left} of {len(self._steps)} chosen steps are to come")
        self._begun = True
        return self._watch.recording(step) if step in self._steps else nullcontext()

    def after(self, step: int) -> None:
        """Write the file once the last chosen step is over. Every rank must call it."""
        if step != self._last:
            return
        self._written = True
        trace = self._watch.trace(on_every_rank=False)
        if trace is None:
            return
        try:
            trace.save(self._file)
        except (OSError, SafetensorError) as error:
            logger.error(f"routing trace: it could not be written, and training goes on: {error}")
            return
        size = self._file.stat().st_size / _MIB
        logger.info(f"routing trace: {trace.num_tokens} tokens, {size:.1f} MiB: {self._file}")

    def remove(self) -> None:
        self._watch.remove()
        if not self._written:
            logger.warning(
                f"routing trace: nothing was written, since step {self._last}, the last to be "
                "recorded, was not trained in this run"
            )


def describe(trainer: Any, section: str) -> dict[str, Any]:
    """The fields of a `RoutingTrace` that are of the model, the same on every rank; and `top_k`.

    Raises:
        ValueError: the model has no MoE layers, or different ones.
    """
    ours = [
        (name, moe.router.num_experts, moe.router.top_k, *_groups(moe))
        for part in trainer.model_parts
        for name, moe in moe_layers(part).items()
    ]
    everyones = sorted({layer for part in gathered(ours) for layer in part}, key=_in_model_order)
    if not everyones:
        raise ValueError(f"{section} cannot work here: the model has no MoE layers")
    if len({layer[1:] for layer in everyones}) > 1:
        raise ValueError(
            f"{section} cannot work here: MoE layers differ in (name, experts, top_k, groups): "
            f"{everyones}"
        )
    spec = trainer.config.model_spec
    _, num_experts, top_k, num_groups, num_limited_groups = everyones[0]
    return {
        "model": f"{spec.name} {spec.flavor}",
        "layers": tuple(name for name, *_ in everyones),
        "num_experts": num_experts,
        "top_k": top_k,
        "num_ranks": trainer.parallel_dims.ep,
        "num_groups": num_groups,
        "num_limited_groups": num_limited_groups,
    }


def token_bytes(model: dict[str, Any], scores: bool = False) -> int:
    """What a token takes in a trace of a model that `describe` describes."""
    id_bytes = id_dtype(model["num_experts"]).itemsize
    return len(model["layers"]) * model["top_k"] * (id_bytes + 4 * scores) + 12


def gathered(mine: Any, *, on_every_rank: bool = True) -> list[Any] | None:
    """What every rank gave, by rank; None on other ranks than the first if not `on_every_rank`."""
    theirs: list[Any] | None = [None] * dist.get_world_size()
    if on_every_rank:
        dist.all_gather_object(theirs, mine)
        return theirs
    theirs = theirs if dist.get_rank() == 0 else None
    dist.gather_object(mine, theirs)
    return theirs


def from_first_rank(read: Any, what: str) -> Any:
    """What the first rank reads, on every rank; its error too, with `what` before it.

    Raises:
        ValueError: it could not be read.
    """
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [read()]
        except (OSError, ValueError) as error:
            outcome = [ValueError(f"{what}: {error}")]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], ValueError):
        raise outcome[0]
    return outcome[0]


def _groups(moe: nn.Module) -> tuple[int | None, int | None]:
    return moe.router.num_expert_groups, moe.router.num_limited_groups


def _in_model_order(layer: tuple) -> list[tuple[int, str]]:
    """Layer 10 comes after layer 9."""
    return [(int(n or 0), text) for text, n in re.findall(r"(\D+)|(\d+)", layer[0])]
