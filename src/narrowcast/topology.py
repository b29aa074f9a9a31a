"""Where ranks are: which of them share a node, and how a process group lies over the nodes.

        node 0        node 1
      +---------+   +---------+
      | 0  1  2 |   | 3  4  5 |       S = 3 ranks a node, R = 2 nodes; consecutive ranks of the job
      +---------+   +---------+
        within: (0 1 2), (3 4 5)      the ranks of a node: a fast link
        across: (0 3), (1 4), (2 5)   those in the same place of each node: a slow link

A process group lies within one node, has one rank on each of its nodes, or has S ranks on each of R
nodes in node-major order: two levels. Any other lies unevenly, and is used flat, as if each of its
ranks were a node of its own.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist

from narrowcast.attribution import counted_by_caller

logger = logging.getLogger(__name__)

Layout = Literal["within a node", "a rank a node", "two levels", "uneven"]


@dataclass(frozen=True)
class TwoLevels:
    """The communicators of this rank in a process group of S ranks on each of R nodes.

    Attributes:
        across: R ranks: those in this rank's place of each node, in the order of nodes.
        within: S ranks: those of this rank's node.
    """

    across: dist.ProcessGroup
    within: dist.ProcessGroup


@dataclass(frozen=True)
class Topology:
    """The nodes of a job, and this rank's process groups on them.

    Attributes:
        ranks_per_node: S, consecutive ranks of the job on each node.
        num_nodes: of the job; 0: not known.
        local: names of the process groups within one node.
        levels: of the process groups that lie in two levels, by name.
    """

    ranks_per_node: int = 1
    num_nodes: int = 0
    local: frozenset[str] = frozenset()
    levels: Mapping[str, TwoLevels] = field(default_factory=dict)

    def is_local(self, group: dist.ProcessGroup) -> bool:
        """Whether all ranks of a process group are on one node."""
        return group.group_name in self.local

    def levels_of(self, group: dist.ProcessGroup) -> TwoLevels | None:
        """The communicators of a process group that lies in two levels; ``None`` of any other."""
        return self.levels.get(group.group_name)

    def payload_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The ranks with which this one exchanges payloads in a collective of ``group``."""
        levels = self.levels_of(group)
        return group if levels is None else levels.across

    def ring_leaves_node(self, group: dist.ProcessGroup) -> bool:
        """Whether the next rank in a ring over a process group, to which this one sends, is on
        another node."""
        ranks = dist.get_process_group_ranks(group)
        own, following = ranks[group.rank()], ranks[(group.rank() + 1) % len(ranks)]
        return own // self.ranks_per_node != following // self.ranks_per_node


FLAT = Topology()  # every rank is a node of its own


