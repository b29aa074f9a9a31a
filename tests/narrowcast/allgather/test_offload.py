"""Caches in host memory come back bitwise identical, however late the device does its work."""

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from narrowcast import all_gather
from narrowcast.allgather import offload
from narrowcast.allgather.codec import Scheme
from narrowcast.allgather.offload import HostCopies, Prefetcher, ShardCache, host_copies
from tests.narrowcast.test_all_gather import COMPRESSIONS, MODES, _differing
from tests.narrowcast.training import Setup, build, narrow, same_bits, state_of, train

CPU = torch.device("cpu")
GARBAGE = os.getpid() % 256  # another on each rank, or they would agree on it
_copy, _to_device = Tensor.copy_, HostCopies.to_device


@dataclass(eq=False)
class Stream:
    """Work in order. A late stream does none before it is waited for; others do it at once."""

    late: bool
    work: deque[Callable[[], object]] = field(default_factory=deque)
    done: int = 0

    def submit(self, work: Callable[[], object]) -> None:
        self.work.append(work)
        if not self.late:
            self.run(self.record_event().position)

    def run(self, position: int) -> None:
        while self.done < position:
            self.done += 1
            self.work.popleft()()

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(stream=self, position=self.done + len(self.work))

    def wait_event(self, event: SimpleNamespace) -> None:
        self.submit(lambda: event.stream.run(event.position))

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())


class Device:
    """A device of two streams, of which one is late. Memory that is freed is overwritten as soon as
    the stream that it comes from, and those recorded for it, allow."""

    def __init__(self, late: str) -> None:
        self.computing, self.copying = Stream(late == "computing"), Stream(late == "copying")
        self.current = self.computing
        self.pinned: list[int] = []

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before

    def empty(
        self,
        shape: torch.Size,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        pin_memory: bool = False,
    ) -> Tensor:
        tensor = _overwritten(torch.empty(shape, dtype=dtype))
        if pin_memory:
            self.pinned.append(tensor.data_ptr())
        else:
            tensor.used_by = {self.current}
            weakref.finalize(tensor, _free, tensor.detach(), tensor.used_by)
        return tensor

    def finish(self) -> None:
        for stream in (self.computing, self.copying):
            stream.run(stream.record_event().position)


def _overwritten(memory: Tensor) -> Tensor:
    memory.view(torch.uint8).fill_(GARBAGE)
    return memory


def _free(memory: Tensor, used_by: set[Stream]) -> None:
    late = [stream for stream in used_by if stream.late]
    if late:
        late[0].submit(lambda: _overwritten(memory))
    else:
        _overwritten(memory)


@contextmanager
def emulated(late: str) -> Iterator[Device]:
    """Copies go through the streams of the device."""
    device = Device(late)
    cuda = SimpleNamespace(stream=device.stream, current_stream=lambda _: device.computing)
    names = SimpleNamespace(empty=device.empty, OutOfMemoryError=torch.OutOfMemoryError)

    def copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        target, values = to.detach(), source.detach()
        device.current.submit(lambda: _copy(target, values))
        return to

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        getattr(tensor, "used_by", set()).add(stream)

    with (
        patch.object(offload, "cuda", cuda),
        patch.object(offload, "torch", names),
        patch.object(Tensor, "copy_", copy),
        patch.object(Tensor, "record_stream", record_stream),
    ):
        yield device


def _rows(seed: int) -> list[list[Tensor]]:
    """Of two ranks: all bit patterns of 16 bits, hence every NaN, and each dtype that is cached."""
    generator = torch.Generator().manual_seed(seed)

    def words(dtype: torch.dtype, *shape: int) -> Tensor:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        return torch.randint(least, most, shape, dtype=dtype, generator=generator)

    every_NaN = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).roll(seed)
    nan_payloads = torch.tensor([0x7F800001, -1, 0x7FC12345, 1 << 31, seed]).to(torch.int32)
    return [
        [every_NaN, words(torch.uint8, 1001), words(torch.int64, 7, 2), words(torch.int16, 0)],
        [words(torch.int16, 65536), nan_payloads, words(torch.int64, 7, 2), words(torch.uint8, 1)],
    ]


