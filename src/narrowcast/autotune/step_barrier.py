"""Ranks meet at the end of a step. One that skipped a step of the optimizer is found, not waited
for.

A rank that skips a step continues with the gathers of the next forward, while the others wait for
it in a collective at the end of theirs. So a rank waits with patience in both places, and compares
its steps with those of the ranks that wait at the end of one. Every gather of the job compares the
steps that every barrier of the job counts: gathers and gradients may both be chosen, each by a
schedule of its own.
"""

from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from narrowcast.autotune.schedule import Schedule
from narrowcast.errors import Job
from narrowcast.fsdp2 import ParamGroup

# Of the barriers of each job, by watch.
_schedules: WeakKeyDictionary[Job, WeakValueDictionary[int, Schedule]] = WeakKeyDictionary()


class StepBarrier:
    """Waits in collectives that a rank which counts other steps would never join.

    Args:
        groups: the parameter groups that this rank gathers.
        schedule: counts the steps.
    """

    def __init__(self, job: Job, groups: list[ParamGroup], schedule: Schedule) -> None:
        self._job, self._groups, self._schedule = job, groups, schedule
        self._is_on_cpu = groups[0].device.type == "cpu"
        self._watch = job.new_watch()
        self._ends: list[Callable[[], None]] = []
        _schedules.setdefault(job, WeakValueDictionary())[self._watch] = schedule

    def wait(self) -> None:
        """Waits for all ranks at the end of a step. On an accelerator it returns at once.

        Raises:
            OutOfStepError: a rank skipped the step, raised on that rank (see ``Job.wait``).
        """
        if not self._is_on_cpu:
            return
        barrier = dist.barrier(self._job.group, async_op=True)
        names = list({group.process_group.group_name for group in self._groups})
        steps = {self._watch: self._schedule.steps}
        self._job.wait(barrier, steps, steps_end=True, groups=names)

    def watch_gathers(self) -> None:
        """Lets gathers by FSDP2's own all-gather wait by ``wait_for_gather`` too, until ``remove``.
        On an accelerator it does nothing."""
        if self._is_on_cpu:
            self._ends = [
                group.watch_gathers(partial(_wait_for_plain_gather, self._job, group))
                for group in self._groups
            ]

    def remove(self) -> None:
        """Ends the comparison of steps, and gives the groups their own all-gathers back."""
        _schedules[self._job].pop(self._watch, None)
        for end in self._ends:
            end()
        self._ends = []


def wait_for_gather(job: Job, group: ParamGroup, work: dist.Work) -> None:
    """Waits for a collective of a gather of ``group`` on a CPU.

    Raises:
        OutOfStepError: another rank waits for this one to end a step instead.
    """
    schedules = _schedules.get(job)
    if not schedules:
        work.wait()
        return
    steps = {watch: schedule.steps for watch, schedule in schedules.items()}
    next_forward = [] if group.in_backward else [group.process_group.group_name]
    job.wait(work, steps, steps_end=False, groups=next_forward)


def _wait_for_plain_gather(job: Job, group: ParamGroup, work: dist.Work) -> None:
    with job.together(f"all-gather of {group.name}"):
        wait_for_gather(job, group, work)
