"""When the sizes of payloads are exchanged, and how: in one collective for all parameter groups."""

from collections.abc import Callable
from dataclasses import dataclass, field

from narrowcast.allgather.comm import NarrowAllGather
from narrowcast.attribution import counted_by_caller
from narrowcast.wire.exchange import largest_sizes


@dataclass
class Announcer:
    """Exchanges the sizes of what the ranks of a process group have prepared, in one collective
    among those that exchange payloads.

    It does so before the first gather of a forward, which every rank knows from the order of
    gathers.

    Attributes:
        comms: of the parameter groups that these ranks shard.
        on_forward: is called first; what it prepares is announced.
    """

    comms: list[NarrowAllGather]
    on_forward: Callable[[], None]
    _after_backward: bool = True
    _gathered: set[NarrowAllGather] = field(default_factory=set)

    def before(self, comm: NarrowAllGather) -> None:
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
        sizes = [state.next_size for state in states]
        first = comms[0]
        process_group = first.topology.payload_group(first.group.process_group)
        with counted_by_caller():
            largest = largest_sizes(sizes, process_group, first.group.device, first.wait)
        first.telemetry.on_small_all_reduce(8 * len(sizes), process_group)
        for state, size in zip(states, largest, strict=True):
            state.padded_size = size
