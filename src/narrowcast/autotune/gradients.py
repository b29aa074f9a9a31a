"""Whether compressed reduce-scatters are worthwhile on a link, by parameter group.

The sampler observes the gradients of every parameter group on their way into the reduction, whether
that is FSDP2's own or a narrowed one. Now and then it encodes and decodes a chunk of them, by the
functions that a narrowed reduction uses, and times that. What the bytes take on the link follows
from the calibration.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast import util
from narrowcast.autotune.links import Links
from narrowcast.autotune.solver import MARGIN
from narrowcast.config import MAX_CHUNK_VALUES
from narrowcast.fsdp2 import ParamGroup
from narrowcast.reducescatter import codec
from narrowcast.topology import FLAT, Topology
from narrowcast.util import Summable, aligned
from narrowcast.wire import packet
from narrowcast.wire.coders import Coder


def is_worthwhile(plain: float, entropy: float) -> bool:
    """Whether reductions of ``entropy`` seconds are faster than baseline ones of ``plain`` seconds
    by more than the margin for errors of prediction."""
    return entropy < (1 - MARGIN) * plain


@dataclass(frozen=True)
class Reduction:
    """Predicted cost of the reductions of one parameter group's gradients, in seconds a step.

    Attributes:
        label: of the parameter group.
        plain: by the backend's own reduce-scatter.
        none, entropy: by narrowcast's exchange, with these compressions. Computation that coding
            overlaps with is not deducted.
        bits: of a value with ``entropy``.
    """

    label: str
    plain: float
    none: float
    entropy: float
    bits: float

    @property
    def is_worthwhile(self) -> bool:
        """Whether ``entropy`` is faster than ``plain`` by more than the margin."""
        return is_worthwhile(self.plain, self.entropy)


@dataclass(frozen=True)
class GradientStats(Summable):
    """Sums over the sampled chunks of a group's gradients: values, encoded bytes, and seconds."""

    values: float = 0.0
    coded_bytes: float = 0.0
    encoding: float = 0.0
    decoding: float = 0.0
    adding: float = 0.0


class GradientSampler:
    """Samples chunks of gradients as they are reduced, one parameter group after the other.

    Attributes:
        seconds: spent on sampling, since the owner set it to zero.

    Args:
        groups: by label; every rank that shares one gives them in the same order.
        job: the ranks whose samples are summed; ``None``: all.
        topology: where the ranks are.
    """

    def __init__(
        self,
        groups: dict[str, ParamGroup],
        coder: Coder,
        job: dist.ProcessGroup | None = None,
        topology: Topology = FLAT,
    ) -> None:
        self._topology = topology
        self._groups, self._coder, self._job = groups, coder, job
        self._num_sampled: Counter[str] = Counter()
        self.seconds = 0.0
        self._allowed: float | None = None  # chunks; None until the first are allowed
        self._window: dict[str, GradientStats] = {}
        self._latest: dict[str, GradientStats] = {}  # over all ranks, when last sampled
        # Reductions, by label, elements that a rank gets, and bytes of an element.
        self._reductions: Counter[tuple[str, int, int]] = Counter()
        self._ends: list[Callable[[], None]] = []

    def subscribe(self) -> None:
        """Observes the reductions of all groups until ``unsubscribe``."""
        self._ends = [
            group.observe_reductions(partial(self.observe, label))
            for label, group in self._groups.items()
        ]

    def unsubscribe(self) -> None:
        """Gives the groups their own reduce-scatters back, as far as nobody else observes them."""
        for end in self._ends:
            end()
        self._ends = []

    @property
    def num_sampled(self) -> int:
        """Chunks sampled so far on this rank."""
        return self._num_sampled.total()

    def allow(self, chunks: float) -> None:
        """Allows so many more chunks to be sampled, and one at first. Unused ones add up to one for
        each group at most."""
        if self._allowed is None:
            self._allowed = 1.0
        else:
            self._allowed = min(self._allowed + chunks, len(self._groups))

    def observe(self, label: str, rows_WN: Tensor) -> None:
        """Counts a reduction, and samples a chunk of it if one is allowed and no other group was
        sampled less often.

        Args:
            rows_WN: this rank's contributions to the gradients of the group, (W, n).
        """
        self._reductions[label, rows_WN.shape[1], rows_WN.element_size()] += 1
        if self._allowed is None or self._allowed < 1 or not self._is_next(label):
            return
        self._allowed -= 1
        self._num_sampled[label] += 1
        start = time.perf_counter()
        chunk_N = self._chunk(rows_WN, self._groups[label].process_group)
        if chunk_N.numel():
            before = self._window.get(label, GradientStats())
            self._window[label] = before + sample_chunk(chunk_N, self._coder)
        self.seconds += time.perf_counter() - start

    def _chunk(self, rows_WN: Tensor, group: dist.ProcessGroup) -> Tensor:
        """What stands for a chunk of what crosses: of this rank's contributions to another, or,
        where those of a node are summed, a sum of as many of this rank's own contributions."""
        levels = self._topology.levels_of(group)
        num_summed = 1 if levels is None else levels.within.size()
        rows = [(group.rank() + 1 + i) % len(rows_WN) for i in range(num_summed)]
        chunk_N = rows_WN[rows[0], :MAX_CHUNK_VALUES]
        for row in rows[1:]:
            chunk_N = chunk_N + rows_WN[row, :MAX_CHUNK_VALUES]
        return chunk_N

    def _is_next(self, label: str) -> bool:
        least = min(self._num_sampled[reduced] for reduced, *_ in self._reductions)
        return self._num_sampled[label] == least

    def predict(
        self,
        all_labels: Sequence[str],
        links: Mapping[str, Links],
        steps: int,
        device: torch.device,
    ) -> list[Reduction]:
        """The cost of every group that was reduced since the last call, by the latest samples of
        all ranks. A group that was never sampled goes by the mean of all. Every rank must call
        this.

        Args:
            all_labels: of the groups of all ranks, in one order on every rank.
            links: of this rank's groups, by label.
            steps: since the last call.
            device: of the tensor that is reduced.
        """
        rows = [astuple(self._window.get(label, GradientStats())) for label in all_labels]
        sums = torch.tensor(rows, dtype=torch.float64, device=device)
        sums = sums.view(-1, len(fields(GradientStats)))
        dist.all_reduce(sums, group=self._job)
        for label, row in zip(all_labels, sums.tolist(), strict=True):
            stats = GradientStats(*row)
            if stats.values:
                self._latest[label] = stats
        of_all = sum(self._latest.values(), GradientStats())
        predicted = []
        for label in self._groups:
            stats = self._latest.get(label, of_all)
            sites = {
                (numel, itemsize): count / steps
                for (reduced, numel, itemsize), count in self._reductions.items()
                if reduced == label
            }
            if stats.values and sites:
                predicted.append(predict_reduction(label, stats, links[label], sites))
        self._window.clear()
        self._reductions.clear()
        return predicted


