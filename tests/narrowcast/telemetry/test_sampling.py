"""Passes over the data are counted in sampled steps alone, and their rates are right there."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from narrowcast.allgather import shard_codec
from narrowcast.fsdp2 import param_groups
from narrowcast.telemetry.changes import Changes
from narrowcast.telemetry.step_volume import StepVolume
from narrowcast.wire.floats import LAYOUTS
from tests.narrowcast.training import Setup, build, narrowed, train

STEPS, INTERVAL = 7, 3
SAMPLED = [1, 3, 6]
RATES = ("changed_values", "changed_exponents", "changed_blocks", "zero_gradients")


@contextmanager
def _passes() -> Iterator[list[int]]:
    """Counts the passes over shards."""
    passes: list[int] = []
    count_changes = shard_codec.count_changes

    def counted(*args: object) -> Changes:
        passes.append(1)
        return count_changes(*args)

    with patch.object(shard_codec, "count_changes", counted):
        yield passes


def _shards(model: torch.nn.Module) -> list[torch.Tensor]:
    layout = LAYOUTS[torch.bfloat16]
    return [group.shard().view(layout.bits).clone() for group in param_groups(model)]


def _trained(interval: int) -> tuple[list[StepVolume], list[int], list[int]]:
    """By step: what was counted, changed values by a comparison here, and passes over shards."""
    setup = Setup(narrow={"compression": "delta"}, gradients={"compression": "entropy"}, steps=1)
    model, optimizer = build(setup)
    volumes, changed, passes_by_step = [], [], []
    before: list[torch.Tensor] = []
    with narrowed(setup, model, optimizer) as handles, _passes() as passes:
        handles[0].ledger.sample_interval = interval
        for step in range(STEPS):
            now = _shards(model)
            pairs = zip(now, before or now, strict=True)
            changed.append(sum(int((a != b).sum()) for a, b in pairs))
            before = now
            train(setup, model, optimizer, step)
            volumes.append(handles[0].ledger.last)
            passes_by_step.append(len(passes))
    return volumes, changed, passes_by_step


@pytest.mark.parametrize(("interval", "sampled"), [(INTERVAL, SAMPLED), (0, [])])
def test_rates_are_of_the_sampled_step_and_absent_from_all_others(
    ranks, interval: int, sampled: list[int]
) -> None:
    for volumes, changed, passes in ranks(2).run(_trained, interval):
        for step, volume in enumerate(volumes, start=1):
            names = {name.split("/")[1] for name in volume.scalars()}
            if step not in sampled:
                assert not names & set(RATES)
                assert volume.changes == {}
                assert volume.gradients.examined == 0
                continue
            assert "zero_gradients" in names
            assert volume.gradients.examined == volume.gradients.parameters
            if step > 1:  # nothing is cached before the first
                assert set(RATES) <= names
                counted = sum(one.changed_values for one in volume.changes.values())
                assert counted == changed[step - 1] > 0
        assert (passes[-1] > 0) == bool(sampled)


def test_all_bytes_are_counted_in_every_step_whatever_is_sampled(ranks) -> None:
    every_step, none = (ranks(2).run(_trained, interval) for interval in (1, 0))
    for (volumes, *_), (others, *_) in zip(every_step, none, strict=True):
        assert [one.sent for one in volumes] == [one.sent for one in others]
        assert [one.first for one in volumes] == [one.first for one in others]
        assert [one.gradients.bits for one in volumes] == [one.gradients.bits for one in others]
