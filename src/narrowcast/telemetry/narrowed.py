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
            self.ledger.add("all_gather", sent_bytes, plain_bytes=0)

    def on_gathered(
        self,
        group: ParamGroup,
        process_group: dist.ProcessGroup,
        *,
        num_values: int,
        shard_bytes: int,
        sent_bytes: int,
        changes: dict[str, Changes],
    ) -> None:
        """A narrowed gather is complete.

        Args:
            num_values, shard_bytes: of a shard.
            sent_bytes: what this rank sent to each other rank.
            changes: by kind of shard, where ``wants_changes`` asked for them.
        """
        if self.ledger is not None:
            others = process_group.size() - 1
            self.ledger.add("all_gather", others * sent_bytes, others * shard_bytes)
            self.ledger.record_gather(group, num_values, sent_bytes, changes)


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
        *,
        num_values: int,
        itemsize: int,
        payload_bytes: int,
        zeros: int | None,
    ) -> None:
        """A narrowed reduction is complete.

        Args:
            num_values: contributions that this rank sent to others, of ``itemsize`` bytes each.
            payload_bytes: what it sent of them, without the sizes and the agreement.
            zeros: how many of them were zero; ``None`` where they were not counted.
        """
        if self.ledger is None:
            return
        others = process_group.size() - 1
        sizes_and_agreement = 8 * others + all_reduce_bytes(4, process_group.size())
        sent_bytes = payload_bytes + sizes_and_agreement
        self.ledger.add("reduce_scatter", sent_bytes, num_values * itemsize)
        examined = 0 if zeros is None else num_values
        self.ledger.record_reduction(num_values, payload_bytes, examined, zeros or 0)
