"""Times operations that all ranks do at once."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

from narrowcast import util


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Stopwatch:
    """Times operations that all ranks of some process groups do at once, by the slowest rank.

    Every method must be called by all these ranks.

    Attributes:
        groups: the process groups.
        device: on which the operations run.
    """

    groups: list[dist.ProcessGroup]
    device: torch.device

    def slowest(self, numbers: list[float]) -> list[float]:
        """The largest of each number over the ranks of the groups, one group after the other."""
        largest = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        for group in self.groups:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return largest.tolist()

    def times(
        self, operation: Callable[[], object], repeats: int, before: Callable[[], object] = _nothing
    ) -> tuple[float, float, float]:
        """Repeats an operation, and times it.

        Args:
            before: is called first and not timed; uses up what a link lets pass at once after a
                pause.

        Returns:
            Seconds until the operation is done, and until its call has returned: of each rank the
            median of the repeats. The third is what all of it took, with waiting for other ranks.
        """
        done, returned = [], []
        begin = perf_counter()
        for group in self.groups:
            dist.barrier(group)
        before()
        for _ in range(repeats):
            start = util.now(self.device)
            operation()
            returned.append(perf_counter() - start)
            done.append(util.now(self.device) - start)
        medians = [statistics.median(done), statistics.median(returned)]
        seconds, until_return, took = self.slowest([*medians, perf_counter() - begin])
        return seconds, until_return, took
