"""What one model of a process sends is in no other model's ledger."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from narrowcast import narrow_all_gather, narrow_reduce_scatter
from narrowcast.fsdp2 import param_groups
from narrowcast.telemetry.counted import count_volume
from narrowcast.telemetry.ledger import all_reduce_bytes
from narrowcast.telemetry.step_volume import StepVolume
from tests.narrowcast.training import DIM, Setup, build, train

TEACHERS: dict[str, Callable[[Any, Any], Any]] = {
    "baseline FSDP2": lambda model, optimizer: None,
    "counted": lambda model, optimizer: count_volume(param_groups(model), optimizer),
    "delta": lambda model, optimizer: narrow_all_gather(model, optimizer, compression="delta"),
    "delta, not counted": lambda model, optimizer: narrow_all_gather(
        model, optimizer, compression="delta", volume=False
    ),
    "some of it, not counted": lambda model, optimizer: narrow_all_gather(
        model, optimizer, compression="delta", parameters=["0.*"], volume=False, verify_interval=1
    ),
    "auto": lambda model, optimizer: narrow_all_gather(model, optimizer, warmup_steps=3),
    "auto, not counted": lambda model, optimizer: narrow_all_gather(
        model, optimizer, warmup_steps=3, volume=False
    ),
    "gradients": lambda model, optimizer: narrow_reduce_scatter(
        model, optimizer, compression="entropy"
    ),
    "gradients, not counted": lambda model, optimizer: narrow_reduce_scatter(
        model, optimizer, compression="entropy", volume=False
    ),
}
SETUPS = {
    "FSDP": Setup(steps=4),
    "HSDP": Setup(steps=4, replicas=2, reshard=False),
}


def _steps_beside(teacher: str | None, setup: Setup) -> list[StepVolume]:
    """What a counted model is said to send, step by step, while another is made and trained."""
    model, optimizer = build(setup)
    counted = count_volume(param_groups(model), optimizer)
    handle = None
    if teacher is not None:
        other, others_optimizer = build(setup)
        handle = TEACHERS[teacher](other, others_optimizer)
    steps = []
    for step in range(setup.steps):
        train(Setup(**{**setup.__dict__, "steps": 1}), model, optimizer, step)
        if teacher is not None:
            train(Setup(**{**setup.__dict__, "steps": 1}), other, others_optimizer, step)
        steps.append(counted.ledger.last)
    steps.append(counted.ledger.current)  # what was sent since
    if handle is not None:
        handle.remove()
    counted.remove()
    return steps


@pytest.mark.parametrize(
    ("teacher", "kind"),
    [
        *((teacher, "FSDP") for teacher in TEACHERS),
        ("baseline FSDP2", "HSDP"),
        ("auto, not counted", "HSDP"),
    ],
)
def test_another_model_of_the_process_is_not_counted(ranks, teacher: str, kind: str) -> None:
    """Its gathers, reductions, announcements, agreement, calibration, watching, nor HSDP's."""
    world = ranks(4 if kind == "HSDP" else 2)
    alone = world.run(_steps_beside, None, SETUPS[kind])
    beside = world.run(_steps_beside, teacher, SETUPS[kind])
    assert beside == alone
    for steps in alone:
        assert all(step.sent["all_gather"] > 0 for step in steps[:-1])


def _hsdp() -> tuple[list[dict[str, int]], int]:
    """What two narrowed models of two replicas send, each; and what HSDP's all-reduces take."""
    setup = Setup(steps=1, replicas=2)
    models = [build(setup) for _ in range(2)]
    handles = [
        narrow_all_gather(*models[0], compression="delta"),
        narrow_reduce_scatter(*models[1], compression="entropy"),
    ]
    for model, optimizer in 2 * models:  # between two steps of each is one of the other
        train(setup, model, optimizer)
    shards = sum(4 * sum(group.numels) for group in param_groups(models[0][0]))
    sent = [dict(handle.ledger.last.sent) for handle in handles]
    for handle in handles:
        handle.remove()
    return sent, all_reduce_bytes(shards, 2)


def test_the_all_reduce_of_hsdp_is_its_own_models_alone(ranks) -> None:
    for sent, expected in ranks(4).run(_hsdp):
        assert [one["other"] for one in sent] == [expected, expected]


def _without_all_reduce() -> list[int]:
    """``other`` after a backward that reduces nothing over replicas, and an all-reduce of the user
    over the same ranks."""
    setup = Setup(steps=1, replicas=2)
    (model, _), (other, _) = build(setup), build(setup)
    counted = [count_volume(param_groups(one)) for one in (model, other)]
    for one in (model, other):
        one.set_requires_all_reduce(False)
    model(torch.ones(7, DIM)).float().square().mean().backward()
    before = [one.ledger.current.sent["other"] for one in counted]
    dist.all_reduce(torch.zeros(4))
    after = [one.ledger.current.sent["other"] for one in counted]
    for one in counted:
        one.remove()
    return [*before, *after]


def test_what_user_code_sends_is_in_every_ledger(ranks) -> None:
    for before, others_before, after, others_after in ranks(4).run(_without_all_reduce):
        assert before == others_before == 0
        assert after == others_after == 24


def _announced() -> tuple[int, dict[str, int]]:
    setup = Setup()
    (model, optimizer), (other, others_optimizer) = build(setup), build(setup)
    counted = count_volume(param_groups(model), optimizer)
    handle = narrow_all_gather(other, others_optimizer, compression="delta")
    handle.refresh()
    train(replace(setup, steps=1), other, others_optimizer)  # announced before its first gather
    own = handle.ledger.last.sent["all_gather"]
    sent = dict(counted.ledger.current.sent)
    handle.remove()
    counted.remove()
    return own, sent


def test_an_announcement_is_its_own_models(ranks) -> None:
    for own, sent in ranks(2).run(_announced):
        assert own > 0
        assert sent == {}


class _Both(nn.Module):
    def __init__(self, mesh: Any, replicated: Any) -> None:
        super().__init__()
        self.sharded = fully_shard(nn.Linear(8, 8), mesh=mesh)
        self.copied = fully_shard(nn.Linear(64, 64), mesh=replicated)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.copied(self.sharded(x_TD).repeat(1, 8))


def _replicated_in_part() -> int:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    replicated = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(_Both(mesh, replicated), mesh=mesh)
    handle = narrow_all_gather(model, compression="delta")
    model(torch.ones(2, 8)).sum().backward()
    sent = handle.ledger.current.sent["other"]
    handle.remove()
    return sent


def test_what_a_models_replicated_part_sends_is_its_own(ranks) -> None:
    # Gradients in fp32, once around a ring of two.
    assert ranks(2).run(_replicated_in_part) == [4 * (64 * 64 + 64)] * 2
