"""Compressions are chosen in training: alike on all ranks, within the budget, and the training
remains bitwise identical."""

import itertools
import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from narrowcast import NarrowedModel, all_gather, narrow_all_gather, narrow_reduce_scatter
from narrowcast.autotune import calibration, controller, sampling, solver, timed_gather
from narrowcast.autotune.calibration import Calibration
from narrowcast.autotune.coder_speed import CoderSpeed
from narrowcast.autotune.corrections import Corrections
from narrowcast.autotune.curves import Curve
from narrowcast.autotune.links import Links
from narrowcast.autotune.problem import Choice, Group
from narrowcast.fsdp2 import param_groups
from tests.narrowcast.training import Setup, build, local, same_bits, state_of, train
from tests.wide import wide_but

AUTO = {"compression": "auto", "warmup_steps": 4, "reselect_interval": 2}
SLOW, FAST = 1e-6, 1e-18  # seconds a byte
GIB = 1 << 30


def _calibrated(seconds_per_byte: float, groups: list, *_: Any, **__: Any) -> Calibration:
    """The calibration of a link of this speed, without latencies."""
    curve = Curve(0.0, seconds_per_byte, 0.0, (1,), (seconds_per_byte,))
    links = {
        group.process_group.group_name: Links(
            tuple(dist.get_process_group_ranks(group.process_group)), *[curve] * 3, 0.0, 0.0, 0.0
        )
        for group in groups
    }
    return Calibration(links, {"zstd": CoderSpeed("zstd", 1e9, 1e9, 3.0, 0.0)}, 1e9, 1e9, None, 0.0)


@contextmanager
def on_a_link(seconds_per_byte: float, tick: float = 1e-9) -> Iterator[None]:
    """Links have this speed, and each part of coding a chunk takes a tick."""
    ticks = itertools.count()
    with (
        patch.object(
            controller.calibration, "calibrate", lambda *a, **k: _calibrated(seconds_per_byte, *a)
        ),
        patch.object(timed_gather, "util", SimpleNamespace(now=lambda _: next(ticks) * tick)),
        patch.object(all_gather, "Sampler", partial(sampling.Sampler, share=math.inf)),
        patch.object(Corrections, "learn_coding", lambda *_: None),
        patch.object(Corrections, "learn_links", lambda *_: None),
    ):
        yield


def _narrow(setup: Setup, **settings: Any) -> tuple[Any, Any, NarrowedModel]:
    model, optimizer = build(setup)
    return model, optimizer, narrow_all_gather(model, optimizer, **{**AUTO, **settings})


def _compressions(handle: NarrowedModel) -> dict[str, str]:
    return {
        param.name: "plain" if comm.schemes is None else comm.schemes[param.name].compression
        for comm in handle._comms
        for param in comm.group.params
    }


def _train_auto(seconds_per_byte: float, setup: Setup, settings: dict[str, Any]) -> Any:
    """Trains with baseline FSDP2 and with ``auto``: compressions and bytes cached by step, and
    whether the training is bitwise identical."""
    model, optimizer = build(setup)
    losses = train(setup, model, optimizer)
    plain = state_of(model, optimizer)
    with on_a_link(seconds_per_byte):
        model, optimizer, handle = _narrow(setup, **settings)
        cached, steps = [], []
        optimizer.register_step_post_hook(lambda *_: cached.append(handle.cache_bytes))
        optimizer.register_step_post_hook(lambda *_: steps.append(_compressions(handle)))
        equal = train(setup, model, optimizer) == losses
        equal = equal and same_bits(state_of(model, optimizer), plain)
        cached.append(handle.cache_bytes)
        choice = handle.selection.choice
        handle.remove()
    return {"steps": steps, "equal": equal, "cached": cached, "choice": choice}


