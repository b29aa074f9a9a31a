"""How the ranks of a job come to the same choice.

Ranks that hold the same parameters (replicas, and ranks that shard them together) form a cluster.
The first rank of each cluster is its leader: it decides from numbers that were reduced over all
ranks, and the others take its decision. Pipeline stages are different clusters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from narrowcast.errors import SettingsError
from narrowcast.fsdp2 import ParamGroup

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """The value of every rank of the group, in rank order. Every rank must call this."""
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, value, group)
    return gathered


@dataclass(frozen=True)
class Consensus:
    """The ranks of a job, what they hold, and which of them decides for which.

    Every method that communicates must be called by every rank of ``group``.

    Attributes:
        group: the ranks that decide together.
        device: of the tensors that are reduced over them.
        labels: labels of the parameter groups of all ranks, in one order on every rank.
        params: names of the parameters of all ranks, in one order on every rank.
        leaders: the leader of each cluster, as a rank of ``group``.
        leader: the leader of this rank's cluster.
    """

    group: dist.ProcessGroup
    device: torch.device
    labels: tuple[str, ...]
    params: tuple[str, ...]
    leaders: tuple[int, ...]
    leader: int

    @classmethod
    def form(
        cls,
        group: dist.ProcessGroup,
        device: torch.device,
        params: Mapping[str, Sequence[str]],
        settings: object,
    ) -> "Consensus":
        """Compares what the ranks hold and finds the leaders.

        Args:
            params: names of this rank's parameters by the label of their parameter group.
            settings: must be equal on all ranks.

        Raises:
            SettingsError: they are not; raised on every rank.
        """
        held = [(label, tuple(names)) for label, names in params.items()]
        gathered = gather_objects((held, settings), group)
        for rank, (_, other) in enumerate(gathered):
            if other != gathered[0][1]:
                raise SettingsError(
                    f"ranks were given different settings: rank 0 {gathered[0][1]}, rank {rank} "
                    f"{other}: give every rank the same"
                )
        first_holder: dict[str, int] = {}
        for rank, (of_rank, _) in enumerate(gathered):
            first_holder.setdefault(repr(of_rank), rank)
        all_held = [one for of_rank, _ in gathered for one in of_rank]
        return cls(
            group=group,
            device=device,
            labels=tuple(dict.fromkeys(label for label, _ in all_held)),
            params=tuple(dict.fromkeys(name for _, names in all_held for name in names)),
            leaders=tuple(first_holder.values()),
            leader=first_holder[repr(held)],
        )

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides for its cluster."""
        return self.leader == self.group.rank()

    def from_leader(self, decide: Callable[[], T]) -> T:
        """What ``decide()`` returns on the leader of this rank's cluster; only leaders call it. It
        must not raise."""
        decision: Any = None
        own = decide() if self.is_leader else None
        for leader in self.leaders:
            answers = [own if leader == self.leader else None]
            dist.broadcast_object_list(answers, group=self.group, group_src=leader)
            if leader == self.leader:
                decision = answers[0]
        return decision

    def largest(self, value: float) -> float:
        """The largest value over all ranks."""
        values = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values.item()

    def mean_of_positive(self, value: float) -> float:
        """The mean over the ranks of this rank's cluster whose value is positive; 0 if none is."""
        sums = torch.zeros(self.group.size(), 2, dtype=torch.float64, device=self.device)
        sums[self.leader, 0], sums[self.leader, 1] = value, value > 0
        dist.all_reduce(sums, group=self.group)
        total, ranks = sums[self.leader].tolist()
        return total / max(ranks, 1)

    def slowest_links(
        self, links: Mapping[str, T], groups: Mapping[str, ParamGroup], key: Callable[[T], float]
    ) -> dict[str, T]:
        """The links of each parameter group of this rank; where several process groups share the
        same parameters, the slowest by ``key``.

        Args:
            links: by name of the process group.
            groups: by label.
        """
        local = {label: links[group.process_group.group_name] for label, group in groups.items()}
        slowest = self.largest_by_label(local, key)
        return {label: slowest[label] for label in local}

    def largest_by_label(self, values: Mapping[str, T], key: Callable[[T], float]) -> dict[str, T]:
        """For each label, the largest value by ``key`` over the ranks that give one for it."""
        largest: dict[str, T] = {}
        for of_rank in gather_objects(dict(values), self.group):
            for label, value in of_rank.items():
                if label not in largest or key(value) > key(largest[label]):
                    largest[label] = value
        return largest
