"""Parameters that change unannounced are noticed, whatever changed them."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from narrowcast import NarrowedModel, narrow_all_gather
from narrowcast.fsdp2 import param_groups
from narrowcast.wire.packet import header_size
from tests.narrowcast.test_all_gather import COMPRESSIONS
from tests.narrowcast.training import Setup, build, local, narrow, same_bits, state_of, train


def _edit_on_one_rank(model: nn.Module, handle: NarrowedModel | None) -> None:
    if dist.get_rank() == 1:
        for parameter in model.parameters():
            local(parameter.data).data.mul_(1.5)


def _edit_special_values(model: nn.Module, handle: NarrowedModel | None) -> None:
    specials = torch.tensor([-0.0, 1e-40, -3e-39, 1.0])
    for parameter in model.parameters():
        flat = local(parameter.detach()).view(-1)
        flat[: len(specials)] = specials[: len(flat)]


def _initialize_again(model: nn.Module, handle: NarrowedModel | None) -> None:
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).normal_(std=0.1)


def _load_state_dict(model: nn.Module, handle: NarrowedModel | None) -> None:
    state = {name: value.clone().mul_(0.5) for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def _refresh(model: nn.Module, handle: NarrowedModel | None) -> None:
    _initialize_again(model, handle)
    if handle is not None:
        handle.refresh()


def _reset(model: nn.Module, handle: NarrowedModel | None) -> None:
    if handle is not None:
        handle.reset()


def _evaluate(model: nn.Module, handle: NarrowedModel | None) -> None:
    with torch.no_grad():
        model(torch.ones(3, 24))


CHANGES = [
    _edit_on_one_rank,
    _edit_special_values,
    _initialize_again,
    _load_state_dict,
    _refresh,
    _reset,
    _evaluate,
]


def _trained_around(change: Callable, compression: dict | None) -> tuple[list[float], list]:
    setup = Setup(narrow=compression, steps=3)
    model, optimizer = build(setup)
    handle = narrow(setup, model, optimizer)[0] if compression else None
    losses = train(setup, model, optimizer)
    change(model, handle)
    losses += train(setup, model, optimizer, first_step=3)
    state = state_of(model, optimizer)
    if handle is not None:
        handle.remove()
    return losses, state


def _differing(change: Callable) -> list[str]:
    plain_losses, plain_state = _trained_around(change, None)
    differing = []
    for name in ("delta", "exponent", "blocks-hash", "entropy"):
        losses, state = _trained_around(change, COMPRESSIONS[name])
        if losses != plain_losses or not same_bits(state, plain_state):
            differing.append(name)
    return differing


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_training_goes_on_as_plain_after(ranks, change: Callable) -> None:
    assert ranks(2).run(_differing, change) == [[]] * 2


def _gathered_special_values() -> bool:
    """Every NaN payload, -0, infinity and subnormal of bf16, gathered as it is."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    model = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    same = []
    for name in ("delta", "exponent", "blocks-hash", "entropy"):
        handle = narrow_all_gather(model, **COMPRESSIONS[name])
        for shift in (0, 0, 1, 12345):
            expected = patterns.roll(shift).view(256, 256)
            shard = local(model.weight.detach())
            rows = slice(dist.get_rank() * len(shard), (dist.get_rank() + 1) * len(shard))
            shard.view(torch.int16).copy_(expected[rows].view(torch.int16))
            model.unshard()
            same.append(torch.equal(model.weight.view(torch.int16), expected.view(torch.int16)))
            model.reshard()
        handle.remove()
    return all(same)


def test_every_bf16_pattern_is_gathered_as_it_is(ranks) -> None:
    assert ranks(4).run(_gathered_special_values) == [True] * 4


def _later_bits_and_groups() -> tuple[int, int]:
    setup = Setup(narrow=COMPRESSIONS["delta"])
    model, optimizer = build(setup)
    handle, volumes = narrow(setup, model, optimizer)
    train(setup, model, optimizer)
    handle.remove()
    return volumes[-1].later.bits, len(param_groups(model))


def test_an_unchanged_delta_shard_sends_its_header_alone(ranks) -> None:
    for bits, num_groups in ranks(4).run(_later_bits_and_groups):
        assert bits == 8 * header_size(1) * num_groups