def test_on_a_slow_link_all_values_are_cached_after_the_warm_up(ranks) -> None:
    for one in ranks(2).run(_train_auto, SLOW, Setup(steps=6), {}):
        assert one["equal"]
        assert set(one["steps"][2].values()) == {"plain"}
        assert set(one["steps"][3].values()) == {"delta"}
        assert one["cached"][-1] == one["choice"].cache_bytes > 0
        assert one["choice"].seconds < 0.5 * one["choice"].plain_seconds


def _log_of(
    seconds_per_byte: float, compression: str, incompressible: bool = False
) -> tuple[list[str], Any, dict[str, float]]:
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logger, keep = logging.getLogger("narrowcast"), Keep()
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    with on_a_link(seconds_per_byte):
        setup = Setup(steps=5, reshard=not incompressible)
        model, optimizer = build(setup)

        def draw_all_bits(*_: Any) -> None:
            for parameter in model.parameters():
                shard = local(parameter.data)
                shard.view(torch.int32).random_(-(2**31), 2**31 - 1)

        if incompressible:
            optimizer.register_step_post_hook(draw_all_bits)
        handle = narrow_all_gather(model, optimizer, **{**AUTO, "compression": compression})
        train(setup, model, optimizer)
        last = _compressions(handle), handle.cache_bytes
        changes = {kind: c.values for kind, c in handle.ledger.last.changes.items()}
        handle.remove()
    logger.removeHandler(keep)
    return records, last, changes


@pytest.mark.parametrize("incompressible", [False, True])
def test_where_nothing_is_worthwhile_all_stays_plain_and_the_log_explains_it(
    ranks, incompressible: bool
) -> None:
    """On a fast link; on a slow one where all bits change in every step, and are gathered once."""
    logs = ranks(2).run(_log_of, SLOW if incompressible else FAST, "auto", incompressible)
    for _, (compressions, cache_bytes), _ in logs:
        assert set(compressions.values()) == {"plain"}
        assert cache_bytes == 0
    said = "\n".join(logs[0][0])
    assert "chosen after step 4" in said
    assert "plain" in said
    assert "is worthwhile on this link" in said
    assert logs[1][0] == []  # the first rank reports for all


def test_observing_reports_what_it_would_choose_and_changes_nothing(ranks) -> None:
    for records, (compressions, cache_bytes), changes in ranks(2).run(_log_of, SLOW, "observe"):
        assert set(compressions.values()) == {"plain"}
        assert cache_bytes == 0
        assert changes.keys() >= {"expert_ffn", "router", "norm"}
        if records:
            assert "would be chosen (nothing is applied)" in "\n".join(records)


@pytest.mark.parametrize(
    ("reshard", "share"),
    [
        pytest.param(True, 0.0, marks=pytest.mark.wide),
        (True, 0.3),
        pytest.param(2, 0.8, marks=pytest.mark.wide),
    ],
)
def test_the_budget_is_never_exceeded(ranks, reshard: bool | int, share: float) -> None:
    setup = Setup(steps=7, reshard=reshard)
    world_size = 4 if reshard == 2 else 2
    (unlimited, *_) = ranks(world_size).run(_train_auto, SLOW, setup, {})
    assert unlimited["cached"][-1] == unlimited["choice"].cache_bytes
    budget = int(share * unlimited["choice"].cache_bytes)
    for one in ranks(world_size).run(_train_auto, SLOW, setup, {"cache_budget_gib": budget / GIB}):
        assert one["equal"]
        assert max(one["cached"]) <= budget
        assert one["cached"][-1] == one["choice"].cache_bytes
        assert one["choice"].cache_bytes > 0.5 * budget or not budget


def _choose_in_noise(_: None) -> Any:
    """Every rank measures other times, and samples other chunks."""
    rank = dist.get_rank()
    with on_a_link(SLOW * 10**rank, tick=1e-7 * 7**rank):
        setup = Setup(steps=9, num_experts=7)
        model, optimizer, handle = _narrow(setup, cache_budget_gib=20_000 / GIB)
        chosen = []
        optimizer.register_step_post_hook(lambda *_: chosen.append(_compressions(handle)))
        train(setup, model, optimizer)
        handle.remove()
    return chosen


