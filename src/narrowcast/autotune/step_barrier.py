"""Ranks meet at the end of a step. One that skipped a step of the optimizer is found, not waited
for."""

import torch.distributed as dist

from narrowcast.errors import Job
from narrowcast.fsdp2 import ParamGroup


class StepBarrier:
    """Waits in collectives that a rank which counts other steps would never join.

    Args:
        groups: the parameter groups that this rank gathers.
    """

    def __init__(self, job: Job, groups: list[ParamGroup]) -> None:
        self._job, self._groups = job, groups
        self._watch = job.new_watch()

    def wait(self, step: int) -> None:
        """Waits for all ranks at the end of ``step``. On an accelerator it returns at once.

        Raises:
            OutOfStepError: a rank skipped the step, raised on that rank (see ``Job.wait``).
        """
        if self._groups[0].device.type != "cpu":
            return
        barrier = dist.barrier(self._job.group, async_op=True)
        names = list({group.process_group.group_name for group in self._groups})
        self._job.wait(barrier, self._watch, step, steps_end=True, groups=names)

    def wait_for_gather(self, group: ParamGroup, work: dist.Work, step: int) -> None:
        """Waits for a gather of ``group`` after ``step``.

        Raises:
            OutOfStepError: another rank waits for this one to end a step instead.
        """
        next_forward = [] if group.in_backward else [group.process_group.group_name]
        self._job.wait(work, self._watch, step, steps_end=False, groups=next_forward)
