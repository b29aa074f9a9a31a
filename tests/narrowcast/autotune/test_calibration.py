"""Links and coders are measured alike on all ranks. Times come from a clock that each reading moves
on by a constant of the rank: an operation takes two readings, whatever it does."""

import itertools
import json
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from narrowcast.agreement import sharded_groups
from narrowcast.allgather.comm import NarrowAllGather
from narrowcast.autotune import calibration, links, stopwatch
from narrowcast.autotune.calibration import Calibration, HostLink
from narrowcast.autotune.coder_speed import CoderSpeed
from narrowcast.autotune.curves import Curve, fit
from narrowcast.autotune.links import Links
from narrowcast.errors import Job
from narrowcast.telemetry.collectives import count_collectives
from narrowcast.wire.coders import CODERS

WIDTH = 512
SHARD_BYTES = WIDTH * WIDTH * 2 // 2  # bf16, over two ranks


def test_fit_finds_the_line_that_times_lie_on() -> None:
    sizes = [1 << 10, 1 << 14, 1 << 18, 5 << 20]
    curve = fit(sizes, [3e-4 + size / 25e6 for size in sizes])
    assert curve.latency == pytest.approx(3e-4)
    assert curve.seconds_per_byte == pytest.approx(1 / 25e6)
    assert curve.seconds(1 << 20) == pytest.approx(3e-4 + (1 << 20) / 25e6)
    assert curve.error < 1e-6


@pytest.mark.parametrize("seconds", [[1e-3, 1e-3, 5e-4], [1e-6, 5e-4, 1e-2]])
def test_fit_is_never_negative(seconds: list[float]) -> None:
    sizes = [1 << 10, 1 << 16, 1 << 20]
    slope, latency = np.polyfit(sizes, seconds, 1)
    assert min(slope, latency) < 0  # as an unbounded fit would be
    curve = fit(sizes, seconds)
    assert curve.latency >= 0
    assert curve.seconds_per_byte >= 0


def test_fit_favours_large_sizes_and_reports_how_far_off_they_are() -> None:
    sizes = [1 << 10, 1 << 18, 1 << 20, 1 << 22]
    true = [1e-3 + size / 10e6 for size in sizes]
    disturbed = fit(sizes, [3 * true[0], *true[1:]])
    assert disturbed.seconds(5 << 20) == pytest.approx(1e-3 + (5 << 20) / 10e6, rel=0.01)
    assert disturbed.error < 0.02
    bent = fit(sizes, [*true[:2], 1.3 * true[2], true[3]])
    pairs = zip(bent.nbytes, bent.measured, strict=True)
    deviations = [abs(bent.seconds(nbytes) / seconds - 1) for nbytes, seconds in pairs]
    assert bent.error == pytest.approx(max(deviations[1:]))
    assert bent.error > 0.1


@dataclass(frozen=True)
class Outcome:
    calibration: Calibration
    groups: list[str]
    sent_bytes: list[int]  # by each collective that this rank took part in
    same_generator: bool


