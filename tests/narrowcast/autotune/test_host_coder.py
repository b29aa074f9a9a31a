"""Where no entropy coder runs on the device, ``auto`` leaves baseline FSDP2 in place and says so,
and an explicit compression warns of its cost. The model is on the CPU, and zstd said to run on CUDA
alone, so that all of the real decision runs."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from narrowcast import narrow_all_gather, narrow_reduce_scatter
from narrowcast.autotune.host_coder import seconds_per_byte
from narrowcast.wire.coders import Zstd, find_coder, runs_on
from tests.narrowcast.autotune.test_controller import SLOW, on_a_link
from tests.narrowcast.autotune.test_trial import log_of_narrowcast
from tests.narrowcast.training import Setup, build, same_bits, state_of, train

CALLS = {"all-gather": narrow_all_gather, "reduce-scatter": narrow_reduce_scatter}


def test_zstd_runs_on_the_cpu_alone() -> None:
    coder = find_coder("auto")
    assert runs_on(coder, torch.device("cpu"))
    assert not runs_on(coder, torch.device("cuda", 0))


def test_the_speed_of_a_coder_is_measured() -> None:
    assert all(0 < seconds < 1e-3 for seconds in seconds_per_byte(find_coder("auto")))


def _narrowed(call: str, device_type: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What is logged, whether anything is chosen, and the share of bytes, on a slow link."""
    setup = Setup(steps=6)
    model, optimizer = build(setup)
    losses = train(setup, model, optimizer)
    plain = state_of(model, optimizer)
    with (
        on_a_link(SLOW),
        patch.object(Zstd, "device_types", frozenset({device_type})),
        log_of_narrowcast() as log,
    ):
        model, optimizer = build(setup)
        handle = CALLS[call](model, optimizer, **settings)
        equal = train(setup, model, optimizer) == losses
        equal = equal and same_bits(state_of(model, optimizer), plain)
        ratio = handle.ledger.last.scalars()[f"narrowcast/ratio/{call.replace('-', '_')}"]
        chooses = handle.selection is not None
        handle.remove()
    warned = [line for line in log if "no entropy coder runs on" in line]
    return {"warned": warned, "chooses": chooses, "ratio": ratio, "equal": equal}


@pytest.mark.parametrize("call", CALLS)
def test_auto_leaves_plain_in_place_and_says_so_once(ranks, call: str) -> None:
    first, second = ranks(2).run(_narrowed, call, "cuda", {"compression": "auto"})
    (warning,) = first["warned"]
    assert f"{call}: no entropy coder runs on cpu" in warning
    assert "leaves baseline FSDP2 in place" in warning
    assert "force = true" in warning
    assert second["warned"] == []
    for one in (first, second):
        assert not one["chooses"]
        assert one["ratio"] == 1
        assert one["equal"]


@pytest.mark.parametrize("call", CALLS)
def test_force_lets_auto_choose(ranks, call: str) -> None:
    settings = {"compression": "auto", "force": True, "warmup_steps": 3}
    for one in ranks(2).run(_narrowed, call, "cuda", settings):
        assert one["chooses"]
        assert one["warned"] == []
        assert one["equal"]


@pytest.mark.parametrize("call", CALLS)
def test_an_explicit_compression_warns_of_its_cost_and_is_done(ranks, call: str) -> None:
    first, second = ranks(2).run(_narrowed, call, "cuda", {"compression": "entropy"})
    (warning,) = first["warned"]
    assert f"s for one {call} of all parameters" in warning
    assert second["warned"] == []
    assert first["equal"]
    assert first["ratio"] < 1


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("device_type", "settings"),
    [
        ("cuda", {"compression": "none"}),  # needs no coder
        ("cuda", {"compression": "entropy", "force": True}),
        ("cpu", {"compression": "entropy"}),
        ("cpu", {"compression": "auto"}),
    ],
)
def test_there_is_no_warning_where_nothing_is_to_be_warned_of(
    ranks, call: str, device_type: str, settings: dict[str, Any]
) -> None:
    for one in ranks(2).run(_narrowed, call, device_type, settings):
        assert one["warned"] == []
        assert one["equal"]
