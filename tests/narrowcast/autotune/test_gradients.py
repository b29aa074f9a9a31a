"""Whether coded gradients pay on a link, by real bytes and numbers that can be checked by hand."""

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.autotune import gradients as gradient_costs
from narrowcast.autotune.calibration import Curve, Links
from narrowcast.autotune.gradients import GradientSampler, Reduction, table
from narrowcast.fsdp2 import param_groups
from narrowcast.reducescatter import codec
from narrowcast.telemetry.counted import count_volume
from narrowcast.wire.coders import find_coder
from tests.narrowcast.training import Setup, build, same_bits, state_of, train

CODER = find_coder("zstd")
CPU = torch.device("cpu")


def curve(latency: float, seconds_per_byte: float) -> Curve:
    return Curve(latency, seconds_per_byte, error=0.0, nbytes=(), measured=())


def links(world_size: int) -> Links:
    swap = curve(5.0, 0.5)
    return Links(tuple(range(world_size)), curve(0, 0), curve(7.0, 0.25), swap, 0.0, 0.0, 0.0)


def gradients(num_values: int, seed: int) -> Tensor:
    """Contributions of this rank to the shards of two, (W, n): fp32 that were bf16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2, num_values), generator=generator).bfloat16().float()


class Clock:
    """Every look at it takes a second more than the one before: 1, 2, 3, .. seconds."""

    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0

    def perf_counter(self) -> float:
        self.now, self.looks = self.now + self.looks, self.looks + 1
        return self.now


@dataclass(frozen=True)
class Group:
    """As far as a watch looks at a parameter group."""

    names: tuple[str, ...]

    @property
    def process_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD


def _watch() -> tuple[GradientSampler, list[Group]]:
    labels = [f"group {i}" for i in range(3)]
    watched, reduced = ([Group((label,)) for label in labels] for _ in range(2))
    return GradientSampler(dict(zip(labels, watched, strict=True)), CODER), reduced


def _by_hand() -> list[Reduction]:
    """Three steps, in which group 0 is reduced twice each (1000 values a rank), and group 1 once.
    Either rank looks at one piece: encoding takes 1 s, decoding 2 s, adding 3 s."""
    watch, (first, second, _) = _watch()
    watch.make_room(0.0)
    with patch("narrowcast.util.time", Clock()):
        for _ in range(3):
            for _ in range(2):
                watch(first, gradients(1000, seed=dist.get_rank()))
            watch(second, gradients(500, seed=7))
    labels = [f"group {i}" for i in range(3)]
    arguments = (labels, dict.fromkeys(labels, links(2)))
    found = watch.reductions(*arguments, steps=3, device=CPU)
    # In a later window in which none had a turn, what was seen before stands.
    for _ in range(2):
        watch(first, gradients(1000, seed=0))
    watch(second, gradients(500, seed=0))
    assert watch.reductions(*arguments, steps=1, device=CPU) == found
    return found


def test_reductions_are_predicted_from_links_and_what_coding_takes(ranks) -> None:
    found, others = ranks(2).run(_by_hand)
    assert found == others
    # Either rank codes what it gives to the other.
    coded = [
        codec.encode(gradients(1000, seed=rank)[1 - rank], "entropy", CODER).size for rank in (0, 1)
    ]
    coded_bytes = sum(coded) / 2000  # a value
    assert 1 < coded_bytes < 2
    first, second = found  # the third was never reduced
    assert first == Reduction(
        label="group 0",
        plain=2 * (7 + 0.25 * 4000),
        none=2 * (5 + 0.5 * 4000 + 2 * 3),  # the contributions of both are added
        entropy=pytest.approx(2 * (5 + 0.5 * 1000 * coded_bytes + 2 * 3 + (1 + 2))),
        bits=pytest.approx(8 * coded_bytes),
    )
    # It had no turn, and goes by the mean of all.
    assert second == Reduction(
        label="group 1",
        plain=7 + 0.25 * 2000,
        none=5 + 0.5 * 2000 + 3,
        entropy=pytest.approx(5 + 0.5 * 500 * coded_bytes + 3 + 1.5),
        bits=pytest.approx(8 * coded_bytes),
    )


def _looks(calls: list[Any]) -> list[int | None]:
    """Which group is looked at, call by call: of a group's number, or of pieces there is room for.
    ``None``: at none."""
    watch, groups = _watch()
    found = []
    for call in calls:
        if isinstance(call, float):
            watch.make_room(call)
            continue
        with patch.object(gradient_costs, "_look", side_effect=gradient_costs._look) as look:
            watch(groups[call], gradients(10, seed=0))
        found.append(call if look.called else None)
    return found


@pytest.mark.parametrize(
    ("calls", "looked"),
    [
        ([0, 1, 2], [None, None, None]),  # no room before it is known
        ([0.01, 0, 1, 2, 0], [0, None, None, None]),  # one at first
        ([0.01, 0, 0.5, 1, 0.5, 1, 1], [0, None, 1, None]),  # then as many as there is room for
        ([0.01, 0, 1, 2, 2.0, 1, 1, 2], [0, None, None, 1, None, 2]),  # the others first
        ([0.01, *[9.0] * 9, *[0, 1, 2] * 3], [0, 1, 2, *[None] * 6]),  # room is not saved up
        ([0.01, 1, 2, 1.0, 1, 2], [1, None, None, 2]),  # the first group is frozen
    ],
)
def test_one_group_after_the_other_is_looked_at_where_there_is_room(
    ranks, calls: list[Any], looked: list[int | None]
) -> None:
    assert ranks(2).run(_looks, calls) == [looked] * 2


def _watched(setup: Setup) -> tuple[list[Reduction], list[Reduction], bool]:
    """What is found in training and then, without more of it; and whether training was as plain."""
    model, optimizer = build(setup)
    model[0].requires_grad_(False)
    plain = train(setup, model, optimizer), state_of(model, optimizer)
    model, optimizer = build(setup)
    model[0].requires_grad_(False)
    groups = {group.name: group for group in param_groups(model)}
    counted = count_volume(list(groups.values()), optimizer)
    counted.ledger.on_gradients = watch = GradientSampler(groups, CODER)
    watch.make_room(1.0)
    optimizer.register_step_post_hook(lambda *_: watch.make_room(1.0))
    losses = train(setup, model, optimizer)
    as_plain = losses == plain[0] and same_bits(state_of(model, optimizer), plain[1])
    counted.remove()
    arguments = (list(groups), dict.fromkeys(groups, links(2)), setup.steps, CPU)
    found = [watch.reductions(*arguments) for _ in range(2)]
    return *found, as_plain


def test_gradients_are_watched_in_training_though_a_group_is_frozen(ranks) -> None:
    setup = Setup(microbatches=2)
    results = ranks(2).run(_watched, setup)
    assert [as_plain for *_, as_plain in results] == [True, True]
    found, others = ([replace(one, entropy=0.0, none=0.0) for one in r] for r, *_ in results)
    assert found == others
    assert {one.label for one in found} == {"1", "(root)"}
    assert all(4 < one.bits < 32 for one in found)
    assert found[0].bits != found[1].bits  # either group's own
    assert [later for _, later, _ in results] == [[], []]


def test_the_table_has_a_line_a_group_and_a_verdict() -> None:
    pays = Reduction("layers.0", plain=0.010, none=0.012, entropy=0.004, bits=11.25)
    loses = Reduction("layers.1", plain=0.001, none=0.0015, entropy=0.0022, bits=12.5)
    head, first, second, _, verdict = table([pays, loses]).splitlines()
    columns = "gradients of bits plain ms raw ms coded ms coded pays"
    assert " ".join(head.split()) == columns
    assert first.split() == ["layers.0", "11.2", "10.00", "12.00", "4.00", "yes"]
    assert second.split() == ["layers.1", "12.5", "1.00", "1.50", "2.20", "no"]
    assert "11.00 ms plain, 6.20 ms coded: a coded reduce-scatter pays" in verdict
    assert "[narrowcast.reduce_scatter] enable = true" in verdict
    against = table([loses])
    assert "does not pay on this link" in against
    assert "enable = true" not in against