def _store(cached: ShardCache, rows: list[list[Tensor]], empty: Callable[..., Tensor]) -> None:
    for rank, row in enumerate(rows):
        for chunk, values in enumerate(row):
            tensor = empty(values.shape, dtype=values.dtype)
            tensor.copy_(values)
            cached.store(rank, chunk, tensor)
            del tensor  # the device uses its memory for something else


def _taken(cached: ShardCache) -> list[list[Tensor]]:
    """What a consumer on the device reads of the rows it takes."""
    read = []
    for rank in range(len(cached)):
        row = cached.take(rank)
        read.append([torch.empty_like(tensor) for tensor in row])
        while row:
            read[-1][len(row) - 1].copy_(row[-1])
            row.pop()
    return read


def _same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    pairs = [pair for rows in zip(a, b, strict=True) for pair in zip(*rows, strict=True)]
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("late", ["copying", "computing"])
def test_what_comes_back_is_bitwise_identical_to_what_was_cached(late: str, ahead: bool) -> None:
    read = []
    with emulated(late) as device:
        cached = ShardCache(2, 4, HostCopies(CPU, device.copying))
        for seed in range(3):
            _store(cached, _rows(seed), device.empty)
            if ahead:
                cached.fetch()
            read += [_taken(cached), _taken(cached)]
        device.finish()
    assert all(_same(read[2 * seed + i], _rows(seed)) for seed in range(3) for i in range(2))
    assert cached.nbytes == sum(values.nbytes for row in _rows(0) for values in row)


def test_buffers_are_pinned_and_overwritten() -> None:
    with emulated("copying") as device:
        cached = ShardCache(2, 4, HostCopies(CPU, device.copying))
        for seed in range(3):
            _store(cached, _rows(seed), device.empty)
        assert device.pinned == [buffer.data_ptr() for rank in range(2) for buffer in cached[rank]]


def test_devices_without_streams_copy_plainly() -> None:
    copies = HostCopies(CPU)
    cached = ShardCache(2, 4, copies)
    assert cached.take(1) == [None] * 4
    for seed in range(2):
        _store(cached, _rows(seed), torch.empty)
        cached.fetch()
        assert _same(_taken(cached), _rows(seed))
    assert cached.take(0)[0].data_ptr() != cached[0][0].data_ptr()


@pytest.mark.parametrize("cache_device", ["device", "cpu"])
def test_caches_of_a_cpu_device_stay_where_they_are(cache_device: str) -> None:
    cached = ShardCache(1, 2, host_copies(CPU, cache_device))
    first = torch.tensor([1, 2])
    cached.store(0, 0, first)
    cached.fetch()
    assert cached.take(0)[0] is first
    cached.store(0, 0, torch.tensor([3, 4]))
    assert cached.take(0)[0] is first
    assert first.tolist() == [3, 4]


def test_what_was_fetched_is_taken_once_and_never_out_of_date() -> None:
    cached = ShardCache(2, 1, HostCopies(CPU))
    to_device = patch.object(HostCopies, "to_device", autospec=True, side_effect=_to_device)
    with to_device as calls:
        cached.store(0, 0, torch.tensor([1]))
        cached.fetch([0])
        cached.fetch([0])
        assert (cached.take(0)[0].item(), calls.call_count) == (1, 1)
        cached.fetch()
        assert calls.call_count == 3
        cached.store(0, 0, torch.tensor([2]))
        assert (cached.take(0)[0].item(), calls.call_count) == (2, 4)


def test_clearing_frees_buffers_and_what_was_fetched() -> None:
    cached = ShardCache(1, 1, HostCopies(CPU))
    cached.store(0, 0, torch.tensor([1]))
    cached.fetch()
    held = [weakref.ref(cached[0][0]), weakref.ref(cached._arriving[0].tensors[0])]
    cached.clear()
    assert [ref() for ref in held] == [None, None]
    assert (cached.nbytes, cached.take(0)) == (0, [None])


def test_a_device_without_memory_left_is_asked_again() -> None:
    cached = ShardCache(1, 1, HostCopies(CPU))
    cached.store(0, 0, torch.tensor([1]))
    with patch.object(HostCopies, "to_device", side_effect=torch.OutOfMemoryError):
        cached.fetch()
    assert cached.take(0)[0].item() == 1


