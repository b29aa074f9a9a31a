"""Watches the routers of torchtitan's trainer, and writes routing traces."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from narrowcast.config import RoutingTraceConfig
from narrowcast.placement.recording import RecordedTokens, RoutingRecorder, trace_of
from narrowcast.placement.trace import RoutingTrace, id_dtype
from narrowcast.util import check_writable
from torchtitan_ext.job import Job
from torchtitan_ext.private import moe_layers, on_dispatch

_MIB = 1 << 20
_SECTION = "narrowcast.routing_trace"


class RoutingWatch:
    """Recorders on every MoE layer of a trainer. Every rank makes one, and asks it, alike.

    Args:
        trainer: whose model has been built, and placed if it is to be.
        section: of the configuration that asks for it, for messages.
        num_steps: that will be recorded before the trace is asked for.
        max_bytes: of the trace. Where it takes more, evenly spaced tokens are recorded.
        scores: whether to record these too.

    The job has passed `check_watch` with the same arguments.
    """

    def __init__(
        self, trainer: Any, section: str, *, num_steps: int, max_bytes: int, scores: bool = False
    ) -> None:
        dims = trainer.parallel_dims
        self.model = describe(trainer, section)
        rank_in_stage = dist.get_rank() % (dims.world_size // dims.pp)
        copies = _copies(dims)
        self._is_first_copy = rank_in_stage % copies == 0
        self._max_tokens = _most_tokens(
            Job(trainer.config, dims), self.model, num_steps, max_bytes, scores
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


def check_watch(
    job: Job, section: str, *, num_steps: int, max_bytes: int, scores: bool = False
) -> None:
    """Whether the routers of a job can be watched; arguments as of `RoutingWatch`.

    Raises:
        ValueError: the model has no MoE layers, or different ones, or is compiled; or its tokens
            take too much.
    """
    if job.is_compiled:
        raise ValueError(
            f"{section} cannot work with compile.enable = true: selected experts are recorded "
            "between kernels. Record with compile.enable = false; a compiled run can train "
            "with the placement that comes of it"
        )
    model = describe_job(job, section)
    if job.dims is not None and _most_tokens(job, model, num_steps, max_bytes, scores) == 0:
        raise ValueError(
            f"{section}: {max_bytes / _MIB:.0f} MiB do not hold one token of every rank and "
            f"microbatch of {num_steps} steps: record fewer steps"
        )


def _copies(dims: ParallelDims) -> int:
    """Ranks that have the same tokens: tensor-parallel ones share them out with expert parallelism
    alone."""
    return 1 if dims.ep > 1 else dims.tp


def _most_tokens(
    job: Job, model: dict[str, Any], num_steps: int, max_bytes: int, scores: bool
) -> int:
    """That a rank may record of a microbatch."""
    token_ranks = job.dims.world_size // job.dims.pp // _copies(job.dims)
    return max_bytes // (token_bytes(model, scores) * token_ranks * job.microbatches * num_steps)


def check_trace(job: Job) -> None:
    """Whether `[narrowcast.routing_trace]` can work with a job.

    Raises:
        ValueError: it cannot; the message names what and why.
    """
    config, steps = job.config.narrowcast.routing_trace, job.config.training.steps
    last = _chosen_steps(config)[-1]
    if last > steps:
        raise ValueError(
            f"{_SECTION} records up to step {last}, but training ends with training.steps = {steps}"
        )
    check_watch(job, _SECTION, **_watched(config))


def check_trace_file(job: Job) -> None:
    """Raise a ValueError if the trace cannot be written."""
    file = job.config.narrowcast.routing_trace.file
    with naming(f'{_SECTION}.file = "{file}"'):
        check_writable(Path(job.config.dump_folder) / file)


def _chosen_steps(config: RoutingTraceConfig) -> range:
    first, interval = config.first_step, config.interval
    return range(first, first + config.num_steps * interval, interval)


def _watched(config: RoutingTraceConfig) -> dict[str, Any]:
    max_bytes = config.max_mib * _MIB
    return {"num_steps": config.num_steps, "max_bytes": max_bytes, "scores": config.scores}


class TraceRun:
    """Records the steps that `[narrowcast.routing_trace]` asks for, and writes them."""

    def __init__(self, trainer: Any) -> None:
        self._config: RoutingTraceConfig = trainer.config.narrowcast.routing_trace
        self._file = Path(trainer.config.dump_folder) / self._config.file
        self._watch = RoutingWatch(trainer, _SECTION, **_watched(self._config))
        self._steps = _chosen_steps(self._config)
        self._last = self._steps[-1]
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
        except (OSError, ValueError) as error:
            logger.error(f"routing trace: training goes on without it: {error}")
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
    ours = [layer for part in trainer.model_parts for layer in _layers(moe_layers(part))]
    everyones = {layer for part in gathered(ours) for layer in part}
    return _described(everyones, trainer.config, section)


def describe_job(job: Job, section: str) -> dict[str, Any]:
    """The same of a model that is not built yet."""
    return _described(_layers(job.moe_layers), job.config, section)


def _layers(moes: dict[str, nn.Module]) -> list[tuple]:
    return [
        (name, moe.router.num_experts, moe.router.top_k, *_groups(moe))
        for name, moe in moes.items()
    ]


def _described(layers: Iterable[tuple], config: Any, section: str) -> dict[str, Any]:
    layers = sorted(layers, key=_in_model_order)
    if not layers:
        raise ValueError(f"{section} cannot work here: the model has no MoE layers")
    if len({layer[1:] for layer in layers}) > 1:
        raise ValueError(
            f"{section} cannot work here: MoE layers differ in (name, experts, top_k, groups): "
            f"{layers}"
        )
    _, num_experts, top_k, num_groups, num_limited_groups = layers[0]
    return {
        "model": f"{config.model_spec.name} {config.model_spec.flavor}",
        "layers": tuple(name for name, *_ in layers),
        "num_experts": num_experts,
        "top_k": top_k,
        "num_ranks": config.parallelism.expert_parallel_degree,
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


def from_every_rank(make: Callable[[], Any]) -> list[Any]:
    """What every rank makes, by rank. Every rank must call it, alike.

    Raises:
        ValueError: one could not make it; on every rank the same, of the first that could not.
    """
    made, failure = None, None
    try:
        made = make()
    except Exception as error:
        failure = error
    outcomes = gathered((made, None if failure is None else _said(failure)))
    for rank, (_, said) in enumerate(outcomes):
        if said is not None:
            raise ValueError(said if rank == 0 else f"on rank {rank}: {said}") from failure
    return [made for made, _ in outcomes]


def from_first_rank(read: Callable[[], Any], what: str) -> Any:
    """What the first rank reads, on every rank; its error too, with `what` before it.

    Raises:
        ValueError: it could not be read.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [read(), None]
        except Exception as error:
            outcome = [None, f"{what}: {_said(error)}"]
    dist.broadcast_object_list(outcome, src=0)
    found, said = outcome
    if said is not None:
        raise ValueError(said)
    return found


def _said(error: Exception) -> str:
    """For users as it is; of errors that are not meant for them, their type too."""
    is_meant = isinstance(error, ValueError | ImportError | OSError)
    return str(error) if is_meant else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Errors of files, within it, are ValueErrors with `what` before them."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from error


def _groups(moe: nn.Module) -> tuple[int | None, int | None]:
    return moe.router.num_expert_groups, moe.router.num_limited_groups


def _in_model_order(layer: tuple) -> list[tuple[int, str]]:
    """Layer 10 comes after layer 9."""
    return [(int(n or 0), text) for text, n in re.findall(r"(\D+)|(\d+)", layer[0])]
