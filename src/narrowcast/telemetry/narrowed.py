"""What is counted and timed of narrowed collectives: hooks that their objects call.

The objects that move bytes hold one of these, and neither a clock nor a ledger.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from narrowcast.fsdp2 import ParamGroup
from narrowcast.telemetry.changes import Changes
from narrowcast.telemetry.ledger import Ledger, all_reduce_bytes
from narrowcast.topology import TwoLevels


@dataclass
class GatherTelemetry:
    """Of the all-gathers of one parameter group: bytes for the ledger, times for selection.

    Attributes:
        ledger: where bytes are counted; ``None``: nowhere.
        gathers: how many there were, by process group (its name), number of ranks and number of
            elements of a shard, since ``clear``.
        coding_seconds: time of encoding and decoding since ``clear``. Where calls return before
            the device is done, only the time of the calls.
        plain_seconds: time of each gather that was left to the baseline since ``clear``, as far as
            it is known: on a CPU, over all ranks of the group.
    """

    ledger: Ledger | None = None
    gathers: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    coding_seconds: float = 0.0
    plain_seconds: list[float] = field(default_factory=list)

    def clear(self) -> None:
        """Starts to count gathers and to add up times from zero."""
        self.gathers.clear()
        self.coding_seconds = 0.0
        self.plain_seconds.clear()

    def on_gather(self, process_group: dist.ProcessGroup, numel: int) -> None:
        """A gather of ``numel`` elements of each rank starts."""
        self.gathers[process_group.group_name, process_group.size(), numel] += 1

    @contextmanager
    def coding(self) -> Iterator[None]:
        """Times what is encoded or decoded within."""
        start = time.perf_counter()
        yield
        self.coding_seconds += time.perf_counter() - start

    @contextmanager
    def plain_gather(self) -> Iterator[None]:
        """Times the baseline's gather within."""
        start = time.perf_counter()
        yield
        self.plain_seconds.append(time.perf_counter() - start)

    def wants_changes(self, group: ParamGroup) -> bool:
        """Whether the encoder is to count what has changed in the group's shard."""
        ledger = self.ledger
        return ledger is not None and ledger.is_sampled and ledger.is_first_gather(group)

    def on_small_all_reduce(self, nbytes: int, process_group: dist.ProcessGroup) -> None:
        """An all-reduce of ``nbytes`` bytes was sent that the baseline does not need."""
        if self.ledger is not None:
            sent_bytes = all_reduce_bytes(nbytes, process_group.size())
            self.ledger.add_sent("all_gather", sent_bytes, process_group)

    def on_gathered(
        self,
        group: ParamGroup,
        process_group: dist.ProcessGroup,
        *,
        num_values: int,
        sent_bytes: int,
        changes: dict[str, Changes],
    ) -> None:
        """Payloads have crossed, and are decoded.

        Args:
            process_group: the ranks that exchanged payloads.
            num_values: of a shard.
            sent_bytes: what this rank sent to each other rank.
            changes: by kind of shard, where ``wants_changes`` asked for them.
        """
        if self.ledger is not None:
            others = process_group.size() - 1
            self.ledger.add_sent("all_gather", others * sent_bytes, process_group)
            self.ledger.record_gather(group, num_values, sent_bytes, changes)

    def on_completed(
        self, process_group: dist.ProcessGroup, shard_bytes: int, levels: TwoLevels | None
    ) -> None:
        """A narrowed gather over a process group is complete, within nodes too."""
        if self.ledger is None:
            return
        self.ledger.add_plain("all_gather", (process_group.size() - 1) * shard_bytes, process_group)
        if levels is not None:
            others = levels.within.size() - 1
            status = all_reduce_bytes(4, levels.within.size())
            sent_bytes = levels.across.size() * others * shard_bytes + status
            self.ledger.add_sent("all_gather", sent_bytes, levels.within)


@dataclass
class ReductionTelemetry:
    """Of the reduce-scatters of one parameter group: bytes and zeros for the ledger.

    Attributes:
        ledger: where bytes are counted; ``None``: nowhere.
    """

    ledger: Ledger | None = None

    @property
    def wants_zeros(self) -> bool:
        """Whether the encoder is to count the zeros among the contributions."""
        return self.ledger is not None and self.ledger.is_sampled

    def on_reduced(
        self,
        process_group: dist.ProcessGroup,
        levels: TwoLevels | None,
        *,
        row_bytes: int,
        num_values: int,
        payload_bytes: int,
        zeros: int | None,
    ) -> None:
        """A narrowed reduction over a process group is complete.

        Args:
            row_bytes: of the gradients that a rank gets.
            num_values: contributions, or sums of a node's, that this rank sent to others.
            payload_bytes: what it sent of them, without the sizes and the agreement.
            zeros: how many of them were zero; ``None`` where they were not counted.
        """
        ledger = self.ledger
        if ledger is None:
            return
        ledger.add_plain("reduce_scatter", (process_group.size() - 1) * row_bytes, process_group)
        agreement = all_reduce_bytes(4, process_group.size())
        ledger.add_sent("reduce_scatter", agreement, process_group)
        payload_group = process_group
        if levels is not None:
            payload_group, others = levels.across, levels.within.size() - 1
            check = all_reduce_bytes(16, levels.within.size())
            sent_bytes = levels.across.size() * others * row_bytes + check
            ledger.add_sent("reduce_scatter", sent_bytes, levels.within)
        sizes = 8 * (payload_group.size() - 1)
        ledger.add_sent("reduce_scatter", payload_bytes + sizes, payload_group)
        examined = 0 if zeros is None else num_values
        self.ledger.record_reduction(num_values, payload_bytes, examined, zeros or 0)