def test_all_ranks_choose_alike_whatever_each_of_them_measures(ranks) -> None:
    first, *others = ranks(3).run(_choose_in_noise, None)
    assert len(set(first[-1].values())) > 1
    assert all(other == first for other in others)


def _with_a_shard_that_jumps(_: None) -> list[str]:
    """From step 6 on one parameter is drawn anew in every step. (Each is gathered once a step, or
    caching its values would still be worthwhile for the second gather, in which nothing has
    changed.)"""
    with on_a_link(SLOW):
        setup = Setup(steps=12, reshard=False)
        model, optimizer, handle = _narrow(setup)
        jumper = dict(model.named_parameters())["0.experts.w1_EFD"]
        chosen, step = [], itertools.count(1)

        def jump(*_: Any) -> None:
            if next(step) >= 6:
                local(jumper.data).normal_()
            chosen.append(_compressions(handle))

        optimizer.register_step_pre_hook(jump)
        train(setup, model, optimizer)
        last, changed = _compressions(handle), handle.selection.num_changed
        handle.remove()
    others = {last[name] for name in ("0.experts.w2_EDF", "1.experts.w1_EFD", "1.experts.w2_EDF")}
    return [chosen[5]["0.experts.w1_EFD"], last["0.experts.w1_EFD"], *others, str(changed > 0)]


def test_a_shard_whose_change_rate_jumps_is_dropped(ranks) -> None:
    for before, after, *others, was_counted in ranks(2).run(_with_a_shard_that_jumps, None):
        assert before == "delta"
        assert after == "entropy"
        assert others == ["delta"]
        assert was_counted == "True"


@contextmanager
def ever_other_choices() -> Iterator[None]:
    """Each choice has other compressions for every shard, and plain for some group."""
    choices = itertools.count()
    choose = solver.choose

    def scripted(groups: list[Group], *arguments: Any) -> Choice:
        number = next(choices)
        shift = itertools.count(number)
        compressions = {
            group.name: {
                shard.name: ("delta", "exponent", "none", "entropy", "delta")[next(shift) % 5]
                for shard in group.shards
            }
            for index, group in enumerate(groups)
            if (index + number) % 4
        }
        return replace(choose(groups, *arguments), compressions=compressions)

    with patch.object(solver, "choose", scripted):
        yield


def _change_in_mid_run(setup: Setup, settings: dict[str, Any]) -> Any:
    with ever_other_choices():
        return _train_auto(SLOW, setup, {**settings, "warmup_steps": 3, "reselect_interval": 1})


MODES = {
    "exponent_delta": ({}, {}),
    "hashes": ({}, {"exponent_coding": "blocks", "block_check": "hash", "block_size": 64}),
    "resharded to pairs": ({"reshard": 2}, {}),
    "fp32, async, hsdp": (
        {"gathered": torch.float32, "async_unshard": True, "prefetch": True, "replicas": 2},
        {"verify_interval": 1},
    ),
}


@pytest.mark.parametrize("mode", wide_but(MODES, "fp32, async, hsdp"))
def test_training_is_bitwise_identical_while_choices_change(ranks, mode: str) -> None:
    sharding, settings = MODES[mode]
    setup = replace(Setup(steps=11), **sharding)
    world_size = 4 if setup.reshard == 2 or setup.replicas == 2 else 2
    for one in ranks(world_size).run(_change_in_mid_run, setup, settings):
        assert one["equal"]
        assert len({tuple(step.items()) for step in one["steps"]}) >= 6
        assert {t for step in one["steps"] for t in step.values()} == {
            "plain",
            "delta",
            "exponent",
            "none",
            "entropy",
        }


