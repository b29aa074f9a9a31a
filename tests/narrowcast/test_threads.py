"""Autograd may run backward in threads of its own: bits, counts and errors are the same there."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowcast import NarrowcastError
from narrowcast.allgather import codec
from narrowcast.fsdp2 import param_groups
from narrowcast.reducescatter.comm import NarrowReduceScatter
from narrowcast.telemetry.counted import count_volume
from narrowcast.telemetry.ledger import Ledger
from narrowcast.telemetry.step_volume import StepVolume
from tests.narrowcast.moe.moe_layer import Levels, deduplicated, levels_of_four, random_layer
from tests.narrowcast.training import Setup, build, narrowed, same_bits, state_of, train

SOON_S = 60
NARROWED: dict[str, Any] = {
    "narrow": {"compression": "delta", "verify_interval": 2},
    "gradients": {"compression": "entropy"},
}
SETUPS = {
    "baseline": Setup(),
    "narrowed": Setup(**NARROWED),
    "recomputed": Setup(**NARROWED, checkpointing=True),
    "async": Setup(**NARROWED, async_unshard=True, prefetch=True),
    "accumulated": Setup(**NARROWED, microbatches=2, synced=False),
}


@contextmanager
def _backward_in_own_thread() -> Iterator[None]:
    """Every backward runs in a thread of its own, as autograd's nodes of a GPU do. What is raised
    there is raised here."""
    backward = Tensor.backward

    def in_own_thread(*args: Any) -> None:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="backward") as executor:
            executor.submit(backward, *args).result()

    with patch.object(Tensor, "backward", in_own_thread):
        yield


def _is_in_backward() -> bool:
    return threading.current_thread().name.startswith("backward")


def _trained(setup: Setup) -> tuple[list[float], list[Tensor], list[StepVolume], set[bool]]:
    """Losses, states, what each step sent, and whether backward had its own thread."""
    model, optimizer = build(setup)
    places: set[bool] = set()

    def show_place(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(lambda _: places.add(_is_in_backward()))

    volumes: list[StepVolume] = []
    with narrowed(setup, model, optimizer):
        counted = count_volume(param_groups(model), optimizer)
        model.register_forward_hook(show_place)
        optimizer.register_step_post_hook(lambda *_: volumes.append(counted.ledger.last))
        losses = train(setup, model, optimizer)
        counted.remove()
    return losses, state_of(model, optimizer), volumes, places


def _differing(setup: Setup) -> list[str]:
    assert torch.autograd.is_multithreading_enabled()
    losses, states, volumes, places = _trained(setup)
    with _backward_in_own_thread():
        other_losses, other_states, other_volumes, other_places = _trained(setup)
    assert (places, other_places) == ({False}, {True})
    assert len(volumes) == setup.steps
    assert all(volume.sent["reduce_scatter"] > 0 for volume in volumes)
    same = {
        "losses": losses == other_losses,
        "states": same_bits(states, other_states),
        "counts": volumes == other_volumes,
    }
    return [name for name, is_same in same.items() if not is_same]


@pytest.mark.parametrize("name", SETUPS)
def test_backward_in_another_thread_trains_and_is_counted_the_same(ranks, name: str) -> None:
    assert ranks(2).run(_differing, SETUPS[name]) == [[]] * 2


def _fail_in_backward(of: str) -> None:
    """On rank 1 alone, a gather, or a reduction, of a backward in its own thread."""
    setup = Setup(**NARROWED)
    decode = codec.decode
    exchange = NarrowReduceScatter._exchange

    def fail(original: Any, *args: Any) -> Any:
        if dist.get_rank() == 1 and _is_in_backward():
            raise torch.OutOfMemoryError("none left")
        return original(*args)

    patched = {
        "gather": patch.object(codec, "decode", lambda *args: fail(decode, *args)),
        "reduction": patch.object(
            NarrowReduceScatter, "_exchange", lambda *args: fail(exchange, *args)
        ),
    }[of]
    model, optimizer = build(setup)
    with narrowed(setup, model, optimizer), patched, _backward_in_own_thread():
        train(setup, model, optimizer)


@pytest.mark.parametrize("of", ["gather", "reduction"])
def test_a_rank_that_fails_in_the_thread_of_backward_ends_all_with_its_error(
    ranks, of: str
) -> None:
    outcomes = ranks(2).outcomes(_fail_in_backward, of, timeout_s=SOON_S)
    assert {outcome.type for outcome in outcomes} == {NarrowcastError.__name__}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "rank 1" in outcomes[0].message
    assert "OutOfMemoryError: none left" in outcomes[0].message


def _tokens_differ() -> list[bool]:
    """Results and counts of a layer whose tokens are deduplicated."""
    layer = random_layer([9, 5, 1, 7], num_experts=8, top_k=3)

    def run(levels: Levels) -> tuple[list[Tensor], list[tuple], StepVolume]:
        ledger, counted = Ledger(), []
        ledger.start()
        results = deduplicated(
            layer, levels, dist.get_rank(), count=lambda *crossed: counted.append(crossed)
        )
        ledger.stop()
        return list(results.values()), counted, ledger.current

    found = []
    for levels in levels_of_four().values():
        results, *counts = run(levels)
        with _backward_in_own_thread():
            other_results, *other_counts = run(levels)
        found.append(not same_bits(results, other_results) or counts != other_counts)
    return found


def test_tokens_come_back_in_another_thread_the_same(ranks) -> None:
    assert ranks(4).run(_tokens_differ) == [[False, False]] * 4