def _groups() -> dict[str, ShardCache]:
    return {name: ShardCache(2, 1, HostCopies(CPU)) for name in "RABC"}


def _held(groups: dict[str, ShardCache]) -> str:
    """Which groups lie on the device."""
    return "".join(name for name, cached in groups.items() if cached._arriving)


def _take(cached: ShardCache) -> None:
    for rank in range(len(cached)):
        cached.take(rank)


MICROBATCH = "RABC" + "CBA"  # forward, backward; the root stays gathered in between


def test_a_gather_finds_what_it_needs_fetched_and_at_most_one_group_more_is_on_the_device() -> None:
    groups, prefetcher = _groups(), Prefetcher()
    before = ""
    for microbatch in range(4):
        for name in MICROBATCH:
            if microbatch >= 2 and name != before:
                assert _held(groups) == name
            prefetcher.starts(groups[name])
            prefetcher.finishes(groups[name])
            assert len(_held(groups)) <= 2
            _take(groups[name])
            before = name


def test_gathers_that_overlap_fetch_no_group_beyond_themselves() -> None:
    groups, prefetcher = _groups(), Prefetcher()
    prefetcher.starts(groups["R"])
    for name, following in pairwise(3 * "RABCBA"):
        prefetcher.starts(groups[following])
        prefetcher.finishes(groups[name])
        assert set(_held(groups)) == {name, following}
        _take(groups[name])


def test_a_group_that_was_predicted_in_vain_is_freed() -> None:
    groups, prefetcher = _groups(), Prefetcher()
    for name in "ABCABC":
        prefetcher.starts(groups[name])
        prefetcher.finishes(groups[name])
        _take(groups[name])
    assert _held(groups) == "A"
    prefetcher.starts(groups["R"])
    assert _held(groups) == "R"
    prefetcher.finishes(groups["R"])
    prefetcher.forget()
    old = weakref.ref(groups.pop("A"))
    assert old() is None


@contextmanager
def _in_host_memory() -> Iterator[None]:
    """Caches move between emulated memories, and copies are late."""
    with emulated("copying") as device:
        copies = HostCopies(CPU, device.copying)
        with patch.object(all_gather, "host_copies", lambda *_: copies):
            yield
    assert device.pinned


def _differing_from_host(setup: Setup, compressions: dict[str, dict]) -> list[str]:
    with _in_host_memory():
        return _differing(setup, compressions)


@pytest.mark.parametrize("mode", ["async", "resharded to pairs"])
def test_caches_in_host_memory_train_as_plain(ranks, mode: str) -> None:
    chosen = {name: COMPRESSIONS[name] for name in ("delta", "blocks-hash")}
    setup = replace(Setup(), **MODES[mode])
    assert ranks(4).run(_differing_from_host, setup, chosen) == [[]] * 4


def _differs_after_changes_of_compression() -> bool:
    """Values, of which exponents are cached, and then nothing in all groups but one."""
    setup = Setup(steps=6)
    model, optimizer = build(setup)
    train(setup, model, optimizer)
    plain_state = state_of(model, optimizer)
    setup = Setup(steps=2, narrow=COMPRESSIONS["delta"])
    with _in_host_memory():
        model, optimizer = build(setup)
        handle, _ = narrow(setup, model, optimizer)
        train(setup, model, optimizer)
        held = [
            weakref.ref(state.codec.cache)
            for comm in handle._comms
            for state in comm.states.values()
        ]
        for comm in handle._comms:
            comm.change_schemes({name: Scheme("exponent") for name in comm.schemes})
        assert [cached() for cached in held] == [None] * len(held)
        train(setup, model, optimizer, first_step=2)
        for comm in handle._comms[1:]:
            comm.change_schemes(None)
        train(setup, model, optimizer, first_step=4)
        same = same_bits(state_of(model, optimizer), plain_state)
        handle.remove()
    return not same


def test_caches_in_host_memory_follow_a_change_of_compression(ranks) -> None:
    assert ranks(2).run(_differs_after_changes_of_compression) == [False] * 2