def layout_of(ranks: list[int], ranks_per_node: int) -> Layout:
    """How a process group of these ranks of the job, in its order, lies over the nodes."""
    nodes = [rank // ranks_per_node for rank in ranks]
    num_nodes = len(set(nodes))
    if num_nodes == 1 and len(ranks) > 1:
        return "within a node"
    if num_nodes == len(ranks):
        return "a rank a node"
    size = len(ranks) // num_nodes
    in_order = [node for node in dict.fromkeys(nodes) for _ in range(size)]
    return "two levels" if nodes == in_order else "uneven"


@counted_by_caller()
def find_topology(
    ranks_per_node: int | str,
    groups: Iterable[dist.ProcessGroup],
    job: dist.ProcessGroup | None = None,
) -> Topology:
    """The topology of the job, with the communicators of this rank's process groups. These are made
    once for all that use them. Every rank of the job must call this.

    Args:
        ranks_per_node: "auto" stands for what the launcher says (LOCAL_WORLD_SIZE), where it says
            the same on all ranks.
        groups: this rank's process groups.
        job: the ranks that call this together; ``None`` stands for all.
    """
    members = {one.group_name: tuple(dist.get_process_group_ranks(one)) for one in groups}
    stated = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if ranks_per_node == "auto" else 0
    reports: list[Any] = [None] * dist.get_world_size(job)
    dist.all_gather_object(reports, (stated, set(members.values())), job)
    size = _agreed_size({stated for stated, _ in reports}) if stated else int(ranks_per_node)
    layouts = _layouts([of_rank for _, of_rank in reports], size, job)
    levels = _make_levels(
        {
            ranks: len(ranks) // len({rank // size for rank in ranks})
            for ranks, layout in layouts.items()
            if layout == "two levels"
        }
    )
    return Topology(
        size,
        -(-dist.get_world_size() // size),
        frozenset(n for n, ranks in members.items() if layouts[ranks] == "within a node"),
        {n: levels[ranks] for n, ranks in members.items() if ranks in levels},
    )


def _layouts(
    by_rank: list[set[tuple[int, ...]]], size: int, job: dist.ProcessGroup | None
) -> dict[tuple[int, ...], Layout]:
    """How every process group of the job lies over nodes of ``size`` ranks, in one order on every
    rank.

    Args:
        by_rank: the process groups of each rank, by their ranks.
    """
    every = sorted({ranks for of_rank in by_rank for ranks in of_rank})
    layouts = {ranks: layout_of(list(ranks), size) for ranks in every}
    has_far = {any(layouts[r] != "within a node" for r in of_rank) for of_rank in by_rank}
    instead: dict[Layout, Layout] = {}
    if len(has_far) > 1:  # to choose together, every rank needs something to choose for
        instead["within a node"] = "a rank a node"
    if dist.get_world_size(job) < dist.get_world_size():  # all ranks must make process groups
        instead["two levels"] = "uneven"
    layouts = {ranks: instead.get(layout, layout) for ranks, layout in layouts.items()}
    uneven = [list(ranks) for ranks, layout in layouts.items() if layout == "uneven"]
    if uneven and dist.get_rank() == 0:
        logger.warning(
            "narrowcast: ranks %s are not the same number of ranks on each node, node by node, "
            "with ranks_per_node = %d, or some ranks of the world take no part: their collectives "
            "are narrowed as if every rank were a node of its own",
            uneven[0],
            size,
        )
    return layouts


def _agreed_size(stated: set[int]) -> int:
    if len(stated) == 1:
        return stated.pop()
    if dist.get_rank() == 0:
        logger.warning(
            "narrowcast: nodes have %s ranks (LOCAL_WORLD_SIZE): every rank is treated as a node "
            'of its own. ranks_per_node = "auto" needs as many ranks on each node',
            " and ".join(map(str, sorted(stated))),
        )
    return 1


_made: dict[tuple[int, ...], dist.ProcessGroup] = {}
_made_in: list[dist.ProcessGroup | None] = [None]  # the job of these process groups


def _make_levels(sizes: dict[tuple[int, ...], int]) -> dict[tuple[int, ...], TwoLevels]:
    """The communicators of this rank in each process group that it is a member of. All ranks make
    all of them, in one order.

    Args:
        sizes: ranks of each process group on each of its nodes, by its ranks.
    """
    if _made_in[0] is not dist.group.WORLD:
        _made.clear()
        _made_in[0] = dist.group.WORLD
    rank = dist.get_rank()
    for part in sorted({part for ranks, size in sizes.items() for part in _parts(ranks, size)}):
        if part not in _made:  # on ranks that are no members too, which must make it as well
            _made[part] = dist.new_group(list(part), sort_ranks=False)
    found = {}
    for ranks, size in sizes.items():
        if rank in ranks:
            across, within = (part for part in _parts(ranks, size) if rank in part)
            found[ranks] = TwoLevels(_made[across], _made[within])
    return found


def _parts(ranks: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """The ranks in each place of the nodes, then those of each node."""
    across = [ranks[place::size] for place in range(size)]
    return across + [ranks[start : start + size] for start in range(0, len(ranks), size)]
