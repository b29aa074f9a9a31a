"""What calibration and sampling time is the work of training: the same operations of torch, of the
coder and of checksums, on as many bytes, in memory that is no other operand's."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from narrowcast import narrow_all_gather, narrow_reduce_scatter
from narrowcast.agreement import sharded_groups
from narrowcast.allgather.codec import Scheme
from narrowcast.autotune import (
    calibration,
    gradients,
    links,
    sample_stats,
    stopwatch,
    timed_gather,
)
from narrowcast.errors import Job
from narrowcast.wire import packet
from narrowcast.wire.coders import CODERS, Zstd, find_coder
from narrowcast.wire.floats import LAYOUTS
from torchtitan_ext.benchmarks import placement

BF16 = LAYOUTS[torch.bfloat16]
NUM_VALUES = 1 << 15
LEAST_BYTES = NUM_VALUES // 16  # of an operation that counts; headers and sizes are smaller
SCHEMES = {
    "delta": Scheme("delta"),
    "exponent_delta": Scheme("exponent"),
    "blocks": Scheme("exponent", "blocks", 64),
    "hashes": Scheme("exponent", "blocks", 512, "hash"),
    "entropy": Scheme("entropy"),
    "none": Scheme("none"),
}


@dataclass
class Work(TorchDispatchMode):
    """Records operations on many bytes, but for views and allocations.

    Attributes:
        done: by name and bytes of the largest operand or result.
        idle: comparisons and copies of a tensor with itself, which take no time.
        marks: copies of ``done``, one whenever the clock was read.
    """

    done: Counter[tuple[str, int]] = field(default_factory=Counter)
    idle: list[str] = field(default_factory=list)
    marks: list[Counter[tuple[str, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        operands, results = (
            [x for x in tree_leaves(y) if isinstance(x, Tensor)] for y in (args, out)
        )
        name = func.overloadpacket._qualified_op_name
        if name in ("aten::clone", "aten::_to_copy"):
            self.note("copy", *results)
        elif not (func.is_view or "empty" in name or "detach" in name):
            self.note(name, *operands, *results)
            addresses = [x.data_ptr() for x in operands]
            if name in ("aten::equal", "aten::copy_") and len(set(addresses)) < len(addresses):
                self.idle.append(name)
        return out

    def note(self, name: str, *tensors: Tensor) -> None:
        nbytes = max((x.numel() * x.element_size() for x in tensors), default=0)
        if nbytes >= LEAST_BYTES:
            self.done[name, nbytes] += 1

    def read_clock(self) -> float:
        self.marks.append(self.done.copy())
        return float(len(self.marks))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records coders and checksums too, which torch does not dispatch."""

        def noted(name: str, function: Callable, position: int) -> Callable:
            def call(*args: Any) -> Any:
                self.note(name, *(x for x in args[position:] if isinstance(x, Tensor)))
                return function(*args)

            return call

        with (
            patch.object(Zstd, "encode", noted("encode", Zstd.encode, 1)),
            patch.object(Zstd, "decode", noted("decode", Zstd.decode, 1)),
            patch.object(packet, "checksum", noted("checksum", packet.checksum, 0)),
            patch.object(dist, "all_gather_single", undispatched(dist.all_gather_single)),
            patch.object(dist, "all_reduce", undispatched(dist.all_reduce)),
            patch.object(dist, "batch_isend_irecv", undispatched(dist.batch_isend_irecv)),
            patch("narrowcast.util.time", SimpleNamespace(perf_counter=self.read_clock)),
            self,
        ):
            yield