def _paused_steps(_: None) -> list[int]:
    with on_a_link(SLOW):
        model, optimizer, handle = _narrow(Setup(steps=9), reselect_interval=5, warmup_steps=3)
        selection, paused = handle.selection, []
        with patch.object(selection.sampler, "pause", lambda: paused.append(selection.step)):
            train(Setup(steps=9), model, optimizer)
        handle.remove()
    return paused


def test_steps_that_are_not_sampled_are_no_part_of_the_next_choice(ranks) -> None:
    """Sampled: 1 to 3, and 5 to 8, after which the choice is reconsidered."""
    assert ranks(2).run(_paused_steps, None) == [[4, 9]] * 2


def _sampled_reductions(compression: str, narrowed: bool, volume: bool) -> set[str]:
    """Labels of the groups whose gradients were sampled."""
    with on_a_link(SLOW):
        model, optimizer, handle = _narrow(Setup(steps=5), compression=compression, volume=volume)
        if narrowed:
            gradients = narrow_reduce_scatter(
                model, optimizer, volume=volume, compression="entropy"
            )
        train(Setup(steps=5), model, optimizer)
        labels = {one.label for one in handle.selection.reductions}
        handle.remove()
        if narrowed:
            gradients.remove()
        left = {type(g._group._reduce_scatter_comm).__name__ for g in param_groups(model)}
        assert left == {"DefaultReduceScatter"}
    return labels


@pytest.mark.parametrize(
    ("compression", "narrowed", "volume"),
    [("auto", True, True), ("auto", True, False), ("observe", False, False)],
)
def test_gradients_are_sampled_with_and_without_volume_plain_and_narrowed(
    ranks, compression: str, narrowed: bool, volume: bool
) -> None:
    for labels in ranks(2).run(_sampled_reductions, compression, narrowed, volume):
        assert labels == {"0", "1", "(root)"}


def _report(folder: Path, chunks_per_step: float | None = None) -> None:
    with on_a_link(SLOW):
        setup = Setup(steps=6)
        model, optimizer, handle = _narrow(setup, report=folder)
        if chunks_per_step is not None:
            handle.selection.sampler.chunks_per_step = chunks_per_step
        train(setup, model, optimizer)
        handle.remove()


def test_the_report_says_how_many_shards_were_not_sampled(ranks, tmp_path) -> None:
    """At every third step each of the two ranks samples one."""
    ranks(2).run(_report, tmp_path, 1 / 3)
    text = (tmp_path / "choice-step-00000004.txt").read_text()
    assert "18 of 20 shards were not sampled yet" in text


def test_the_report_has_what_was_measured_and_every_choice_with_its_reason(ranks, tmp_path) -> None:
    folder = tmp_path / "selection"
    ranks(2).run(_report, folder)
    names = sorted(path.name for path in folder.iterdir())
    steps = ("00000004", "00000006")
    choices = [f"choice-step-{step}{end}" for step in steps for end in (".json", ".txt")]
    assert names == ["calibration.json", *choices]
    report = json.loads((folder / choices[0]).read_text())
    assert report["step"] == 4
    assert report["applied"] is True
    assert {one["label"] for one in report["reductions"]} == {"0", "1", "(root)"}
    rates = report["samples"]["0.experts.w1_EFD"]
    assert 0 < rates["changed_exponents"] < rates["changed_values"] <= 1
    assert rates["changed_exponents"] <= rates["changed_blocks"] <= 1
    text = (folder / choices[1]).read_text()
    assert "not sampled" not in text
    assert "bits per value instead of 16" in text
    assert "gradients of" in text
    assert (
        calibration.as_json(_calibrated(SLOW, [])).keys()
        == json.loads((folder / names[0]).read_text()).keys()
    )