def predict_reduction(
    label: str, stats: GradientStats, links: Links, sites: Mapping[tuple[int, int], float]
) -> Reduction:
    """The cost of one parameter group's reductions.

    Args:
        sites: reductions a step, by elements that a rank gets and bytes of an element.
    """
    world_size = links.payloads
    plain = none = entropy = 0.0
    for (numel, itemsize), times in sites.items():
        per_value = numel / stats.values
        adding = world_size * per_value * stats.adding
        coding = (world_size - 1) * per_value * (stats.encoding + stats.decoding)
        summing = adding
        if links.levels is not None:
            summing += links.levels.sum_within.seconds(itemsize * numel)
        sending = links.pairwise.seconds(per_value * stats.coded_bytes)
        plain += times * links.reduce_scatter.seconds(itemsize * numel)
        none += times * (links.pairwise.seconds(itemsize * numel) + summing)
        entropy += times * (sending + summing + coding)
    return Reduction(label, plain, none, entropy, 8 * stats.coded_bytes / stats.values)


def sample_chunk(values_N: Tensor, coder: Coder) -> GradientStats:
    """Encodes, decodes and adds a chunk as ``NarrowReduceScatter`` does, and times each. Memory
    that is written to was written before, as it was there."""
    target_N, sum_N = values_N.clone(), values_N.clone()
    start = util.now(values_N.device)
    encoded = codec.encode(values_N, "entropy", coder)
    payload = packet.pack(
        [encoded], coder=coder, settings=0, sequence=0, shard_checksum=0, device=values_N.device
    )
    encoding = util.now(values_N.device)
    (arrived,) = packet.unpack_body(*packet.unpack(payload))
    codec.decode_into(target_N, arrived, coder)
    decoding = util.now(values_N.device)
    sum_N.add_(target_N)
    added = util.now(values_N.device)
    return GradientStats(
        values_N.numel(), encoded.size, encoding - start, decoding - encoding, added - decoding
    )


def table(reductions: Sequence[Reduction]) -> str:
    """A row for each parameter group, and a verdict on all of them together."""
    plain = sum(one.plain for one in reductions)
    entropy = sum(one.entropy for one in reductions)
    verdict = (
        "compressing gradients is worthwhile on this link: [narrowcast.reduce_scatter] "
        "enable = true"
        if is_worthwhile(plain, entropy)
        else "compressing gradients is not worthwhile on this link"
    )
    return (
        f"{cost_table(reductions)}\n\nPredicted reductions of a step: {1e3 * plain:.2f} ms plain, "
        f"{1e3 * entropy:.2f} ms with entropy coding: {verdict}."
    )


def cost_table(reductions: Sequence[Reduction]) -> str:
    """A row for each parameter group."""
    head = ["gradients of", "bits", "plain ms", "none ms", "entropy ms", "worthwhile"]
    rows = [head]
    for one in reductions:
        times = (f"{1e3 * seconds:.2f}" for seconds in (one.plain, one.none, one.entropy))
        rows.append([one.label, f"{one.bits:.1f}", *times, "yes" if one.is_worthwhile else "no"])
    return aligned(rows, 1)