def undispatched(collective: Callable) -> Callable:
    """The collective without dispatch: it must not hold Python's lock while gloo takes its own."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return collective(*args, **kwargs)

    return call


def _segments(work: Work) -> list[Counter[tuple[str, int]]]:
    """The operations between each two readings of the clock that belong together."""
    return [stop - start for start, stop in zip(work.marks[::2], work.marks[1::2], strict=True)]


def _model() -> tuple[nn.Module, Tensor, Tensor]:
    """A sharded layer, and a local shard before and after a step, fp32, equal on every rank."""
    size = int((2 * NUM_VALUES) ** 0.5)
    model = nn.Linear(size, size, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    generator = torch.Generator().manual_seed(0)
    old_N = torch.randn(NUM_VALUES, generator=generator)
    return model, old_N, old_N + 1e-3 * torch.randn(NUM_VALUES, generator=generator)


def _gathers(name: str) -> list[tuple[Counter, Counter, list[str]]]:
    """Of the first gather of a step and of a later one: operations in training, timed operations,
    and those that take no time."""
    model, old_N, new_N = _model()
    scheme = SCHEMES[name]
    handle = narrow_all_gather(
        model,
        compression=scheme.compression,
        exponent_coding=scheme.exponent_coding,
        block_size=scheme.block_size,
        block_check=scheme.block_check,
    )
    handle.ledger.sample_interval = 0
    (comm,) = handle._comms
    group = comm.group
    gathered = torch.empty(2 * NUM_VALUES, dtype=torch.bfloat16)
    local = model.weight.to_local()

    def gather(work: Work, prepares: bool) -> None:
        shard = group.shard().view(torch.bfloat16)
        with torch.no_grad(), work.recorded():
            if prepares:
                handle.refresh()
            comm(gathered, shard, group.process_group)

    with torch.no_grad():
        local.view(-1).copy_(old_N)
    gather(Work(), prepares=True)
    handle.ledger.end_step()
    with torch.no_grad():
        local.view(-1).copy_(new_N)
    trained = [Work(), Work()]
    gather(trained[0], prepares=True)
    gather(trained[1], prepares=False)
    handle.remove()

    old_bits, new_bits = (x.bfloat16().view(torch.int16) for x in (old_N, new_N))
    found = []
    for is_first, of_training in zip((True, False), trained, strict=True):
        timed = Work()
        gathered = timed_gather.TimedGather(scheme, BF16, find_coder("zstd"))
        with timed.recorded():
            gathered.gather(old_bits if is_first else new_bits, new_bits, is_first)
        segments = _segments(timed)
        expected = segments.pop(0) if is_first else Counter()
        hashes = scheme.exponent_coding == "blocks" and bool(segments.pop(0))
        expected += segments[0] + segments[1] + segments[1]
        if scheme.caches_hashes:  # a sender caches few bytes of its own instead of exponents
            assert hashes
            expected += segments[2]
            expected["aten::copy_", NUM_VALUES] -= 1
        found.append((of_training.done, expected, of_training.idle + timed.idle))
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_sampling_times_the_work_of_a_gather(ranks, name: str) -> None:
    """Preparing and encoding by one rank, and decoding for every rank."""
    for first, later in ranks(2).run(_gathers, name):
        for trained, timed, idle in (first, later):
            assert timed == trained
            assert idle == []
    assert sum(first[0].values()) > 6


def test_nothing_that_is_timed_compares_a_tensor_with_itself() -> None:
    """``torch.equal(x, x)`` returns at once, so that unchanged shards would seem cheaper than they
    are."""
    work = Work()
    generator = torch.Generator().manual_seed(0)
    old_N = torch.randn(NUM_VALUES, generator=generator).bfloat16().view(torch.int16)
    with work.recorded():
        timed_gather.sample_chunk(old_N, old_N ^ 1, BF16, SCHEMES["delta"], find_coder("zstd"))
    assert work.idle == []
    # Of each compression, what was prepared with what is gathered; the unchanged with its cache.
    assert work.done["aten::equal", 2 * NUM_VALUES] == len(sample_stats.COMPRESSIONS) + 2


def _reduction(kind: str) -> tuple[Counter, Counter, list[str]]:
    """Operations in training, timed operations, and those that take no time."""
    model, *_ = _model()
    counted = narrow_reduce_scatter(model, compression="entropy")
    counted.ledger.sample_interval = 0
    (comm,) = counted._comms
    group = comm.group
    generator = torch.Generator().manual_seed(0)
    values_N = torch.randn(NUM_VALUES, generator=generator)
    if kind == "zeros":
        values_N.zero_()
    elif kind == "of bf16":
        values_N = values_N.bfloat16().float()
    trained, timed = Work(), Work()
    rows_WN = torch.stack([values_N, values_N])
    with trained.recorded():
        output_N = torch.empty_like(values_N)
        group.reduce_scatter(output_N, rows_WN.view(-1), group.process_group, dist.ReduceOp.SUM)
    counted.remove()
    with timed.recorded():
        gradients.sample_chunk(values_N, find_coder("zstd"))
    start, encoded, decoded, added = timed.marks
    assert added - decoded == {("aten::add_", 4 * NUM_VALUES): 1}  # a row; the first is copied
    trained.done -= Counter({("aten::copy_", 4 * NUM_VALUES): 1, ("aten::add_", 4 * NUM_VALUES): 1})
    return trained.done, (encoded - start) + (decoded - encoded), trained.idle + timed.idle


@pytest.mark.parametrize("kind", ["of fp32", "of bf16", "zeros"])
def test_sampling_times_the_work_of_a_reduction(ranks, kind: str) -> None:
    for trained, timed, idle in ranks(2).run(_reduction, kind):
        assert timed == trained
        assert idle == []


@dataclass(frozen=True)
class Sent:
    """A collective of the calibration: what it sends, and memory that it writes to."""

    name: str
    nbytes: int
    repeats_a_byte: bool
    target: int | None


def _calibrated() -> tuple[list[Sent], Counter[tuple[str, int]], list[str]]:
    model, *_ = _model()
    groups = sharded_groups(model)
    sent: list[Sent] = []
    kept_alive: list[Tensor] = []

    def note(name: str, source: Tensor, target: Tensor | None) -> None:
        kept_alive.extend([source] if target is None else [source, target])
        data = source.contiguous().view(torch.uint8)
        address = None if target is None else target.data_ptr()
        sent.append(Sent(name, data.numel(), len(data.unique()) < 100, address))

    def noted(name: str) -> Any:
        collective = getattr(dist, name)

        def call(target: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
            note(name, source, target)
            return collective(target, source, *args, **kwargs)

        return patch.object(dist, name, call)

    swap = dist.batch_isend_irecv

    def noted_swap(operations: list[dist.P2POp]) -> Any:
        for one in operations:
            if one.op is dist.isend:
                note("swap", one.tensor, None)
        return swap(operations)

    work = Work()
    ticks = itertools.count()

    def tick() -> float:
        return next(ticks) * 2.0**-20

    with (
        patch.object(calibration, "perf_counter", tick),
        patch.object(stopwatch, "perf_counter", tick),
        patch("narrowcast.util.time", SimpleNamespace(perf_counter=tick)),
        noted("all_gather_single"),
        noted("reduce_scatter_single"),
        patch.object(dist, "batch_isend_irecv", noted_swap),
        patch.object(links, "raise_alike", wraps=links.raise_alike) as agreed,
        _work_outside_collectives(work),
    ):
        calibration.calibrate(groups, CODERS, Job())
    swaps = sum(one.name == "swap" for one in sent)
    assert 2 * agreed.call_count == swaps  # a size and a payload for the one other rank
    return sent, work.done, work.idle


@contextmanager
def _work_outside_collectives(work: Work) -> Iterator[None]:
    names = ("all_gather_single", "reduce_scatter_single", "all_reduce", "barrier")
    with ExitStack() as stack:
        for name in (*names, "batch_isend_irecv"):
            stack.enter_context(patch.object(dist, name, undispatched(getattr(dist, name))))
        stack.enter_context(work)
        yield


def test_links_are_measured_by_data_that_no_link_makes_smaller_into_fresh_memory(ranks) -> None:
    for sent, done, idle in ranks(2).run(_calibrated):
        large = [one for one in sent if one.nbytes >= 4096]
        assert {one.name for one in large} == {"all_gather_single", "reduce_scatter_single", "swap"}
        assert not any(one.repeats_a_byte for one in large)
        targets = [one.target for one in large if one.target is not None]
        assert len(targets) == len(set(targets))
        # Each repeat of an unchanged gather compares the whole shard with what is cached.
        assert done["aten::equal", 2 * NUM_VALUES] >= 5
        assert idle == []


def test_the_search_is_timed_on_layers_that_differ() -> None:
    with patch.object(placement, "make_plan") as make_plan:
        placement.speed(num_layers=3, num_experts=16, num_ranks=4)
    (trace, num_ranks), _ = make_plan.call_args
    assert num_ranks == 4
    assert not any(torch.equal(trace.ids_LTK[i], trace.ids_LTK[i - 1]) for i in range(3))
