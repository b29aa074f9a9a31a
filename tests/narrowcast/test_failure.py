"""Whatever fails on one rank alone, and wherever: every rank raises the same named error, soon."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowcast
from narrowcast import NarrowcastError, all_gather, errors, narrow_all_gather
from narrowcast.allgather import codec, comm
from narrowcast.autotune import controller, sampling
from tests.narrowcast.training import Setup, build, narrowed, train
from tests.ranks import Raised, Ranks

SOON_S = 10
_ALL_LINES_S = 1500
_PACKAGE = str(Path(narrowcast.__file__).parent)
Place = tuple[str, int]  # a file of the package, and a line of it

NONE_LEFT = MemoryError("none left")
GRADIENTS = {"compression": "entropy"}
SCENARIOS = {
    "delta": {"compression": "delta", "verify_interval": 2},
    "auto": {"compression": "auto", "warmup_steps": 3, "reselect_interval": 2},
    "observe": {"compression": "observe", "warmup_steps": 3, "reselect_interval": 2},
    "exponent_delta": {"compression": "exponent"},
    "blocks": {"compression": "exponent", "exponent_coding": "blocks"},
    "hashes": {"compression": "exponent", "exponent_coding": "blocks", "block_check": "hash"},
    "entropy": {"compression": "entropy"},
    "none": {"compression": "none"},
}


@contextmanager
def _tracing(on_place: Callable[[Place], None], every_line: bool) -> Iterator[None]:
    """Calls ``on_place`` for each function of the package, or each line, that is run where its
    exceptions are everybody's. What it raises is raised there."""
    together = errors.Job.together

    @contextmanager
    def traced(*args: Any) -> Iterator[None]:
        outer = sys.gettrace()
        with together(*args):
            sys.settrace(trace)  # here alone: it slows down all that is called
            try:
                yield
            finally:
                sys.settrace(outer)

    def trace(frame: FrameType, event: str, _: Any) -> Callable | None:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == ("line" if every_line else "call"):
            on_place((frame.f_code.co_filename, frame.f_lineno))
        return trace if every_line else None

    errors.Job.together = traced
    try:
        yield
    finally:
        errors.Job.together = together


def _train(setup: Setup, around: Callable = lambda: _tracing(lambda _: None, False)) -> None:
    model, optimizer = build(setup)
    with narrowed(setup, model, optimizer):
        with around():
            train(setup, model, optimizer)
        with errors.job_of(None).informed():  # one may have failed after the last collective
            dist.barrier()


def _places(setup: Setup, every_line: bool) -> list[Place]:
    """All that are passed in training, in the order in which they are first passed."""
    places: dict[Place, None] = {}
    _train(setup, lambda: _tracing(lambda place: places.update({place: None}), every_line))
    return list(places)


def _fail_at(place: Place, every_line: bool, setup: Setup) -> tuple[str, str, float]:
    """The error of this rank, and when it came, where the last rank alone has no memory there."""

    def fail(passed: Place) -> None:
        if passed == place and dist.get_rank() == dist.get_world_size() - 1:
            raise NONE_LEFT

    start = time.monotonic()
    try:
        _train(setup, lambda: _tracing(fail, every_line))
    except NarrowcastError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "no error", 0.0


def _fail_everywhere(
    setup: Setup, known: Setup | None, every_line: bool, stride: int, folder: str
) -> list[tuple[Place, tuple[str, str, float]]]:
    """A fresh model and fresh process groups for each place that ``known`` does not pass, or for
    one in ``stride`` of them."""
    patched = pytest.MonkeyPatch()
    patched.setattr(all_gather, "Sampler", partial(sampling.Sampler, share=1e9))
    calibrate = _once(partial(controller.calibration.calibrate, seconds=0.05))
    patched.setattr(controller.calibration, "calibrate", calibrate)
    found = []
    start_anew(folder, "first")
    passed = _places(known, every_line) if known is not None else []
    places = [[place for place in _places(setup, every_line) if place not in set(passed)]]
    dist.broadcast_object_list(places, src=dist.get_world_size() - 1)
    for number, place in enumerate(places[0][::stride]):
        start_anew(folder, str(number))
        found.append((place, _fail_at(place, every_line, setup)))
    return found


