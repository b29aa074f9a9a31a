"""What is cached from call to call does not depend on the mode in which it was made."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from narrowcast import narrow_all_gather
from tests.narrowcast.test_all_gather import COMPRESSIONS
from tests.narrowcast.training import DIM, Setup, build, same_bits, state_of, train

SETUP = Setup(steps=3)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": _deterministic,
    "default device": lambda: torch.device("meta"),
    "default dtype": _default_dtype,
    "dispatch mode": lambda: FlopCounterMode(display=False),
}


def _evaluate(model: torch.nn.Module, mode: str, calls: int) -> list[Tensor]:
    x_TD = torch.linspace(-1, 1, 7 * DIM).view(7, DIM)
    with MODES[mode](), torch.no_grad():
        return [model(x_TD).clone() for _ in range(calls)]


def _trains_as_plain(mode: str, arguments: dict, steps_before: int) -> bool:
    """Evaluates in a mode before training, and in the middle of it."""

    def trained(narrows: bool) -> list[Tensor]:
        model, optimizer = build(SETUP)
        train(SETUP, model, optimizer)  # FSDP2 itself cannot be used first under inference mode
        handle = narrow_all_gather(model, optimizer, **arguments) if narrows else None
        seen = []
        for _ in range(2):
            seen += _evaluate(model, mode, calls=2)
            train(SETUP, model, optimizer)
            if handle is not None and steps_before:
                handle.reset()  # caches are filled in the mode again
        if handle is not None:
            handle.remove()
        return seen + state_of(model, optimizer)

    return same_bits(trained(True), trained(False))


# Hashes are made by the most operations of torch; values are cached as they were gathered.
@pytest.mark.parametrize(
    ("mode", "compression"),
    [
        *((mode, "blocks-hash") for mode in MODES if mode != "default device"),
        *(("inference", "delta"), ("autocast", "delta")),
    ],
)
def test_caches_first_filled_in_a_mode_serve_outside_of_it(ranks, mode, compression) -> None:
    assert ranks(2).run(_trains_as_plain, mode, COMPRESSIONS[compression], 1) == [True] * 2


@pytest.mark.wide
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "default device"])
def test_every_compression_in_every_mode(ranks, mode: str, compression: str) -> None:
    assert ranks(2).run(_trains_as_plain, mode, COMPRESSIONS[compression], 0) == [True] * 2


def _gathers_under_a_default_device(arguments: dict) -> bool:
    """The model itself cannot compute there, but its parameters are gathered."""

    def gathered(narrows: bool) -> list[Tensor]:
        model, optimizer = build(SETUP)
        handle = narrow_all_gather(model, optimizer, **arguments) if narrows else None
        with MODES["default device"]():
            optimizer.step()
            model.unshard()
            values = [parameter.detach().clone() for parameter in model[2].parameters()]
            model.reshard()
        train(SETUP, model, optimizer)
        if handle is not None:
            handle.remove()
        return values + state_of(model, optimizer)

    return same_bits(gathered(True), gathered(False))


def _narrows_by_measurement_under_a_default_device() -> bool:
    model, optimizer = build(SETUP)
    with MODES["default device"]():
        handle = narrow_all_gather(model, optimizer, compression="auto", warmup_steps=3)
        for _ in range(4):
            optimizer.step()
    chosen = handle.selection.step == 4
    handle.remove()
    return chosen


def test_caches_serve_in_every_mode_where_shards_are_sampled(ranks) -> None:
    assert ranks(2).run(_narrows_by_measurement_under_a_default_device) == [True] * 2


@pytest.mark.parametrize("compression", ["delta", "blocks-hash", "entropy"])
def test_a_default_device_is_not_ours(ranks, compression: str) -> None:
    assert ranks(2).run(_gathers_under_a_default_device, COMPRESSIONS[compression]) == [True] * 2
