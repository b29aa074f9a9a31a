"""Whatever fails on one rank alone, and wherever: every rank raises the same named error, soon."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

import narrowcast
from narrowcast import NarrowcastError, failure
from narrowcast.allgather import api, observation
from tests.narrowcast.training import Setup, build, narrowed, train
from tests.ranks import Ranks

SOON_S = 10
_PACKAGE = str(Path(narrowcast.__file__).parent)
Place = tuple[str, int]  # a file of the package, and a line of it

GRADIENTS = {"treatment": "coded"}
SCENARIOS = {
    "value": {"treatment": "value", "verify_interval": 2},
    "auto": {"treatment": "auto", "warmup_steps": 3, "reselect_interval": 2},
    "observe": {"treatment": "observe", "warmup_steps": 3, "reselect_interval": 2},
    "difference": {"treatment": "exponent"},
    "blocks": {"treatment": "exponent", "exponent_exchange": "blocks"},
    "hashes": {"treatment": "exponent", "exponent_exchange": "blocks", "block_check": "hash"},
    "coded": {"treatment": "coded"},
    "raw": {"treatment": "raw"},
}
HSDP = {"replicas": 2, "async_unshard": True}


@contextmanager
def _tracing(on_place: Callable[[Place], None], every_line: bool) -> Iterator[None]:
    """Calls ``on_place`` for each function of the package, or each line, that is run where its
    exceptions are everybody's. What it raises is raised there."""
    together = failure.Job.together
    depth = 0

    @contextmanager
    def counted(*args: Any) -> Iterator[None]:
        nonlocal depth
        with together(*args):
            depth += 1
            try:
                yield
            finally:
                depth -= 1

    def trace(frame: FrameType, event: str, _: Any) -> Callable | None:
        if not depth or not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == ("line" if every_line else "call"):
            on_place((frame.f_code.co_filename, frame.f_lineno))
        return trace if every_line else None

    failure.Job.together = counted
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        failure.Job.together = together


def _train(setup: Setup, around: Callable = lambda: _tracing(lambda _: None, False)) -> None:
    model, optimizer = build(setup)
    with narrowed(setup, model, optimizer), around():
        train(setup, model, optimizer)


def _places(setup: Setup, every_line: bool) -> list[Place]:
    """All that are passed in training, in the order in which they are first passed."""
    places: dict[Place, None] = {}
    _train(setup, lambda: _tracing(lambda place: places.update({place: None}), every_line))
    return list(places)


def _fail_at(place: Place, every_line: bool, setup: Setup) -> tuple[str, str, float]:
    """The error of this rank, and when it came, where the last rank alone has no memory there."""

    def fail(passed: Place) -> None:
        if passed == place and dist.get_rank() == dist.get_world_size() - 1:
            raise MemoryError("none left")

    start = time.monotonic()
    try:
        _train(setup, lambda: _tracing(fail, every_line))
    except NarrowcastError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "no error", 0.0


def _fail_everywhere(
    setup: Setup, every_line: bool, folder: str
) -> list[tuple[Place, tuple[str, str, float]]]:
    """A fresh model and fresh process groups for each place."""
    failure._GRACE_S = 0.2
    rank, world_size = dist.get_rank(), dist.get_world_size()
    patched = pytest.MonkeyPatch()
    patched.setattr(api, "Observer", partial(observation.Observer, share=1e9))
    found = []

    def start_anew(name: str) -> None:
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{name}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=3 * SOON_S),
        )

    start_anew("first")
    places = [_places(setup, every_line)]
    dist.broadcast_object_list(places, src=world_size - 1)
    for number, place in enumerate(places[0]):
        start_anew(str(number))
        found.append((place, _fail_at(place, every_line, setup)))
    return found


def _assert_all_alike(setup: Setup, ranks: int, every_line: bool) -> int:
    """How many places there were."""
    with tempfile.TemporaryDirectory() as folder:
        job = Ranks(ranks)
        try:
            by_rank = job.run(_fail_everywhere, setup, every_line, folder)
        finally:
            job.end()
    for of_place in zip(*by_rank, strict=True):
        (place, first), *_ = of_place
        for _, (kind, message, seconds) in of_place:
            assert (kind, message) == first[:2], (place, of_place)
            assert "none left" in message, (place, message)
            assert seconds < SOON_S, (place, seconds)
    return len(by_rank[0])


@pytest.mark.parametrize("scenario", ["value", "auto"])
def test_a_rank_that_fails_in_any_function_ends_all_with_its_error(scenario: str) -> None:
    steps = 5 if scenario == "auto" else 2
    setup = Setup(narrow=SCENARIOS[scenario], gradients=GRADIENTS, steps=steps)
    assert _assert_all_alike(setup, ranks=2, every_line=False) > 40


@pytest.mark.wide
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_rank_that_fails_at_any_line_ends_all_with_its_error(scenario: str) -> None:
    steps = 5 if scenario in ("auto", "observe") else 2
    setup = Setup(narrow=SCENARIOS[scenario], gradients=GRADIENTS, steps=steps)
    assert _assert_all_alike(setup, ranks=2, every_line=True) > 150
