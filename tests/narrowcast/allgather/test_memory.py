"""Narrowing costs the memory that its compression states, and one group's payloads at a time."""

import functools
from collections.abc import Callable
from statistics import median

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

from narrowcast import narrow_all_gather, narrow_reduce_scatter
from tests.narrowcast.test_all_gather import COMPRESSIONS
from tests.ranks import Ranks
from tests.wide import wide_but

WIDTH, LAYERS = 256, 8
PARAMETERS = WIDTH * WIDTH * LAYERS
GROUP_BYTES = 2 * WIDTH * WIDTH  # of one gathered layer
GRADIENT_BYTES = 4 * WIDTH * WIDTH  # of one layer, in the reduce dtype


def _cached_and_peaks(
    compression: dict | None, gradients: str | None = None
) -> tuple[int, list[int]]:
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
    handle = narrow_all_gather(model, optimizer, **compression) if compression else None
    reduction = (
        narrow_reduce_scatter(model, optimizer, compression=gradients) if gradients else None
    )

    def step() -> None:
        model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    peaks = [_peak(step) for _ in range(3)]
    cached = handle.cache_bytes if handle else 0
    for narrowed in (handle, reduction):
        if narrowed:
            narrowed.remove()
    return cached, peaks


def _peak(step: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    allocated = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


@functools.cache
def _measured(
    ranks: Ranks, compression: str | None = None, gradients: str | None = None
) -> tuple[set[int], float]:
    """Bytes of the caches, and the median of all peaks of ranks and steps, since gloo's threads
    allocate at times of their own."""
    settings = None if compression is None else COMPRESSIONS[compression]
    cached, peaks = zip(*ranks.run(_cached_and_peaks, settings, gradients), strict=True)
    return set(cached), median(peak for of_rank in peaks for peak in of_rank)


CACHE_BYTES = {
    "delta": 2 * PARAMETERS,
    "exponent": PARAMETERS,
    "blocks-hash": PARAMETERS * 3 // 4 + 16 * PARAMETERS // 4 // 64,
    "entropy": 0,
    "none": 0,
}


@pytest.mark.parametrize("name", wide_but(CACHE_BYTES, "delta", "exponent"))
def test_what_is_cached_is_what_the_compression_states(ranks, name: str) -> None:
    cached, _ = _measured(ranks(4), name)
    assert cached == {CACHE_BYTES[name]}


@pytest.mark.parametrize("name", ["delta", "exponent", "entropy"])
def test_a_step_needs_beyond_it_one_groups_payload_at_most(ranks, name: str) -> None:
    """Its peak may include the caches, where they are made anew within it."""
    _, plain_peak = _measured(ranks(4))
    _, peak = _measured(ranks(4), name)
    assert peak <= plain_peak + CACHE_BYTES[name] + GROUP_BYTES


@pytest.mark.parametrize("gradients", ["entropy", "none"])
def test_reductions_need_the_payloads_of_one_group_at_most(ranks, gradients: str) -> None:
    """Those that a rank sends and those that arrive are all but its own, compressed or not."""
    _, plain_peak = _measured(ranks(4))
    _, peak = _measured(ranks(4), None, gradients)
    assert peak <= plain_peak + GRADIENT_BYTES