def _reported_on_a_full_disk(folder: Path) -> list[str]:
    """The warnings when every file takes only its first bytes."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())

    def full(path: Path, text: str, **_: Any) -> None:
        path.write_bytes(text[:1].encode())
        raise OSError(28, "No space left on device")

    logger = logging.getLogger("narrowcast.autotune.report")
    logger.addHandler(handler)
    try:
        with patch.object(Path, "write_text", full):
            _report(folder)
    finally:
        logger.removeHandler(handler)
    return [text for text in warnings if "report is not written" in text]


def test_a_full_disk_leaves_no_part_of_a_report_and_training_goes_on(ranks, tmp_path) -> None:
    first, second = ranks(2).run(_reported_on_a_full_disk, tmp_path)
    (warning,) = first  # once
    assert f"{tmp_path / 'calibration.json'} cannot be written: No space left" in warning
    assert second == []
    assert not list(tmp_path.iterdir())


def _fail_to_solve(_: None) -> tuple[set[str], bool]:
    def fail(*_: Any) -> None:
        raise RuntimeError("no solution")

    with on_a_link(SLOW), patch.object(solver, "choose", fail):
        setup = Setup(steps=5)
        model, optimizer, handle = _narrow(setup)
        train(setup, model, optimizer)
        compressions = set(_compressions(handle).values())
        handle.remove()
    return compressions, handle.selection.choice is None


def test_a_rank_that_cannot_solve_leaves_all_as_it_was(ranks) -> None:
    assert ranks(2).run(_fail_to_solve, None) == [({"plain"}, True)] * 2


def _coding_scales(_: None) -> list[float]:
    """Chooses in a run in which coding takes three times what the samples predict, repeatedly."""
    with on_a_link(SLOW):
        setup = Setup(steps=5)
        model, optimizer, handle = _narrow(setup)
        train(setup, model, optimizer)
    selection = handle.selection
    uncorrected = selection._predictor.problem_with(1.0, selection._schedule)
    predicted = sum(
        shard.options[comm.schemes[shard.name].compression].decoding
        + shard.options[comm.schemes[shard.name].compression].encoding
        for group, comm in zip(uncorrected, handle._comms, strict=True)
        for shard in group.shards
    )
    scales = []
    for measured in (3 * predicted, 3 * predicted, 0.0, 0.0):
        selection._solve(measured)
        scales.append(selection._predictor.corrections.coding)
    handle.remove()
    return scales


def test_slow_coding_counts_once_and_is_forgotten_when_nothing_is_coded(ranks) -> None:
    for scales in ranks(2).run(_coding_scales, None):
        assert scales == pytest.approx([3, 3, 3**0.5, 3**0.25])


def _link_scale(_: None) -> tuple[float, float]:
    """Baseline gathers take a second on the rank that comes last to each, and two on the other."""
    with on_a_link(SLOW):
        setup = Setup(steps=3)
        model, optimizer, handle = _narrow(setup, compression="observe")
        train(setup, model, optimizer)
    measured = predicted = 0.0
    for comm in handle._comms:
        number = len(comm.telemetry.plain_seconds)
        comm.telemetry.plain_seconds[:] = [1.0 + (i + dist.get_rank()) % 2 for i in range(number)]
        measured += number
        predicted += number * SLOW * comm.group.shard_bytes
    selection = handle.selection
    selection._predictor.corrections.learn_links(
        selection._gathers.comms, selection._predictor.links, selection._consensus
    )
    handle.remove()
    return selection._predictor.corrections.links.popitem()[1], measured / predicted


def test_a_link_is_as_fast_as_plain_gathers_show_it_to_be(ranks) -> None:
    for scale, expected in ranks(2).run(_link_scale, None):
        assert scale == pytest.approx(expected)


def test_without_an_optimizer_auto_is_refused(ranks) -> None:
    assert all('compression = "auto"' in text for text in ranks(2).run(_refused_without_optimizer))


def _refused_without_optimizer() -> str:
    model, _ = build(Setup())
    with pytest.raises(ValueError, match="optimizer") as error:
        narrow_all_gather(model)
    return str(error.value)
