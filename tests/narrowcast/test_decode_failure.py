"""A rank that alone cannot decode, or has no memory left for it: all raise its error, soon, and
process groups are afterwards as ``narrowcast.errors`` says."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from narrowcast import NarrowcastError, errors
from narrowcast.allgather import codec
from narrowcast.allgather.offload import ShardCache
from narrowcast.fsdp2 import ParamGroup
from narrowcast.reducescatter import codec as gradient_codec
from narrowcast.wire.coders import CoderError
from tests.narrowcast.test_failure import SOON_S, start_anew
from tests.narrowcast.training import Setup, build, narrowed, train
from tests.ranks import Ranks

NARROWED: dict[str, Any] = {
    "narrow": {"compression": "delta"},
    "gradients": {"compression": "entropy"},
}
SETUP = Setup(**NARROWED, steps=2)
ASYNC = Setup(**NARROWED, steps=2, async_unshard=True, prefetch=True)
# Each with what fails, and whether all ranks agree on the outcome anyhow, so that nobody is ended.
PLACES: dict[str, tuple[Setup, Any, str, bool]] = {
    "a gather": (SETUP, codec, "decode", False),
    "the wait for a gather": (ASYNC, codec, "decode", False),
    "a cache": (SETUP, ShardCache, "store", False),
    "a reduction": (SETUP, gradient_codec, "decode_into", True),
    "refresh()": (SETUP, ParamGroup, "shard", False),
}
ERRORS = {
    "OutOfMemoryError": (torch.OutOfMemoryError, "NarrowcastError"),
    "MemoryError": (MemoryError, "NarrowcastError"),
    "CoderError": (CoderError, "PayloadError"),
}


@dataclass(frozen=True)
class Ended:
    """How a rank ended: with which error, after how long, and whether it can go on."""

    kind: str
    message: str
    seconds: float
    is_over: bool
    groups_work: bool


@contextmanager
def _failing(where: Any, name: str, error: type[Exception]) -> Iterator[None]:
    """On rank 1 alone, what is called so raises the error."""
    if dist.get_rank() != 1:
        yield
        return

    def fail(*_: Any, **__: Any) -> None:
        raise error("none left")

    with patch.object(where, name, fail):
        yield


def _groups_work() -> bool:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return False
    return True


def _fail(place: str, error: type[Exception]) -> Ended:
    setup, where, name, _ = PLACES[place]
    model, optimizer = build(setup)
    with narrowed(setup, model, optimizer) as (handle, _):
        train(setup, model, optimizer)  # caches are warm
        start = time.monotonic()
        ended = ("", "no error")
        try:
            with _failing(where, name, error):
                if place == "refresh()":
                    handle.refresh()
                else:
                    train(setup, model, optimizer)
            train(setup, model, optimizer)
        except NarrowcastError as raised:
            ended = (type(raised).__name__, str(raised))
        seconds = time.monotonic() - start
    return Ended(*ended, seconds, errors.job_of(None).error is not None, _groups_work())


def _fail_everywhere(folder: str) -> dict[tuple[str, str], Ended]:
    found = {}
    for place in PLACES:
        for name, (error, _) in ERRORS.items():
            start_anew(folder, f"{place} {name}")
            found[place, name] = _fail(place, error)
    return found


@pytest.fixture(scope="module")
def ended() -> list[dict[tuple[str, str], Ended]]:
    """By rank, of every place and every error."""
    with tempfile.TemporaryDirectory() as folder:
        job = Ranks(2)
        try:
            return job.run(_fail_everywhere, folder)
        finally:
            job.end()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_all_ranks_raise_the_error_of_the_one_that_fails_alone(
    ended: list[dict[tuple[str, str], Ended]], place: str, error: str
) -> None:
    one, other = (by_rank[place, error] for by_rank in ended)
    assert max(one.seconds, other.seconds) < 2 * SOON_S  # of 3, after which groups time out
    assert (one.kind, one.message) == (other.kind, other.message)
    if place == "refresh()" and error == "OutOfMemoryError":
        # There is time until the gather, which encodes again.
        assert one.message == "no error"
        assert [(rank.is_over, rank.groups_work) for rank in (one, other)] == [(False, True)] * 2
        return
    _, kind = ERRORS[error]
    assert one.kind == ("NarrowcastError" if place == "refresh()" else kind)
    assert "none left" in one.message
    assert "rank 1" in one.message
    *_, agrees_anyhow = PLACES[place]
    for rank in (one, other):
        assert (rank.is_over, rank.groups_work) == (not agrees_anyhow, agrees_anyhow)
