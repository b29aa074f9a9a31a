"""When the sizes of payloads are exchanged, and how: in one collective for all parameter groups."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from narrowcast.attribution import CALLER, counted_as
from narrowcast.telemetry.ledger import all_reduce_bytes
from narrowcast.wire.exchange import largest_sizes

if TYPE_CHECKING:
    from narrowcast.allgather.comm import NarrowAllGather


@dataclass
class Announcer:
    """Exchanges the sizes of what the ranks of a process group have prepared, in one collective.

    It is due at the first gather of a forward, which every rank knows from the order of gathers.

    Attributes:
        comms: of the parameter groups that these ranks shard.
        on_forward: is called first; what it prepares is announced.
    """

    comms: list["NarrowAllGather"]
    on_forward: Callable[[], None]
    _after_backward: bool = True
    _gathered: set["NarrowAllGather"] = field(default_factory=set)

    def before(self, comm: "NarrowAllGather") -> None:
        """A group is about to be gathered."""
        if comm.group.in_backward:
            self._after_backward = True
            return
        if self._after_backward or comm in self._gathered:
            self._after_backward = False
            self._gathered.clear()
            self.on_forward()
            self._announce()
        self._gathered.add(comm)

    def _announce(self) -> None:
        comms = [comm for comm in self.comms if comm.schemes is not None]
        if not comms:
            return
        states = [comm.whole_state() for comm in comms]
        first, ledger = comms[0], comms[0].ledger
        process_group = first.group.process_group
        with counted_as(CALLER):
            sizes = [state.next_size for state in states]
            largest = largest_sizes(sizes, process_group, first.group.device, first.waits)
        if ledger is not None:
            sent_bytes = all_reduce_bytes(8 * len(sizes), process_group.size())
            ledger.add("all_gather", sent_bytes, plain_bytes=0)
        for state, size in zip(states, largest, strict=True):
            state.padded_size = size