def _calibrate(
    reading_seconds: list[float], seconds: float, gather_seconds_per_byte: float = 0.0
) -> Outcome:
    """By a clock that each reading moves on by ``reading_seconds[rank]``, and narrowed gathers by
    the size of the shard."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    twin = dist.new_group(list(range(world_size)), group_desc="twin")
    meshes = [init_device_mesh("cpu", (world_size,)), DeviceMesh.from_group(twin, "cpu")]
    models = [nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(8, 8)]
    for model, mesh in zip(models, meshes, strict=True):
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    groups = sharded_groups(models)
    readings = itertools.count()
    sent_bytes: list[int] = []
    state = torch.get_rng_state()
    stop = count_collectives(sent_bytes.append)

    gathering = 0.0

    def read() -> float:
        return next(readings) * reading_seconds[rank] + gathering

    class SlowGather(NarrowAllGather):
        def __call__(self, output: Tensor, shard: Tensor, *rest: Any) -> Any:
            nonlocal gathering
            gathering += shard.nbytes * gather_seconds_per_byte
            return super().__call__(output, shard, *rest)

    with (
        patch.object(calibration, "perf_counter", read),
        patch.object(stopwatch, "perf_counter", read),
        patch("narrowcast.util.time", SimpleNamespace(perf_counter=read)),
        patch.object(links, "NarrowAllGather", SlowGather),
    ):
        measured = calibration.calibrate(groups, CODERS, Job(), cache_device="cpu", seconds=seconds)
    stop()
    names = [group.process_group.group_name for group in groups]
    return Outcome(measured, names, sent_bytes, torch.equal(state, torch.get_rng_state()))


def test_every_process_group_is_measured_up_to_its_largest_shard(ranks) -> None:
    outcome, other = ranks(2).run(_calibrate, [2.0**-20] * 2, 3.0)
    measured = outcome.calibration
    assert measured == other.calibration
    assert outcome.same_generator
    assert set(measured.links) == set(outcome.groups)
    first, twin = (measured.links[name] for name in outcome.groups)
    assert outcome.groups[0] != outcome.groups[1]
    assert first is twin  # the same ranks: measured once
    assert first.ranks == (0, 1)
    assert first.all_gather.nbytes == (1024, 4096, 16384, 65536, SHARD_BYTES)
    assert first.reduce_scatter.nbytes[-1] == first.pairwise.nbytes[-1] == 2 * SHARD_BYTES
    assert outcome.sent_bytes.count(SHARD_BYTES) >= 5  # was gathered
    assert outcome.sent_bytes.count(2 * SHARD_BYTES) >= 5  # was reduced
    for curve in (first.all_gather, first.reduce_scatter, first.pairwise):
        assert curve.measured == (2.0**-19,) * len(curve.nbytes)
        assert curve.seconds(100_000) == pytest.approx(2.0**-19)
    assert first.announce == 2.0**-19
    assert first.gather_overhead == pytest.approx(0, abs=1e-9)  # all takes the same by this clock
    assert first.unchanged_per_byte == 0
    coder = measured.coders["zstd"]
    assert (coder.encode, coder.decode, coder.hidden) == (2.0**39, 2.0**39, 0)
    assert 2 < coder.ratio < 4
    assert (measured.hashing, measured.comparing) == (2.0**37, 2.0**37)
    assert measured.host is None  # the device is the host


def test_what_a_narrowed_gather_takes_for_a_larger_shard_is_measured(ranks) -> None:
    outcome, _ = ranks(2).run(_calibrate, [2.0**-20] * 2, 3.0, 1e-8)
    links = next(iter(outcome.calibration.links.values()))
    assert links.gather_overhead < 2e-6
    assert links.unchanged_per_byte == pytest.approx(1e-8, rel=1e-3)


def test_a_slower_rank_slows_all_and_none_waits_for_another(ranks) -> None:
    fast, slow = 2.0**-30, 2.0**-10
    alone, _ = ranks(2).run(_calibrate, [fast, fast], 0.03)
    outcomes = ranks(2).run(_calibrate, [fast, slow], 0.03)
    assert outcomes[0].calibration == outcomes[1].calibration
    assert outcomes[0].sent_bytes == outcomes[1].sent_bytes
    links = next(iter(outcomes[0].calibration.links.values()))
    assert set(links.all_gather.measured) == {2 * slow}
    assert outcomes[0].calibration.coders["zstd"].encode == (1 << 20) / (2 * slow)
    assert outcomes[0].calibration.seconds > 0.01
    links_alone = next(iter(alone.calibration.links.values()))
    assert links_alone.all_gather.nbytes[-1] == SHARD_BYTES
    assert 2 <= len(links.all_gather.nbytes) < len(links_alone.all_gather.nbytes)


def _example() -> Calibration:
    def line(latency: float, bytes_per_second: float) -> Curve:
        sizes = [1 << 18, 1 << 20]
        return fit(sizes, [latency + size / bytes_per_second for size in sizes])

    slow, fast = line(5e-4, 12.5e6 / 3), line(3e-5, 1e9)
    links = Links((0, 1, 2, 8), slow, slow, line(1e-3, 25e6 / 3), 2e-3, 4e-9, 7e-4)
    coder = CoderSpeed("zstd", 150e6, 600e6, 3.07, 0.25)
    return Calibration({"7": links}, {"zstd": coder}, 3e6, 431e6, HostLink(fast, fast), 2.5)


def test_the_table_has_the_rates_of_the_link() -> None:
    text = calibration.table(_example())
    columns = ["ranks", "all-gather", "reduce-scatter", "pairwise", "narrowed", "gather", "sizes"]
    header, group, _, coder, rest = text.splitlines()
    assert header.split() == columns
    assert group.startswith("0-2,8 ")
    assert group.count("500 us + 100 Mbit/s (+- 0 %)") == 2
    assert "1000 us + 200 Mbit/s" in group
    assert group.endswith("+ 2000 us + 4.2 ms/MiB  700 us")
    assert coder.split() == ["zstd", "150", "MB/s", "600", "MB/s", "3.07", "25", "%"]
    assert "hashing 3 MB/s, comparing 431 MB/s" in rest
    assert "to the host 30 us + 8000 Mbit/s" in rest
    flat = replace(_example().host.to_host, seconds_per_byte=0.0)
    unlimited = replace(_example(), host=HostLink(flat, flat))
    assert "30 us + any rate" in calibration.table(unlimited)


def test_json_holds_all_that_was_measured() -> None:
    example = _example()
    stored = json.loads(json.dumps(calibration.as_json(example), allow_nan=False))
    assert stored == calibration.as_json(example)
    links = stored["links"]["7"]
    assert links["ranks"] == [0, 1, 2, 8]
    curve = example.links["7"].all_gather
    assert links["all_gather"]["nbytes"] == list(curve.nbytes)
    assert links["all_gather"]["latency"] == curve.latency
    assert CoderSpeed(**stored["coders"]["zstd"]) == example.coders["zstd"]
    assert (stored["hashing"], stored["comparing"], stored["seconds"]) == (3e6, 431e6, 2.5)
