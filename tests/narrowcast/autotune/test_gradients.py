"""Whether compressed gradients are worthwhile on a link, by real bytes and numbers that can be
checked by hand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowcast import narrow_reduce_scatter
from narrowcast.autotune import gradients as gradient_costs
from narrowcast.autotune.curves import Curve
from narrowcast.autotune.gradients import GradientSampler, Reduction, table
from narrowcast.autotune.links import Links
from narrowcast.fsdp2 import ParamGroup, ReduceScatter, param_groups
from narrowcast.reducescatter import codec
from narrowcast.reducescatter.comm import NarrowReduceScatter
from narrowcast.telemetry.counted import count_volume
from narrowcast.wire.coders import find_coder
from tests.narrowcast.training import Setup, build, same_bits, state_of, train

CODER = find_coder("zstd")
CPU = torch.device("cpu")
STEP = Setup(steps=1)


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
    """Each reading is a second further from the one before: 1, 2, 3, .. seconds."""

    def __init__(self) -> None:
        self.now, self.readings = 0.0, 0

    def perf_counter(self) -> float:
        self.now, self.readings = self.now + self.readings, self.readings + 1
        return self.now


@dataclass(frozen=True)
class Group:
    """As much of a parameter group as the sampler asks for."""

    names: tuple[str, ...]

    @property
    def process_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD


LABELS = [f"group {i}" for i in range(3)]


def _sampler() -> GradientSampler:
    return GradientSampler({label: Group((label,)) for label in LABELS}, CODER)


def _by_hand() -> list[Reduction]:
    """Three steps, in which group 0 is reduced twice each (1000 values a rank), and group 1 once.
    Either rank samples one chunk: encoding takes 1 s, decoding 2 s, adding 3 s."""
    sampler, (first, second, _) = _sampler(), LABELS
    sampler.allow(0.0)
    with patch("narrowcast.util.time", Clock()):
        for _ in range(3):
            for _ in range(2):
                sampler.observe(first, gradients(1000, seed=dist.get_rank()))
            sampler.observe(second, gradients(500, seed=7))
    arguments = (LABELS, dict.fromkeys(LABELS, links(2)))
    predicted = sampler.predict(*arguments, steps=3, device=CPU)
    # In a later window without samples the earlier ones stand.
    for _ in range(2):
        sampler.observe(first, gradients(1000, seed=0))
    sampler.observe(second, gradients(500, seed=0))
    assert sampler.predict(*arguments, steps=1, device=CPU) == predicted
    return predicted


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
    # It was not sampled, and goes by the mean of all.
    assert second == Reduction(
        label="group 1",
        plain=7 + 0.25 * 2000,
        none=5 + 0.5 * 2000 + 3,
        entropy=pytest.approx(5 + 0.5 * 500 * coded_bytes + 3 + 1.5),
        bits=pytest.approx(8 * coded_bytes),
    )


def _sampled_groups(calls: list[Any]) -> list[int | None]:
    """Which group is sampled, call by call; ``None``: none. A call is an observation of a group, by
    its number, or a number of chunks that are allowed, as a float."""
    sampler = _sampler()
    found = []
    for call in calls:
        if isinstance(call, float):
            sampler.allow(call)
            continue
        real = gradient_costs.sample_chunk
        with patch.object(gradient_costs, "sample_chunk", side_effect=real) as sample:
            sampler.observe(LABELS[call], gradients(10, seed=0))
        found.append(call if sample.called else None)
    return found


@pytest.mark.parametrize(
    ("calls", "sampled"),
    [
        ([0, 1, 2], [None, None, None]),  # none before any is allowed
        ([0.01, 0, 1, 2, 0], [0, None, None, None]),  # one at first
        ([0.01, 0, 0.5, 1, 0.5, 1, 1], [0, None, 1, None]),  # then as many as are allowed
        ([0.01, 0, 1, 2, 2.0, 1, 1, 2], [0, None, None, 1, None, 2]),  # the others first
        ([0.01, *[9.0] * 9, *[0, 1, 2] * 3], [0, 1, 2, *[None] * 6]),  # one of each at most
        ([0.01, 1, 2, 1.0, 1, 2], [1, None, None, 2]),  # the first group is frozen
    ],
)
def test_groups_are_sampled_one_after_the_other_as_far_as_chunks_are_allowed(
    ranks, calls: list[Any], sampled: list[int | None]
) -> None:
    assert ranks(2).run(_sampled_groups, calls) == [sampled] * 2


def _frozen(setup: Setup) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build(setup)
    model[0].requires_grad_(False)
    return model, optimizer


def _sampled_in_training(setup: Setup) -> tuple[list[Reduction], list[Reduction], bool]:
    """What is predicted after training and then, without more of it; and whether training was
    bitwise identical to training without a sampler."""
    model, optimizer = _frozen(setup)
    plain = train(setup, model, optimizer), state_of(model, optimizer)
    model, optimizer = _frozen(setup)
    groups = {group.name: group for group in param_groups(model)}
    sampler = GradientSampler(groups, CODER)
    sampler.subscribe()
    sampler.allow(1.0)
    optimizer.register_step_post_hook(lambda *_: sampler.allow(1.0))
    losses = train(setup, model, optimizer)
    as_plain = losses == plain[0] and same_bits(state_of(model, optimizer), plain[1])
    sampler.unsubscribe()
    arguments = (list(groups), dict.fromkeys(groups, links(2)), setup.steps, CPU)
    found = [sampler.predict(*arguments) for _ in range(2)]
    return *found, as_plain


def test_gradients_are_sampled_in_training_though_a_group_is_frozen(ranks) -> None:
    setup = Setup(microbatches=2)
    results = ranks(2).run(_sampled_in_training, setup)
    assert [as_plain for *_, as_plain in results] == [True, True]
    found, others = ([replace(one, entropy=0.0, none=0.0) for one in r] for r, *_ in results)
    assert found == others
    assert {one.label for one in found} == {"1", "(root)"}
    assert all(4 < one.bits < 32 for one in found)
    assert found[0].bits != found[1].bits  # either group's own
    assert [later for _, later, _ in results] == [[], []]


def _comms(groups: list[ParamGroup]) -> list[ReduceScatter]:
    """What FSDP2 itself calls to reduce gradients, observed or not."""
    return [group._group._reduce_scatter_comm for group in groups]


def _observed(order: str) -> list[str]:
    """What is wrong after gradients were narrowed, counted and observed, begun and ended in the
    ``order`` of their first letters; the second half ends them."""
    model, optimizer = build(STEP)
    groups = param_groups(model)
    own = _comms(groups)
    seen: Counter[str] = Counter()
    handles: dict[str, Callable[[], object]] = {}
    wrong = []

    def observe() -> Callable[[], object]:
        ends = [
            group.observe_reductions(lambda rows_WN, name=group.name: seen.update([name]))
            for group in groups
        ]
        return lambda: [end() for end in ends]

    begins = {
        "n": lambda: narrow_reduce_scatter(model, optimizer, volume="c" in handles).remove,
        "c": lambda: count_volume(groups, optimizer).remove,
        "o": observe,
        "s": observe,  # a second observer
    }
    for letter in order:
        if letter in handles:
            handles.pop(letter)()
        else:
            handles[letter] = begins[letter]()
        seen.clear()
        train(STEP, model, optimizer)
        observers = len(handles.keys() & {"o", "s"})
        if +seen != +Counter({group.name: observers for group in groups}):
            wrong.append(f"{letter} in {order}: {observers} observers saw {seen}")
        narrowed = {isinstance(group.reduce_scatter, NarrowReduceScatter) for group in groups}
        if narrowed != {"n" in handles}:
            wrong.append(f"{letter} in {order}: narrowed: {narrowed}")
        if not handles and not all(a is b for a, b in zip(_comms(groups), own, strict=True)):
            wrong.append(f"{letter} in {order}: not torch's own: {_comms(groups)}")
    return wrong


@pytest.mark.parametrize("order", ["oo", "onon", "nono", "onno", "coco", "occo", "ocsoncns"])
def test_reductions_are_observed_whatever_else_is_done_to_them(ranks, order: str) -> None:
    """And in the end torch's own object is in its place."""
    assert ranks(2).run(_observed, order) == [[]] * 2


def test_the_table_has_a_row_a_group_and_a_verdict() -> None:
    faster = Reduction("layers.0", plain=0.010, none=0.012, entropy=0.004, bits=11.25)
    slower = Reduction("layers.1", plain=0.001, none=0.0015, entropy=0.0022, bits=12.5)
    head, first, second, _, verdict = table([faster, slower]).splitlines()
    assert " ".join(head.split()) == "gradients of bits plain ms none ms entropy ms worthwhile"
    assert first.split() == ["layers.0", "11.2", "10.00", "12.00", "4.00", "yes"]
    assert second.split() == ["layers.1", "12.5", "1.00", "1.50", "2.20", "no"]
    assert "11.00 ms plain, 6.20 ms with entropy coding" in verdict
    assert "compressing gradients is worthwhile on this link" in verdict
    assert "[narrowcast.reduce_scatter] enable = true" in verdict
    against = table([slower])
    assert "is not worthwhile on this link" in against
    assert "enable = true" not in against
