"""Narrowing costs the memory that its treatment says, and of payloads one group's at a time."""

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

from narrowcast import narrow_all_gather, narrow_reduce_scatter
from tests.narrowcast.test_all_gather import TREATMENTS
from tests.ranks import Ranks

WIDTH, LAYERS = 256, 8
PARAMETERS = WIDTH * WIDTH * LAYERS
GROUP_BYTES = 2 * WIDTH * WIDTH  # of one gathered layer
GRADIENT_BYTES = 4 * WIDTH * WIDTH  # of one layer, in the reduce dtype


def _kept_and_peaks(treatment: dict | None, gradients: str | None = None) -> tuple[int, list[int]]:
    """Bytes of the caches, and of all that was allocated at once in each of three steps, on this
    rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    options = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = narrow_all_gather(model, optimizer, **treatment) if treatment else None
    reduction = narrow_reduce_scatter(model, optimizer, treatment=gradients) if gradients else None

    def step() -> None:
        model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    peaks = [_peak(step) for _ in range(3)]
    kept = handle.kept_bytes if handle else 0
    for narrowed in (handle, reduction):
        if narrowed:
            narrowed.remove()
    return kept, peaks


def _peak(step: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    allocated = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


def _typical_peak(ranks: Ranks, *args: Any) -> float:
    """The median of all ranks and steps, since gloo's threads allocate at times of their own."""
    return median(peak for _, peaks in ranks.run(_kept_and_peaks, *args) for peak in peaks)


KEPT_BYTES = {
    "value": 2 * PARAMETERS,
    "exponent": PARAMETERS,
    "blocks-hash": PARAMETERS * 3 // 4 + 16 * PARAMETERS // 4 // 64,
    "coded": 0,
    "raw": 0,
}


@pytest.mark.parametrize("name", KEPT_BYTES)
def test_what_is_kept_is_what_the_treatment_says(ranks, name: str) -> None:
    for kept, _ in ranks(4).run(_kept_and_peaks, TREATMENTS[name]):
        assert kept == KEPT_BYTES[name]


@pytest.mark.parametrize("name", ["value", "exponent", "coded"])
def test_a_step_needs_beyond_it_one_groups_payload_at_most(ranks, name: str) -> None:
    """Its peak may include the caches, where they are made anew within it."""
    plain_peak = _typical_peak(ranks(4), None)
    peak = _typical_peak(ranks(4), TREATMENTS[name])
    assert peak <= plain_peak + KEPT_BYTES[name] + GROUP_BYTES


@pytest.mark.parametrize("gradients", ["coded", "raw"])
def test_reductions_need_the_pieces_of_one_group_at_most(ranks, gradients: str) -> None:
    """Those that a rank sends and those that come in are all but its own, coded or not."""
    plain_peak = _typical_peak(ranks(4), None)
    peak = _typical_peak(ranks(4), None, gradients)
    assert peak <= plain_peak + GRADIENT_BYTES
