"""Measures, at the start of a run, what its links and coders cost.

A link's cost is a line: seconds = latency + bytes * seconds per byte, fitted to the times of a
spread of sizes. It is Comm in CIERA's formula (section 3.2), which the speeds of coders and hashes
are set against.

All ranks of a process group end with the same numbers, those of the slowest, and how often they
call a collective depends on nothing but such numbers, so no rank waits for another in vain.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from narrowcast.allgather import codec
from narrowcast.autotune.coder_speed import (
    CoderSpeed,
    bytes_per_second,
    exponent_chunks,
    measure_coder,
)
from narrowcast.autotune.curves import Curve, measure_curve, noise
from narrowcast.autotune.links import CURVE_SHARE, Links, measure_links
from narrowcast.autotune.stopwatch import Stopwatch
from narrowcast.errors import Job
from narrowcast.fsdp2 import ParamGroup
from narrowcast.topology import FLAT, Topology
from narrowcast.util import aligned
from narrowcast.wire.coders import Coder

_BLOCK_SIZE = 512  # values a block, of hashes

# Ranks on a node; ranks of the process group; bytes, and values, of their largest shard.
_LinkKey = tuple[int, tuple[int, ...], int, int]
_measured: WeakKeyDictionary[Job, dict[_LinkKey, Links]] = WeakKeyDictionary()


@dataclass(frozen=True)
class HostLink:
    """Copies between the device and pinned host memory, by bytes."""

    to_host: Curve
    from_host: Curve


@dataclass(frozen=True)
class Calibration:
    """What links and coders cost; the same numbers on all ranks of a process group.

    Attributes:
        links: by name of the process group.
        coders: by name.
        hashing, comparing: bytes of exponents a second, of ``block_hashes`` and ``changed_blocks``.
        host: where caches live in host memory and the model does not.
        seconds: what the calibration took.
    """

    links: dict[str, Links]
    coders: dict[str, CoderSpeed]
    hashing: float
    comparing: float
    host: HostLink | None
    seconds: float


@torch.no_grad()
def calibrate(
    groups: list[ParamGroup],
    coders: dict[str, Coder],
    job: Job,
    *,
    topology: Topology = FLAT,
    cache_device: str | None = None,
    seconds: float = 3.0,
) -> Calibration:
    """Measures links and coders. Every rank of the job that shards one of the groups must call
    this.

    Args:
        groups: parameter groups of the model; their process groups are measured, up to the largest
            shard of each. Process groups of the same ranks are measured once, and in a later
            calibration of the job not again, unless their largest shard is another one.
        coders: to be measured, by name.
        job: the ranks that train together.
        topology: where they are.
        cache_device: ``cpu`` where caches are to live in host memory.
        seconds: about how long it may take; slow links are measured up to smaller sizes.
    """
    start = perf_counter()
    device = groups[0].device
    by_ranks: dict[tuple[int, ...], list[ParamGroup]] = {}
    for group in groups:
        ranks = tuple(dist.get_process_group_ranks(group.process_group))
        by_ranks.setdefault(ranks, []).append(group)
    together = Stopwatch([same[0].process_group for same in by_ranks.values()], device)
    known = _measured.setdefault(job, {})
    keys = {ranks: _link_key(ranks, same, topology) for ranks, same in by_ranks.items()}
    (num_links,) = together.slowest([sum(key not in known for key in keys.values())])
    links = {}
    for ranks, same in by_ranks.items():
        key = keys[ranks]
        if key not in known:
            known[key] = measure_links(ranks, same, device, seconds / num_links, topology)
        links |= {group.process_group.group_name: known[key] for group in same}
    chunks = exponent_chunks(device)
    speeds = {name: measure_coder(name, coder, chunks, together) for name, coder in coders.items()}
    cached_N = chunks[0].clone()
    hashing = bytes_per_second(
        lambda: codec.block_hashes(chunks[0], _BLOCK_SIZE), cached_N.numel(), together
    )
    comparing = bytes_per_second(
        lambda: codec.changed_blocks(chunks[0], cached_N, _BLOCK_SIZE), cached_N.numel(), together
    )
    host = None
    if cache_device == "cpu" and device.type != "cpu":
        largest = max(group.shard_bytes for group in groups)
        host = _measure_host(largest, together, CURVE_SHARE * seconds)
    (took,) = together.slowest([perf_counter() - start])
    return Calibration(links, speeds, hashing, comparing, host, took)


def _link_key(ranks: tuple[int, ...], groups: list[ParamGroup], topology: Topology) -> _LinkKey:
    """What ``measure_links`` depends on; the same on all of these ranks."""
    nbytes = max(group.shard_bytes for group in groups)
    largest = max(sum(group.numels) for group in groups)
    return topology.ranks_per_node, ranks, nbytes, largest


def _measure_host(largest: int, stopwatch: Stopwatch, seconds: float) -> HostLink:
    def copy(nbytes: int, to_host: bool) -> Callable[[], object]:
        there = noise(nbytes, stopwatch.device)
        here = noise(nbytes, torch.device("cpu")).pin_memory()
        target, source = (here, there) if to_host else (there, here)
        return lambda: target.copy_(source, non_blocking=True)

    return HostLink(
        *(
            measure_curve(partial(copy, to_host=to_host), largest, stopwatch, seconds)
            for to_host in (True, False)
        )
    )


def table(calibration: Calibration) -> str:
    """What links cost, as latency and what each rank sends a second, by process group (its ranks),
    and how fast coders are."""
    measured = {links.ranks: links for links in calibration.links.values()}
    rows = [["ranks", "all-gather", "reduce-scatter", "pairwise", "narrowed gather", "sizes"]]
    of_levels = []
    for ranks, links in measured.items():
        copies, payload_copies = len(ranks) - 1, links.payloads - 1
        cells = [
            _describe(links.all_gather, copies),
            _describe(links.reduce_scatter, copies),
            _describe(links.pairwise, payload_copies),
        ]
        if links.levels is not None:
            of_levels.append(
                f"ranks {_ranges(ranks)} in two levels: payloads "
                f"{_describe(links.payload_gather, payload_copies)}, sums within nodes "
                f"{_describe(links.levels.sum_within, copies)}"
            )
        unchanged = f"{1e3 * 2**20 * links.unchanged_per_byte:.1f} ms/MiB"
        narrowed = f"+ {1e6 * links.gather_overhead:.0f} us + {unchanged}"
        rows.append([_ranges(ranks), *cells, narrowed, f"{1e6 * links.announce:.0f} us"])
    coders = [["coder", "encodes", "decodes", "ratio", "hidden"]]
    for name, coder in calibration.coders.items():
        speeds = [f"{1e-6 * speed:.0f} MB/s" for speed in (coder.encode, coder.decode)]
        coders.append([name, *speeds, f"{coder.ratio:.2f}", f"{100 * coder.hidden:.0f} %"])
    others = {"hashing": calibration.hashing, "comparing": calibration.comparing}
    lines = [f"{name} {1e-6 * speed:.0f} MB/s" for name, speed in others.items()]
    if calibration.host is not None:
        lines.append(f"to the host {_describe(calibration.host.to_host, 1)}")
        lines.append(f"from the host {_describe(calibration.host.from_host, 1)}")
    lines.append(f"measured in {calibration.seconds:.1f} s")
    return "\n".join([aligned(rows, 1), *of_levels, aligned(coders, 1), ", ".join(lines)])


def _describe(curve: Curve, copies: int) -> str:
    """``copies``: how often each rank sends its bytes."""
    seconds = curve.seconds_per_byte / copies
    rate = f"{8e-6 / seconds:.0f} Mbit/s" if seconds else "any rate"
    return f"{1e6 * curve.latency:.0f} us + {rate} (+- {100 * curve.error:.0f} %)"


def _ranges(ranks: tuple[int, ...]) -> str:
    """Ranks in ascending order, as in ``0-3,8``."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    return ",".join("-".join(map(str, ends)) for ends in ranges)


def as_json(calibration: Calibration) -> dict[str, Any]:
    """All of it, as strict JSON holds it."""
    return json.loads(json.dumps(asdict(calibration), allow_nan=False))