def _once(function: Callable) -> Callable:
    """What the first call returned, whatever the later ones are given: before training begins,
    where nothing fails yet, a link need not be measured again."""
    returned: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not returned:
            returned.append(function(*args, **kwargs))
        return returned[0]

    return call


def start_anew(folder: str, name: str) -> None:
    """Fresh process groups in the place of those that an error has closed."""
    errors._GRACE_S = 0.05
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=3 * SOON_S),
    )


def _assert_all_alike(
    setup: Setup, known: Setup | None = None, every_line: bool = False, stride: int = 1
) -> int:
    """How many places there were at which a failure is an error, and not made good."""
    with tempfile.TemporaryDirectory() as folder:
        job = Ranks(2)
        try:
            by_rank = job.outcomes(
                _fail_everywhere, setup, known, every_line, stride, folder, timeout_s=_ALL_LINES_S
            )
        finally:
            job.end()
    num_errors = 0
    for of_place in zip(*by_rank, strict=True):
        (place, first), *_ = of_place
        for _, (kind, message, seconds) in of_place:
            assert (kind, message) == first[:2], (place, of_place)
            assert seconds < SOON_S, (place, seconds)
        if first[0]:
            assert "none left" in first[1], (place, first)
            num_errors += 1
    return num_errors


def _scenario(name: str) -> Setup:
    steps = 4 if name in ("auto", "observe") else 2
    return Setup(narrow=SCENARIOS[name], gradients=GRADIENTS, steps=steps)


def test_a_rank_that_fails_in_any_function_of_a_step_ends_all_with_its_error() -> None:
    """One function in two; the wide test below tries every line."""
    assert _assert_all_alike(_scenario("delta"), stride=2) > 20


def test_a_rank_that_fails_where_compressions_are_chosen_ends_all_with_its_error() -> None:
    """One function in eight; the wide test below tries every line."""
    assert _assert_all_alike(_scenario("auto"), known=_scenario("delta"), stride=8) > 2


@pytest.mark.wide
@pytest.mark.timeout(_ALL_LINES_S)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_rank_that_fails_at_any_line_ends_all_with_its_error(scenario: str) -> None:
    """Lines that an earlier scenario passes too are tried with it alone."""
    known = {"delta": None, "observe": _scenario("auto")}.get(scenario, _scenario("delta"))
    _assert_all_alike(_scenario(scenario), known, every_line=True)


def _fail_to_decode() -> None:
    """On rank 1, from now on."""
    errors._GRACE_S = 0.05
    if dist.get_rank() == 1:

        def decode(*_: object) -> None:
            raise NONE_LEFT

        codec.decode = decode


def _assert_same_error(outcomes: list[Raised]) -> None:
    assert {outcome.type for outcome in outcomes} == {"NarrowcastError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "none left (on rank 1)" in outcomes[0].message


def _fail_in_one_replica(setup: Setup) -> None:
    model, optimizer = build(setup)
    with narrowed(setup, model, optimizer):
        train(setup, model, optimizer)
        _fail_to_decode()
        train(setup, model, optimizer)


@pytest.mark.parametrize("counts", [True, False])
def test_ranks_of_another_replica_raise_it_too(ranks, counts: bool) -> None:
    narrow = {"compression": "delta", "volume": counts}
    setup = Setup(narrow=narrow, replicas=2, steps=2)
    _assert_same_error(ranks(4).outcomes(_fail_in_one_replica, setup, timeout_s=6 * SOON_S))


def _build_stage() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Ranks 0 and 1 hold the first stage of a pipeline, 2 and 3 the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=mesh["shard"])
    return model, torch.optim.AdamW(model.parameters())


