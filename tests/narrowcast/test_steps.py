"""Steps of the optimizer: skipped by a rank, taken by another optimizer, or not announced."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from narrowcast import NarrowedModel, narrow_all_gather, narrow_reduce_scatter
from tests.narrowcast.autotune.test_controller import FAST, SLOW, on_a_link
from tests.narrowcast.autotune.test_gradient_controller import on_this_link
from tests.narrowcast.test_all_gather import COMPRESSIONS
from tests.narrowcast.training import local, same_bits
from tests.wide import wide_but

SOON_S = 60  # the machine may be busy; a rank that hangs does so for minutes


def _build(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    return model


def _backward(model: nn.Module, step: int) -> None:
    model(torch.full((2, 64), float(step + dist.get_rank()))).square().mean().backward()


@contextmanager
def _warnings() -> Iterator[list[str]]:
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, keep = logging.getLogger("narrowcast"), Keep(logging.WARNING)
    logger.addHandler(keep)
    try:
        yield messages
    finally:
        logger.removeHandler(keep)


def _state(model: nn.Module) -> list[Tensor]:
    return [local(parameter.detach()).clone() for parameter in model.parameters()]


def _skips_a_step(arguments: dict) -> bool:
    def trained(narrows: bool) -> list[Tensor]:
        model = _build()
        optimizer = torch.optim.AdamW(model.parameters())
        handles = []
        if narrows:
            handles.append(narrow_all_gather(model, optimizer, **arguments))
            handles.append(narrow_reduce_scatter(model, optimizer, compression="entropy"))
        for step in range(6):
            _backward(model, step)
            if (step, dist.get_rank()) not in ((2, 1), (4, 0)):
                optimizer.step()
            optimizer.zero_grad()
        for handle in handles:
            handle.remove()
        return _state(model)

    return same_bits(trained(True), trained(False))


@pytest.mark.parametrize("compression", ["delta", "exponent", "blocks-hash", "entropy", "none"])
def test_a_rank_that_skips_a_step_trains_on_as_under_baseline_fsdp(ranks, compression: str) -> None:
    assert ranks(2).run(_skips_a_step, COMPRESSIONS[compression]) == [True] * 2


def _skips_where_all_look(skipped: int, seconds_per_byte: float) -> None:
    model = _build()
    optimizer = torch.optim.AdamW(model.parameters())
    with on_a_link(seconds_per_byte):
        narrow_all_gather(model, optimizer, compression="auto", warmup_steps=3, reselect_interval=6)
        for step in range(16):
            _backward(model, step)
            if (step, dist.get_rank()) != (skipped, 1):
                optimizer.step()
            optimizer.zero_grad()


# Within the warm-up, and between two choices; where all shards are narrowed, and where none is.
@pytest.mark.parametrize(
    ("skipped", "link"),
    [
        pytest.param(1, SLOW, marks=pytest.mark.wide),
        (4, SLOW),
        pytest.param(4, FAST, marks=pytest.mark.wide),
    ],
)
def test_where_all_ranks_sample_shards_a_skipped_step_is_an_error_on_all(
    ranks, skipped: int, link: float
) -> None:
    outcomes = ranks(3).outcomes(_skips_where_all_look, skipped, link, timeout_s=SOON_S)
    assert {outcome.type for outcome in outcomes} == {"OutOfStepError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "a rank skipped optimizer.step()" in outcomes[0].message


def _skips_under(narrowed: list[Callable], skipped: list[int], is_async: bool = False) -> None:
    """Rank 1 skips these steps of the optimizer."""
    model = _build()
    optimizer = torch.optim.AdamW(model.parameters())
    with on_this_link(SLOW):
        for narrow in narrowed:
            narrow(model, optimizer)
        for step in range(16):
            if is_async:
                for layer in (model, *model):
                    layer.unshard(async_op=True)
            _backward(model, step)
            if dist.get_rank() != 1 or step not in skipped:
                optimizer.step()
            optimizer.zero_grad()


_OFTEN = {"compression": "auto", "warmup_steps": 3, "reselect_interval": 6}
_GRADIENTS = partial(narrow_reduce_scatter, **_OFTEN)
_GATHERS = partial(narrow_all_gather, **_OFTEN)
_FIXED_GATHERS = partial(narrow_all_gather, compression="delta")


# What is narrowed, in which order; the steps that rank 1 skips; whether gathers are asynchronous.
SKIPPED: dict[str, tuple[list[Callable], list[int], bool]] = {
    "within the warm-up": ([_GRADIENTS], [1], False),
    "asynchronous gathers": ([_GRADIENTS], [1], True),
    "two between choices": ([_GRADIENTS], [4, 6], False),
    "both": ([_GATHERS, _GRADIENTS], [1], False),
    "both, gradients first": ([_GRADIENTS, _GATHERS], [4, 6], False),
    "fixed gathers": ([_FIXED_GATHERS, _GRADIENTS], [4], False),
    "fixed gathers, gradients first": ([_GRADIENTS, _FIXED_GATHERS], [4], False),
}


@pytest.mark.parametrize(
    "case", wide_but(SKIPPED, "asynchronous gathers", "both, gradients first", "fixed gathers")
)
def test_where_gradients_are_chosen_a_skipped_step_is_an_error_on_all(ranks, case: str) -> None:
    narrowed, skipped, is_async = SKIPPED[case]
    outcomes = ranks(3).outcomes(_skips_under, narrowed, skipped, is_async, timeout_s=SOON_S)
    assert {outcome.type for outcome in outcomes} == {"OutOfStepError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "a rank skipped optimizer.step()" in outcomes[0].message


def _counted(handle: NarrowedModel) -> tuple[int, float]:
    return handle.ledger.steps, round(handle.ledger.last.first.bits_per_parameter, 3)


def _replaces_the_optimizer() -> tuple[int, list[str]]:
    model = _build()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = narrow_all_gather(model, optimizer, compression="delta")
    rounds = []
    with _warnings() as warnings:
        for step in range(9):
            if step in (3, 6):
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            _backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            prepared = [s.prepared for c in handle._comms for s in c.states.values()]
            rounds.append(all(one is not None for one in prepared))
    model(torch.ones(2, 64))
    steps = handle.ledger.steps
    handle.remove()
    assert rounds[-1]  # the new one's steps are announced as the old one's were
    return steps, warnings


def test_an_optimizer_that_replaces_the_first_is_followed_with_a_warning(ranks) -> None:
    for steps, warnings in ranks(2).run(_replaces_the_optimizer):
        assert steps == 9
        assert len(warnings) == 2  # one for each new optimizer
        assert all("it is followed from now on" in warning for warning in warnings)


def _replaces_where_only_gradients_are_narrowed() -> int:
    model = _build()
    handle = narrow_reduce_scatter(
        model, torch.optim.AdamW(model.parameters()), compression="entropy"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        _backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    steps = handle.ledger.steps
    handle.remove()
    return steps


def test_the_ledger_follows_where_only_gradients_are_narrowed(ranks) -> None:
    # Until the second step of the new one, the first may still be used beside it.
    assert ranks(2).run(_replaces_where_only_gradients_are_narrowed) == [4] * 2


def _two_optimizers() -> tuple[int, list[str]]:
    """One for each layer; the handle is given the one that steps last."""
    model = _build()
    first, last = (torch.optim.AdamW(layer.parameters()) for layer in model)
    handle = narrow_all_gather(model, last, compression="delta")
    with _warnings() as warnings:
        for step in range(6):
            _backward(model, step)
            for optimizer in (first, last):
                optimizer.step()
                optimizer.zero_grad()
    steps = handle.ledger.steps
    handle.remove()
    return steps, warnings


def test_several_optimizers_are_one_step(ranks) -> None:
    assert ranks(2).run(_two_optimizers) == [(6, [])] * 2


def _changes_parameters(announces: bool, arguments: dict) -> tuple[bool, list[str]]:
    """Weights are averaged after the optimizer's step."""

    def trained(narrows: bool) -> tuple[list[Tensor], list[str]]:
        model = _build()
        optimizer = torch.optim.AdamW(model.parameters())
        handle = narrow_all_gather(model, optimizer, **arguments) if narrows else None
        with _warnings() as warnings:
            for step in range(5):
                _backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
                for parameter in model.parameters():
                    local(parameter.data).mul_(0.9)
                if announces and handle is not None:
                    handle.refresh()
        if handle is not None:
            handle.remove()
        return _state(model), warnings

    (state, warnings), (plain, _) = trained(True), trained(False)
    return same_bits(state, plain), warnings


@pytest.mark.parametrize("compression", ["delta", "entropy"])
def test_the_first_unannounced_change_is_warned_of(ranks, compression: str) -> None:
    arguments = COMPRESSIONS[compression]
    for equal, warnings in ranks(2).run(_changes_parameters, False, arguments):
        assert equal
        assert len(warnings) == 1
        assert "call refresh() of the handle" in warnings[0]
    for equal, warnings in ranks(2).run(_changes_parameters, True, arguments):
        assert (equal, warnings) == (True, [])
