"""Corrects predicted costs by times measured in training.

Samples and the calibration are taken apart from training, so what they predict may be off by a
factor: other work competes for cores and links. The factor is learned in each sampling window from
the gathers that took place in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from narrowcast.allgather.comm import NarrowAllGather
from narrowcast.autotune.consensus import Consensus
from narrowcast.autotune.links import Links
from narrowcast.autotune.problem import Group


@dataclass
class Corrections:
    """Ratios of measured times to predicted ones.

    Attributes:
        coding: for hashing, encoding and decoding.
        links: for baseline gathers, by label of the parameter group; 1 where there is none.
    """

    coding: float = 1.0
    links: dict[str, float] = field(default_factory=dict)

    @property
    def mean_link(self) -> float:
        """The mean of the link ratios, 0 where none is known; for the report."""
        return sum(self.links.values()) / max(len(self.links), 1)

    def corrected(self, label: str, links: Links) -> Links:
        """The links of a parameter group with all-gathers as fast as training shows them."""
        ratio, levels = self.links.get(label, 1.0), links.levels
        if levels is not None:
            levels = replace(levels, payload_gather=levels.payload_gather.scaled(ratio))
        return replace(links, all_gather=links.all_gather.scaled(ratio), levels=levels)

    def learn_coding(self, measured: float, predicted: float) -> None:
        """Takes the ratio of two times of a step, in seconds. Where nothing is coded the ratio
        decays towards 1: one slow window must not turn compression off for good."""
        if predicted > 0 and measured > 0:
            self.coding = measured / predicted
        else:
            self.coding **= 0.5

    def learn_links(
        self,
        comms: Mapping[str, NarrowAllGather],
        links: Mapping[str, Links],
        consensus: Consensus,
    ) -> None:
        """Takes the ratios of the baseline gathers of this sampling window. Every rank must call
        this. Where several process groups gather the same parameters, the slowest counts.

        Args:
            comms, links: by label of the parameter group.
        """
        ratios: dict[str, float] = {}
        by_process_group: dict[str, list[str]] = {}
        for label, comm in comms.items():
            name = comm.group.process_group.group_name
            by_process_group.setdefault(name, []).append(label)
        for labels in by_process_group.values():
            measured = _gather_seconds([comms[label] for label in labels])
            predicted = sum(
                len(comms[label].telemetry.plain_seconds)
                * links[label].all_gather.seconds(comms[label].group.shard_bytes)
                for label in labels
            )
            if predicted:
                ratios |= dict.fromkeys(labels, measured / predicted)
        found = consensus.largest_by_label(ratios, key=lambda ratio: ratio)
        self.links |= {label: found[label] for label in comms if label in found}


def _gather_seconds(comms: Sequence[NarrowAllGather]) -> float:
    """Seconds of the baseline gathers of one process group. The rank that comes last to a gather
    waits for no other, so its time counts."""
    seconds = [second for comm in comms for second in comm.telemetry.plain_seconds]
    if not seconds:
        return 0.0
    least = torch.tensor(seconds, dtype=torch.float64, device=comms[0].group.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=comms[0].group.process_group)
    return least.sum().item()


def measured_coding(comms: Sequence[NarrowAllGather], steps: int, consensus: Consensus) -> float:
    """Seconds of coding in a step: the mean of the ranks with the same parameters that code. It is
    not known on accelerators, where a call returns before its work is done: 0."""
    local = 0.0
    if consensus.device.type == "cpu":
        local = sum(comm.telemetry.coding_seconds for comm in comms) / steps
    return consensus.mean_of_positive(local)


def predicted_coding(
    problem: Sequence[Group],
    comms: Mapping[str, NarrowAllGather],
    links: Mapping[str, Links],
    steps: int,
) -> float:
    """Seconds of coding that a step of the current compressions was predicted to take.

    Args:
        problem: made without a correction of coding.
        comms, links: by label of the parameter group.
    """
    seconds = 0.0
    for group in problem:
        comm = comms[group.name]
        if comm.schemes is None:
            continue
        for shard in group.shards:
            option = shard.options[comm.schemes[shard.name].compression]
            seconds += option.hashing + option.encoding + option.decoding
        # Headers are packed and read in what is timed as coding.
        num_gathers = sum(comm.telemetry.gathers.values()) / steps
        seconds += num_gathers * links[group.name].gather_overhead
    return seconds
