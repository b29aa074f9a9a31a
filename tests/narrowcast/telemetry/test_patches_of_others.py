"""Counting works beside tools that replace the same functions of torch, in any order."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.distributed import distributed_c10d as c10d

from narrowcast.telemetry.ledger import Ledger

OWN = dist.all_reduce  # imported by value, before anybody replaces it
SENT = 24  # bytes that a rank of four sends of 16
PLACES = {"dist": (dist,), "c10d": (c10d,), "both": (dist, c10d)}


@pytest.fixture(autouse=True)
def _rank_1_of_4() -> Iterator[None]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=4)
    yield
    left = dist.all_reduce, c10d.all_reduce
    dist.all_reduce = c10d.all_reduce = OWN
    dist.destroy_process_group()
    assert left == (OWN, OWN)


@dataclass
class Tool:
    """Puts a function of its own, of any arguments, in the place of all-reduces, and leaves.

    Attributes:
        calls: what its function calls: what it found, or the function of the other module, which
            it takes for torch's own.
        puts_back: what it found, or torch's own function.
    """

    places: tuple[Any, ...]
    calls: str
    puts_back: str
    seen: int = 0
    _found: list[Callable] = field(default_factory=list)

    def enter(self) -> None:
        self._found = [place.all_reduce for place in self.places]
        for place, found in zip(self.places, self._found, strict=True):
            place.all_reduce = self._function(place, found)

    def leave(self) -> None:
        for place, found in zip(self.places, self._found, strict=True):
            place.all_reduce = found if self.puts_back == "found" else OWN

    def _function(self, place: Any, found: Callable) -> Callable:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            if self.calls == "the other":
                return (c10d if place is dist else dist).all_reduce(*args, **kwargs)
            return found(*args, **kwargs)

        return noted


KINDS = [
    (place, calls, puts_back)
    for place, calls, puts_back in itertools.product(
        PLACES, ("found", "the other"), ("found", "own")
    )
    if (place, calls) != ("both", "the other")  # would call itself
]
EVENTS = ("start", "stop", "enter", "leave")
ORDERS = [
    order
    for order in itertools.permutations(EVENTS)
    if order.index("start") < order.index("stop") and order.index("enter") < order.index("leave")
]


def _sent(ledger: Ledger, place: Any) -> int:
    before = ledger.current.sent["other"]
    place.all_reduce(torch.zeros(4))
    return ledger.current.sent["other"] - before


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
@pytest.mark.parametrize(("place", "calls", "puts_back"), KINDS)
def test_a_tool_and_counting_start_and_end_in_any_order(
    order: tuple[str, ...], place: str, calls: str, puts_back: str
) -> None:
    """Each call reaches torch once, is seen by the tool if it is there, and counted once if we are;
    and in the end each module has its own function again."""
    ledger, tool = Ledger(), Tool(PLACES[place], calls, puts_back)
    act = {"start": ledger.start, "stop": ledger.stop, "enter": tool.enter, "leave": tool.leave}
    entered = counting = taken_off = False
    for event in order:
        act[event]()
        entered = event == "enter" or (entered and event != "leave")
        counting = event == "start" or (counting and event != "stop")
        # A tool that puts back torch's own function, which it found or not, takes off ours.
        puts_back_own = puts_back == "own" or order.index("enter") < order.index("start")
        taken_off = taken_off or (event == "leave" and counting and puts_back_own)
        for module in (dist, c10d):
            seen = tool.seen
            sent = _sent(ledger, module)
            is_replaced = module in tool.places
            assert tool.seen - seen == (entered and is_replaced), (event, module.__name__)
            if not (taken_off and is_replaced):
                assert sent == (SENT if counting else 0), (event, module.__name__)
    assert (dist.all_reduce, c10d.all_reduce) == (OWN, OWN)


@pytest.mark.parametrize("first_to_stop", [0, 1])
@pytest.mark.parametrize(
    # Before which event. A tool that was there before us and leaves amid us takes ours off.
    ("enters", "leaves"),
    [(0, 1), (0, 4), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)],
)
def test_several_ledgers_count_alike_whenever_a_tool_starts_and_ends(
    enters: int, leaves: int, first_to_stop: int
) -> None:
    ledgers = [Ledger(), Ledger()]
    tool = Tool((dist,), "found", "found")
    events: list[Callable[[], None]] = [ledgers[0].start, ledgers[1].start]
    events += [ledgers[first_to_stop].stop, ledgers[1 - first_to_stop].stop]
    for index, event in enumerate(events):
        if index == enters:
            tool.enter()
        if index == leaves:
            tool.leave()
        event()
        running = [ledger for ledger in ledgers if ledger._stop_counting is not None]
        before = [ledger.current.sent["other"] for ledger in ledgers]
        dist.all_reduce(torch.zeros(4))
        for ledger, sent in zip(ledgers, before, strict=True):
            counted = ledger.current.sent["other"] - sent
            assert counted == (SENT if ledger in running else 0)
    if leaves == len(events):
        tool.leave()
    dist.all_reduce(torch.zeros(4))  # takes ours out, where the tool has put it back


def test_counting_starts_again_above_a_tool_that_came_in_between() -> None:
    ledger, tool = Ledger(), Tool((dist,), "found", "found")
    ledger.start()
    tool.enter()
    ledger.stop()
    for _ in range(3):
        ledger.start()
        assert _sent(ledger, dist) == SENT
        ledger.stop()
        assert _sent(ledger, dist) == 0
    assert tool.seen == 6
    tool.leave()
    ledger.start()  # finds what was ours, and stays with it
    assert _sent(ledger, dist) == SENT
    ledger.stop()


def test_what_a_tool_removed_is_counted_again_when_the_next_ledger_starts() -> None:
    first, second = Ledger(), Ledger()
    first.start()
    dist.all_reduce = OWN
    assert _sent(first, dist) == 0
    second.start()
    assert _sent(first, dist) == SENT
    first.stop()
    second.stop()


def test_the_counting_function_imported_by_value_only_calls_torchs_once_nobody_counts() -> None:
    ledger = Ledger()
    ledger.start()
    by_value = dist.all_reduce
    assert by_value is not OWN
    ledger.stop()
    by_value(torch.zeros(4))
    assert not ledger.current.sent
    ledger.start()
    by_value(torch.zeros(4))
    assert ledger.current.sent == {"other": SENT}
    ledger.stop()


def test_arguments_that_torch_does_not_know_are_the_tools_to_judge() -> None:
    def tagged(tensor: torch.Tensor, tag: str) -> str:
        dist.distributed_c10d.all_reduce(tensor)
        return tag

    ledger = Ledger()
    dist.all_reduce = tagged
    ledger.start()
    assert dist.all_reduce(torch.zeros(4), tag="mine") == "mine"
    assert ledger.current.sent == {"other": SENT}
    with pytest.raises(TypeError, match="tag"):
        dist.all_reduce(torch.zeros(4))
    ledger.stop()
    assert dist.all_reduce is tagged
    dist.all_reduce = OWN
