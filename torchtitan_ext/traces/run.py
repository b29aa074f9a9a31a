"""``[narrowcast.routing_trace]``: records the routing of chosen steps, and writes it to a file."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torchtitan.tools.logging import logger

from narrowcast.config import RoutingTraceConfig
from narrowcast.util import check_writable
from torchtitan_ext.across_ranks import naming
from torchtitan_ext.job import Job
from torchtitan_ext.traces.watch import MIB, Recording, RoutingWatch

_SECTION = "narrowcast.routing_trace"


class TraceRun:
    """Records the steps that the section chooses, and writes the trace after the last of them.

    The job has passed ``check_trace``. Every rank must make one and call it alike.
    """

    def __init__(self, trainer: Any) -> None:
        config: RoutingTraceConfig = trainer.config.narrowcast.routing_trace
        self._file = Path(trainer.config.dump_folder) / config.file
        self._watch = RoutingWatch(trainer, _recording(config))
        self._steps = _chosen_steps(config)
        self._last = self._steps[-1]
        self._begun = self._written = False

    def during(self, step: int) -> AbstractContextManager:
        """A context that records a step, if it is one of those chosen."""
        if not self._begun and step > self._steps[0]:  # resumed
            left = sum(chosen >= step for chosen in self._steps)
            logger.warning(f"routing trace: {left} of {len(self._steps)} chosen steps are to come")
        self._begun = True
        return self._watch.recording(step) if step in self._steps else nullcontext()

    def after(self, step: int) -> None:
        """Write the file if ``step`` is the last one chosen. Every rank must call it."""
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
        size = self._file.stat().st_size / MIB
        logger.info(f"routing trace: {trace.num_tokens} tokens, {size:.1f} MiB: {self._file}")

    def remove(self) -> None:
        """Stop recording, and warn if nothing was written."""
        self._watch.remove()
        if not self._written:
            logger.warning(
                f"routing trace: nothing was written, since step {self._last}, the last to be "
                "recorded, was not trained in this run"
            )


def check_trace(job: Job) -> None:
    """Check that the section can work with a job, apart from its file.

    Raises:
        ValueError: it cannot; the message names the key and the cure.
    """
    config, steps = job.config.narrowcast.routing_trace, job.config.training.steps
    last = _chosen_steps(config)[-1]
    if last > steps:
        raise ValueError(
            f"{_SECTION} records up to step {last}, but training ends with training.steps = {steps}"
        )
    _recording(config).check(job)


def check_trace_file(job: Job) -> None:
    """Raise a ValueError if the trace cannot be written."""
    file = job.config.narrowcast.routing_trace.file
    with naming(f'{_SECTION}.file = "{file}"'):
        check_writable(Path(job.config.dump_folder) / file)


def _chosen_steps(config: RoutingTraceConfig) -> range:
    first, interval = config.first_step, config.interval
    return range(first, first + config.num_steps * interval, interval)


def _recording(config: RoutingTraceConfig) -> Recording:
    return Recording(_SECTION, config.num_steps, config.max_mib * MIB, config.scores)
