"""Records which experts the tokens of a trainer select."""

import functools
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from narrowcast.placement.recording import RecordedTokens, RoutingRecorder, trace_of
from narrowcast.placement.trace import RoutingTrace
from torchtitan_ext.across_ranks import gathered
from torchtitan_ext.job import Job
from torchtitan_ext.private import moe_layers, on_dispatch
from torchtitan_ext.routed_model import RoutedModel

MIB = 1 << 20


@dataclass(frozen=True)
class Recording:
    """What is to be recorded of the routers.

    Attributes:
        section: of the configuration that asks for it, for messages.
        num_steps: recorded before the trace is taken.
        max_bytes: of the trace. Where all tokens would take more, evenly spaced ones are recorded.
        scores: whether the routing scores of the selected experts are recorded too.
    """

    section: str
    num_steps: int
    max_bytes: int
    scores: bool = False

    def max_tokens(self, job: Job, model: RoutedModel) -> int:
        """Tokens that a rank may record of one microbatch."""
        token_ranks = job.dims.world_size // job.dims.pp // _copies(job.dims)
        tokens = token_ranks * job.microbatches * self.num_steps
        return self.max_bytes // (model.token_bytes(self.scores) * tokens)

    def check(self, job: Job) -> None:
        """Check that the routers of a job can be recorded so.

        Raises:
            ValueError: the model has no MoE layers, they differ, the model is compiled, or one
                token of every rank and microbatch takes more than ``max_bytes``.
        """
        if job.is_compiled:
            raise ValueError(
                f"{self.section} cannot work with compile.enable = true: selected experts are "
                "recorded between kernels. Record with compile.enable = false; a compiled run can "
                "train with the placement that is planned from the trace"
            )
        model = RoutedModel.of_job(job, self.section)
        if job.dims is not None and self.max_tokens(job, model) == 0:
            raise ValueError(
                f"{self.section}: {self.max_bytes / MIB:.0f} MiB do not hold one token of every "
                f"rank and microbatch of {self.num_steps} steps: record fewer steps"
            )


class RoutingWatch:
    """Recorders on every MoE layer of a trainer. Every rank must make one and call it alike.

    Args:
        trainer: has built its model, and placed its experts if they are to be placed.
        recording: has been checked for the trainer's job.
    """

    def __init__(self, trainer: Any, recording: Recording) -> None:
        dims = trainer.parallel_dims
        self._recording = recording
        self._model = RoutedModel.of_trainer(trainer, recording.section)
        rank_in_stage = dist.get_rank() % (dims.world_size // dims.pp)
        copies = _copies(dims)
        self._is_first_copy = rank_in_stage % copies == 0
        max_tokens = recording.max_tokens(Job(trainer.config, dims), self._model)
        self._undo: list[Any] = []
        self._recorders = []
        for part in trainer.model_parts:
            layers = moe_layers(part)
            recorder = RoutingRecorder(
                part,
                tuple(layers),
                self._model.num_experts,
                rank_in_stage // copies,
                scores=recording.scores,
                max_tokens=max_tokens,
            )
            self._recorders.append(recorder)
            self._undo.append(recorder.remove)
            for index, moe in enumerate(layers.values()):
                self._undo.append(on_dispatch(moe, functools.partial(recorder.record, index)))

    def recording(self, step: int) -> AbstractContextManager:
        """A context in which everything that is routed is recorded as of ``step``."""
        stack = ExitStack()
        for recorder in self._recorders:
            stack.enter_context(recorder.recording(step))
        return stack

    def trace(self, *, on_every_rank: bool) -> RoutingTrace | None:
        """The trace of what all ranks recorded since the last call.

        Returns:
            None on every rank but the first if not ``on_every_rank``.
        """
        recorded = [recorder.take() for recorder in self._recorders]
        local = [part for part in recorded if part is not None and self._is_first_copy]
        by_rank = gathered(local, on_every_rank=on_every_rank)
        if by_rank is None:
            return None
        parts: list[RecordedTokens] = [part for of_rank in by_rank for part in of_rank]
        trace = trace_of(parts, **self._model.trace_fields)
        most = max(int(part.position_T.max()) + 1 for part in parts)
        num_ranks, num_steps = len(trace.rank_T.unique()), len(trace.step_T.unique())
        if trace.num_tokens < most * num_ranks * num_steps:
            logger.warning(
                f"{self._recording.section}: the limit of size leaves {trace.num_tokens} tokens: "
                "evenly spaced ones of every step were recorded"
            )
        return trace

    def remove(self) -> None:
        """Take the recorders off the model."""
        for undo in self._undo:
            undo()
        self._undo = []


def _copies(dims: ParallelDims) -> int:
    """How many ranks have the same tokens: all tensor-parallel ones, unless expert parallelism
    divides the tokens among them."""
    return 1 if dims.ep > 1 else dims.tp
