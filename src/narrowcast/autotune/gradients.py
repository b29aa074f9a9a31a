"""Whether entropy gradients pay on a link, by parameter group.

Contributions to gradients are looked at on their way into the reduction: a piece now and then is
entropy and decoded by the same functions, and timed. Times of links come from the calibration.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast import util
from narrowcast.autotune.calibration import Links
from narrowcast.autotune.solver import MARGIN
from narrowcast.config import MAX_CHUNK_VALUES
from narrowcast.fsdp2 import ParamGroup
from narrowcast.reducescatter import codec
from narrowcast.util import Summable, aligned
from narrowcast.wire import packet
from narrowcast.wire.coders import Coder


def is_worthwhile(plain: float, entropy: float) -> bool:
    """Whether entropy reductions are enough faster than plain ones."""
    return entropy < (1 - MARGIN) * plain


@dataclass(frozen=True)
class Reduction:
    """What the reductions of one parameter group's gradients cost a step, in seconds.

    Attributes:
        label: of the parameter group.
        plain: by the backend's own reduce-scatter, predicted.
        none, entropy: by narrowcast's exchange, predicted. Overlap of coding is not deducted.
        bits: that a entropy gradient takes.
    """

    label: str
    plain: float
    none: float
    entropy: float
    bits: float

    @property
    def is_worthwhile(self) -> bool:
        return is_worthwhile(self.plain, self.entropy)


@dataclass(frozen=True)
class _GradientStats(Summable):
    """Sums over the pieces of a group's gradients: values, bytes entropy, and seconds."""

    values: float = 0.0
    coded_bytes: float = 0.0
    encoding: float = 0.0
    decoding: float = 0.0
    adding: float = 0.0


class GradientSampler:
    """Looks at pieces of gradients as they are reduced, one group after the other.

    Attributes:
        spent: seconds that went into it, since the owner set it to zero.

    Args:
        groups: by label; every rank that shares one gives them in the same order.
        job: the ranks whose sums are taken; ``None``: all.
    """

    def __init__(
        self,
        groups: dict[str, ParamGroup],
        coder: Coder,
        job: dist.ProcessGroup | None = None,
    ) -> None:
        # By what a group holds: who counts it may have another object for it.
        self._labels = {group.names: label for label, group in groups.items()}
        self._groups = groups
        self._coder, self._job = coder, job
        self._looks: Counter[str] = Counter()
        self.spent = 0.0
        self._due: float | None = None  # pieces; none before there is room
        self._looked: dict[str, _GradientStats] = {}
        self._known: dict[str, _GradientStats] = {}  # over all ranks, when each was last looked at
        # Reductions, by label, elements a rank gets, and bytes of one.
        self._reductions: Counter[tuple[str, int, int]] = Counter()

    def make_room(self, pieces: float) -> None:
        """So many more pieces may be looked at; and one at first."""
        self._due = 1.0 if self._due is None else min(self._due + pieces, len(self._groups))

    def __call__(self, group: ParamGroup, rows_WN: Tensor) -> None:
        """Looks at the contributions of this rank, (W, n), if it is the group's turn."""
        label = self._labels.get(group.names)
        if label is None:
            return
        self._reductions[label, rows_WN.shape[1], rows_WN.element_size()] += 1
        if self._due is not None and self._due >= 1 and self._is_next(label):
            self._due -= 1
            self._looks[label] += 1
            start = time.perf_counter()
            others_row = (dist.get_rank(group.process_group) + 1) % len(rows_WN)
            piece = rows_WN[others_row, :MAX_CHUNK_VALUES]
            if piece.numel():
                self._looked[label] = self._looked.get(label, _GradientStats()) + _look(
                    piece, self._coder
                )
            self.spent += time.perf_counter() - start

    def _is_next(self, label: str) -> bool:
        return self._looks[label] == min(self._looks[reduced] for reduced, *_ in self._reductions)

    def reductions(
        self,
        all_labels: Sequence[str],
        links: dict[str, Links],
        steps: int,
        device: torch.device,
    ) -> list[Reduction]:
        """What was last seen of every group on all ranks, and what it means on their links.

        Every rank must call it, with the same ``all_labels``.
        """
        rows = [astuple(self._looked.get(label, _GradientStats())) for label in all_labels]
        sums = torch.tensor(rows, dtype=torch.float64, device=device).view(
            -1, len(fields(_GradientStats))
        )
        dist.all_reduce(sums, group=self._job)
        looked = {
            label: _GradientStats(*row)
            for label, row in zip(all_labels, sums.tolist(), strict=True)
        }
        self._known |= {label: one for label, one in looked.items() if one.values}
        of_all = sum(self._known.values(), _GradientStats())
        found = []
        for label in self._groups:
            seen = self._known.get(label, of_all)
            if seen.values and any(key[0] == label for key in self._reductions):
                found.append(self._reduction(label, seen, links[label], steps))
        self._looked.clear()
        self._reductions.clear()
        return found

    def _reduction(self, label: str, seen: _GradientStats, links: Links, steps: int) -> Reduction:
        world_size = len(links.ranks)
        plain = none = entropy = 0.0
        for (of_label, numel, itemsize), count in self._reductions.items():
            if of_label != label:
                continue
            times = count / steps
            a_value = numel / seen.values
            adding = world_size * a_value * seen.adding
            coding = (world_size - 1) * a_value * (seen.encoding + seen.decoding)
            plain += times * links.reduce_scatter.seconds(itemsize * numel)
            none += times * (links.pairwise.seconds(itemsize * numel) + adding)
            entropy += times * (
                links.pairwise.seconds(a_value * seen.coded_bytes) + adding + coding
            )
        return Reduction(label, plain, none, entropy, 8 * seen.coded_bytes / seen.values)


def _look(values_N: Tensor, coder: Coder) -> _GradientStats:
    """As ``NarrowReduceScatter`` codes it: memory that is written over was written before."""
    target_N, sum_N = values_N.clone(), values_N.clone()
    start = util.now(values_N.device)
    encoded = codec.encode(values_N, "entropy", coder)
    payload = packet.pack(
        [encoded], coder=coder, settings=0, sequence=0, shard_checksum=0, device=values_N.device
    )
    int(values_N.count_nonzero())
    encoding = util.now(values_N.device)
    (arrived,) = packet.unpack_body(*packet.unpack(payload))
    codec.decode_into(target_N, arrived, coder)
    decoding = util.now(values_N.device)
    sum_N.add_(target_N)
    added = util.now(values_N.device)
    return _GradientStats(
        values_N.numel(), encoded.size, encoding - start, decoding - encoding, added - decoding
    )


def table(reductions: Sequence[Reduction]) -> str:
    """A line a parameter group, and what it means for the switch."""
    rows = [["gradients of", "bits", "plain ms", "none ms", "entropy ms", "entropy pays"]]
    for one in reductions:
        times = (f"{1e3 * seconds:.2f}" for seconds in (one.plain, one.none, one.entropy))
        rows.append([one.label, f"{one.bits:.1f}", *times, "yes" if one.is_worthwhile else "no"])
    plain = sum(one.plain for one in reductions)
    entropy = sum(one.entropy for one in reductions)
    verdict = (
        "a entropy reduce-scatter pays on this link: [narrowcast.reduce_scatter] enable = true"
        if is_worthwhile(plain, entropy)
        else "a entropy reduce-scatter does not pay on this link"
    )
    return (
        f"{aligned(rows, 1)}\n\nPredicted reductions of a step: {1e3 * plain:.2f} ms plain, "
        f"{1e3 * entropy:.2f} ms entropy: {verdict}."
    )