def _stop_in_encoding() -> None:
    """A StopIteration is what a context manager lets through as it is."""
    model, optimizer = build(Setup())
    errors._GRACE_S = 0.05
    with narrowed(Setup(narrow={"compression": "delta"}), model, optimizer):
        if dist.get_rank() == 1:

            def find(*_: object) -> None:
                raise StopIteration("none left")

            comm.NarrowAllGather.state_of = find
        train(Setup(), model, optimizer)


def test_every_kind_of_error_is_made_the_same(ranks) -> None:
    outcomes = ranks(2).outcomes(_stop_in_encoding, timeout_s=6 * SOON_S)
    assert {outcome.type for outcome in outcomes} == {"NarrowcastError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "failed on rank 1: StopIteration: none left" in outcomes[0].message


def _fail_late() -> tuple[str, bool]:
    """Both ranks fail, one of them long after the other has ceased to wait for it."""
    job = errors.job_of(None)
    errors._GRACE_S = 0.2

    @job.together("a call")
    def fail() -> None:
        time.sleep(2 * dist.get_rank())
        raise NONE_LEFT

    with pytest.raises(NarrowcastError) as error:
        fail()
    return str(error.value), job.error is not None


def test_ranks_that_fail_long_after_each_other_agree_that_all_is_over(ranks) -> None:
    first = "a call failed on rank 0: MemoryError: none left"
    assert ranks(2).run(_fail_late) == [(first, True)] * 2


def _train_stages(passes_on: bool) -> None:
    model, optimizer = _build_stage()
    narrow_all_gather(model, optimizer, compression="delta")
    rank, x_TD = dist.get_rank(), torch.ones(2, 8)
    for step in range(200):
        if step == 2:
            _fail_to_decode()
        if passes_on and rank >= 2:
            dist.recv(x_TD, src=rank - 2)
        y_TD = model(x_TD)
        if passes_on and rank < 2:
            dist.send(y_TD.detach(), dst=rank + 2)
        y_TD.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)


def _train_stages_informed() -> None:
    """As torchtitan's trainer does with the plugin."""
    with errors.job_of(None).informed():
        _train_stages(passes_on=True)


def test_a_stage_that_waits_for_no_other_raises_it_too(ranks) -> None:
    _assert_same_error(ranks(4).outcomes(_train_stages, False, timeout_s=6 * SOON_S))


def test_a_stage_that_waits_in_a_receive_of_its_own_raises_it_too(ranks) -> None:
    _assert_same_error(ranks(4).outcomes(_train_stages_informed, timeout_s=6 * SOON_S))


def _narrow_stages(wrong: str) -> None:
    model, optimizer = _build_stage()
    is_second = dist.get_rank() >= 2
    arguments: dict[str, Any] = {"compression": "delta"}
    if is_second and wrong == "a pattern":
        arguments["parameters"] = ["*.no_such"]
    if is_second and wrong == "a model that is not sharded":
        model = nn.Linear(8, 8)
    narrow_all_gather(model, optimizer, **arguments)


@pytest.mark.parametrize("wrong", ["a pattern", "a model that is not sharded"])
def test_what_is_wrong_on_one_stage_is_told_on_all(ranks, wrong: str) -> None:
    outcomes = ranks(4).outcomes(_narrow_stages, wrong, timeout_s=6 * SOON_S)
    assert {outcome.type for outcome in outcomes} == {"ValueError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert outcomes[0].message.startswith("on rank 2: ")


def _narrow_on_two_of_four() -> int:
    """The others do something else."""
    all_gather.Sampler = partial(sampling.Sampler, share=1e9)
    group = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "shard"))["shard"]
    if dist.get_rank() >= 2:
        return 0
    model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = narrow_all_gather(
        model, optimizer, compression="auto", warmup_steps=3, process_group=group
    )
    for _ in range(5):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    chosen = handle.selection.choice is not None
    handle.remove()
    return int(chosen)


def test_a_job_may_be_some_of_the_ranks() -> None:
    job = Ranks(4)
    try:
        assert job.run(_narrow_on_two_of_four) == [1, 1, 0, 0]
    finally:
        job.end()
