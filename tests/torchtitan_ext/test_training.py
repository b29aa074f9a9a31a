"""torchtitan trains from TOML, and with narrowcast it trains the same: bitwise."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchtitan.tools.logging import logger as torchtitan_logger

from narrowcast.config import NarrowcastConfig
from narrowcast.telemetry.step_volume import COLLECTIVES, StepVolume
from tests.narrowcast.autotune.test_controller import SLOW, ever_other_choices, on_a_link
from tests.narrowcast.training import same_bits
from tests.ranks import Raised, Ranks
from tests.torchtitan_ext.tiny import Trained, is_untouched, once, train, write_toml
from tests.wide import wide_but
from torchtitan_ext.charts import layout
from torchtitan_ext.metrics import console_line

ON = ("--narrowcast.all_gather.enable", "--narrowcast.all_gather.compression", "delta")
_GRADIENTS = ("--narrowcast.reduce_scatter.enable", "--narrowcast.reduce_scatter.compression")
GRADIENTS, RAW_GRADIENTS = (*_GRADIENTS, "entropy"), (*_GRADIENTS, "none")
UNCOUNTED = "--narrowcast.volume.no-enable"
LAYOUTS = {
    "fsdp": (),
    "ep 2": ("--parallelism.expert_parallel_degree", "2"),
    "ep 4": ("--parallelism.expert_parallel_degree", "4"),
    "tp 2": ("--parallelism.tensor_parallel_degree", "2"),
    "tp 2, ep 2": (
        *("--parallelism.tensor_parallel_degree", "2"),
        *("--parallelism.expert_parallel_degree", "2"),
    ),
    "hsdp, ep 2": (
        *("--parallelism.data_parallel_replicate_degree", "2"),
        *("--parallelism.expert_parallel_degree", "2"),
    ),
    "accumulated": ("--training.global_batch_size", "8"),
    "fp32 gathers": ("--training.mixed_precision_param", "float32"),
}
# Four ranks, but sums of two contributions: those of coded gradients are plain's too.
OF_TWO_SHARDS = ("tp 2, ep 2", "hsdp, ep 2")


def _run(ranks: Ranks, folder: Path, name: str, *flags: str) -> list[Trained]:
    toml = write_toml(folder, folder / "corpus", folder / name.replace(" ", "_"))
    return ranks.run(train, str(toml), *flags)


def _assert_same(plain: list[Trained], narrowed: list[Trained]) -> None:
    assert all(ours.narrowed for ours in narrowed)
    assert not any(theirs.narrowed for theirs in plain)
    _assert_equal(plain, narrowed)


def _assert_equal(one: list[Trained], other: list[Trained]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert ours.losses == theirs.losses
        assert ours.state.keys() == theirs.state.keys()
        assert same_bits(list(ours.state.values()), list(theirs.state.values()))


@pytest.mark.parametrize("name", wide_but(LAYOUTS, "ep 2", "hsdp, ep 2"))
def test_every_layout_trains_as_plain_torchtitan(ranks, folder: Path, name: str) -> None:
    flags = LAYOUTS[name]
    plain = once(ranks(4), folder, *flags)
    is_coded = name in OF_TWO_SHARDS
    ours = (*ON, *GRADIENTS) if is_coded else ON
    narrowed = _run(ranks(4), folder, f"{name} narrowed", *ours, *flags)
    _assert_same(plain, narrowed)
    assert len(set(plain[0].losses)) == 4
    if is_coded:
        _assert_coded(narrowed, than=plain)


def test_two_nodes_of_two_ranks_train_as_plain_torchtitan(ranks, folder: Path) -> None:
    """Experts are sharded over a rank of each node, and everything else in two levels."""
    flags, nodes = LAYOUTS["ep 2"], ("--narrowcast.topology.ranks_per_node", "2")
    plain = once(ranks(4), folder, *flags)
    narrowed = _run(ranks(4), folder, "two nodes", *ON, *flags, *nodes)
    _assert_same(plain, narrowed)
    last = narrowed[0].metrics[-1]
    bits, plain_bits = (
        last[f"narrowcast/bits_per_parameter/{name}"] for name in ("into_node", "into_node_plain")
    )
    assert bits < 0.8 * plain_bits


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation_trains_as_plain_torchtitan(ranks, folder: Path, kind: str) -> None:
    toml = write_toml(folder, folder / "corpus", folder / kind)
    with toml.open("a") as file:
        file.write(f'[activation_checkpoint]\ntype = "{kind}"\n')
    plain = ranks(2).run(train, str(toml))
    _assert_same(plain, ranks(2).run(train, str(toml), *ON, *GRADIENTS))


def _gradient_bits(trained: list[Trained]) -> float:
    return trained[0].metrics[-1]["narrowcast/bits_per_parameter/gradients"]


def _assert_coded(trained: list[Trained], than: list[Trained]) -> None:
    """With narrow gathers and gradients, of which fewer bits cross than in the other run."""
    assert all(one.narrowed and one.narrowed_gradients for one in trained)
    assert _gradient_bits(trained) < 0.9 * _gradient_bits(than)


@pytest.mark.parametrize("name", wide_but(["fsdp", "ep 2", "fp32 gathers"], "ep 2"))
def test_coded_gradients_train_as_the_raw_ones(ranks, folder: Path, name: str) -> None:
    """Sums of four, which need not be the backend's."""
    flags = LAYOUTS[name]
    raw = _run(ranks(4), folder, f"{name} raw", *RAW_GRADIENTS, *flags)
    coded = once(ranks(4), folder, *ON, *GRADIENTS, *flags)
    assert all(one.narrowed_gradients and not one.narrowed for one in raw)
    _assert_coded(coded, than=raw)
    _assert_equal(raw, coded)
    assert len(set(raw[0].losses)) == 4
    # Those of bf16 parameters are bf16-valued. Zeros cost nothing.
    bits_of_others = _gradient_bits(coded) / (1 - coded[0].metrics[-1]["narrowcast/zero_gradients"])
    assert (bits_of_others < 16) == (name != "fp32 gathers")


@pytest.mark.parametrize(
    "name", wide_but(["fsdp", "ep 2", "accumulated", "fp32 gathers"], "accumulated")
)
def test_coded_gradients_of_two_ranks_train_as_plain_torchtitan(
    ranks, folder: Path, name: str
) -> None:
    flags = LAYOUTS[name]
    plain = once(ranks(2), folder, *flags)
    coded = _run(ranks(2), folder, f"{name} 2 coded", *ON, *GRADIENTS, *flags)
    _assert_coded(coded, than=plain)
    _assert_equal(plain, coded)
    assert len(set(plain[0].losses)) == 4


def test_uncounted_coded_gradients_train_the_same(ranks, folder: Path) -> None:
    plain = once(ranks(2), folder)
    coded = _run(ranks(2), folder, "uncounted coded", *ON, *GRADIENTS, UNCOUNTED)
    assert not any(tag.startswith("narrowcast/") for tag in coded[0].metrics[-1])
    assert all(one.narrowed and one.narrowed_gradients for one in coded)
    _assert_equal(plain, coded)


SAVE = ("--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.no-last-save-model-only")
FIRST_HALF = ("--training.steps", "2")


@pytest.mark.parametrize("world_size", wide_but([4, 2], 2))
def test_a_run_resumes_with_and_without_narrowcast(ranks, folder: Path, world_size: int) -> None:
    """Saved by either and resumed by either, on as many ranks or on fewer: always the same."""
    resumed = {}
    # torchtitan resumes its data only on as many ranks.
    resume = SAVE if world_size == 4 else (*SAVE, "--checkpoint.exclude_from_loading", "dataloader")
    for saver, flags in (("plain", ()), ("narrowed", ON)):
        if not (folder / f"{saver}_half").exists():
            _run(ranks(4), folder, f"{saver} half", *SAVE, *FIRST_HALF, *flags)
        for resumer, resumer_flags in (("plain", ()), ("narrowed", ON)):
            name = f"{saver} to {resumer} {world_size}"
            shutil.copytree(folder / f"{saver}_half", folder / name.replace(" ", "_"))
            resumed[saver, resumer] = _run(ranks(world_size), folder, name, *resume, *resumer_flags)
    plain = resumed["plain", "plain"]
    assert len(plain[0].losses) == 2
    for saver in ("plain", "narrowed"):
        _assert_same(plain, resumed[saver, "narrowed"])
    assert [one.losses for one in plain] == [one.losses for one in resumed["narrowed", "plain"]]
    if world_size == 4:
        assert once(ranks(4), folder)[0].losses[2:] == plain[0].losses


AUTO = ("--narrowcast.all_gather.enable", "--narrowcast.all_gather.warmup_steps", "3")
AUTO = (*AUTO, "--narrowcast.all_gather.reselect_interval", "1")


def _train_by_ever_other_choices(toml: str, *flags: str) -> Trained:
    with on_a_link(SLOW), ever_other_choices():
        return train(toml, *flags, *AUTO)


@pytest.mark.wide  # in parts: autotune/test_controller.py, and the resumed runs below
def test_training_is_plain_while_choices_change_and_through_a_checkpoint(
    ranks, folder: Path
) -> None:
    """Chosen anew after steps 3 to 8 of a run, and after steps 7 and 8 of one resumed at 4."""
    flags = (*LAYOUTS["ep 2"], *SAVE, "--training.steps")
    plain = _run(ranks(4), folder, "of 8 plain", *flags, "8")
    toml = write_toml(folder, folder / "corpus", folder / "of_8_auto")
    half = ranks(4).run(_train_by_ever_other_choices, str(toml), *flags, "4")
    resumed = ranks(4).run(_train_by_ever_other_choices, str(toml), *flags, "8")
    assert half[0].losses + resumed[0].losses == plain[0].losses
    for ours, theirs in zip(resumed, plain, strict=True):
        assert same_bits(list(ours.state.values()), list(theirs.state.values()))
    chosen = [metrics["narrowcast/selection/share/delta"] for metrics in resumed[0].metrics[2:]]
    assert 0 < min(chosen) < max(chosen)
    assert resumed[0].metrics[-1]["narrowcast/selection/changed_shards"] > 0
    logged = {tag for tag in resumed[0].metrics[-1] if "/selection/" in tag}
    assert len(logged) == 10
    reports = {path.name for path in (folder / "of_8_auto" / "selection").iterdir()}
    assert {"calibration.json", *(f"choice-step-0000000{step}.json" for step in (3, 4, 7, 8))} <= (
        reports
    )


def _warnings_of(toml: str, *flags: str) -> list[str]:
    records: list[str] = []
    with patch.object(torchtitan_logger, "warning", records.append):
        train(toml, *flags, *ON[:1], "--narrowcast.all_gather.warmup_steps", "3")
    return [record for record in records if "warmup_steps" in record]


def test_a_run_too_short_for_a_choice_is_warned_of(ranks, folder: Path) -> None:
    """From where it starts: the second resumes at step 2."""
    toml = str(write_toml(folder, folder / "corpus", folder / "short"))
    for steps, warned in (("2", "step 1 to training.steps = 2"), ("4", "step 3 to")):
        for records in ranks(2).run(_warnings_of, toml, *SAVE, "--training.steps", steps):
            assert [warned in record for record in records] == [True]
    whole = str(write_toml(folder, folder / "corpus", folder / "long_enough"))
    assert ranks(2).run(_warnings_of, whole) == [[], []]


def test_coded_gradients_come_and_go_where_a_run_resumes(ranks, folder: Path) -> None:
    """Two ranks: plain, coded and plain again are plain all along."""
    whole = once(ranks(2), folder)
    plain = _run(ranks(2), folder, "2 resumed", *SAVE, *FIRST_HALF)
    coded = _run(ranks(2), folder, "2 resumed", *SAVE, "--training.steps", "3", *ON, *GRADIENTS)
    again = _run(ranks(2), folder, "2 resumed", *SAVE)
    losses = plain[0].losses + coded[0].losses + again[0].losses
    assert losses == whole[0].losses
    assert [len(part[0].losses) for part in (plain, coded, again)] == [2, 1, 1]
    assert coded[0].narrowed_gradients
    assert not again[0].narrowed_gradients
    for ours, theirs in zip(again, whole, strict=True):
        assert same_bits(list(ours.state.values()), list(theirs.state.values()))


@pytest.mark.wide  # gradients come and go in the next one
def test_a_run_of_coded_gradients_resumes_with_raw_ones(ranks, folder: Path) -> None:
    whole = once(ranks(4), folder, *ON, *GRADIENTS)
    coded = _run(ranks(4), folder, "4 coded to raw", *SAVE, *FIRST_HALF, *ON, *GRADIENTS)
    raw = _run(ranks(4), folder, "4 coded to raw", *SAVE, *RAW_GRADIENTS)
    assert coded[0].losses + raw[0].losses == whole[0].losses
    assert len(raw[0].losses) == 2
    for ours, theirs in zip(raw, whole, strict=True):
        assert same_bits(list(ours.state.values()), list(theirs.state.values()))


def test_the_dashboard_reads_back_from_the_event_file(ranks, folder: Path) -> None:
    trained = _run(ranks(4), folder, "dashboard", *ON, *GRADIENTS)
    (events,) = (folder / "dashboard" / "tb").rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events)).Reload()
    scalars = accumulator.Tags()["scalars"]
    for collective in COLLECTIVES:
        assert f"narrowcast/bytes/{collective}" in scalars
        assert f"narrowcast/plain_bytes/{collective}" in scalars
    for tag in ("changed_values", "changed_exponents", "changed_blocks"):
        for kind in ("expert_ffn", "attention", "router", "norm", "embedding"):
            assert f"narrowcast/{tag}/{kind}" in scalars
    for tag, last in trained[0].metrics[-1].items():
        if tag.startswith("narrowcast/"):
            assert accumulator.Scalars(tag)[-1].value == pytest.approx(last, rel=1e-6)
    last = trained[0].metrics[-1]
    assert last["narrowcast/bytes/all_gather"] < 0.3 * last["narrowcast/plain_bytes/all_gather"]
    assert last["narrowcast/bits_per_parameter/first_gather"] < 6
    for kind in ("reduce_scatter", "all_gather"):
        sent, plain = (last[f"narrowcast/{b}/{kind}"] for b in ("bytes", "plain_bytes"))
        assert last[f"narrowcast/ratio/{kind}"] == pytest.approx(sent / plain)
    assert last["narrowcast/ratio/reduce_scatter"] < 0.6
    assert last["narrowcast/bits_per_parameter/gradients"] < 16
    assert 0 < last["narrowcast/zero_gradients"] < 1
    assert "custom_scalars__config__" in accumulator.Tags()["tensors"]


def test_plain_training_is_counted_too(ranks, folder: Path) -> None:
    last = once(ranks(4), folder, *LAYOUTS["ep 2"])[0].metrics[-1]
    for collective in COLLECTIVES:
        assert last[f"narrowcast/bytes/{collective}"] > 0
        assert (
            last[f"narrowcast/bytes/{collective}"] == last[f"narrowcast/plain_bytes/{collective}"]
        )
    assert last["narrowcast/bits_per_parameter/first_gather"] == 16
    assert last["narrowcast/bits_per_parameter/later_gathers"] == 16
    assert last["narrowcast/bits_per_parameter/gradients"] == 32
    assert last["narrowcast/ratio/reduce_scatter"] == 1
    assert "narrowcast/zero_gradients" not in last


def test_switched_off_it_leaves_torch_and_torchtitan_alone(ranks, folder: Path) -> None:
    toml = write_toml(folder, folder / "corpus", folder / "off")
    assert ranks(2).run(is_untouched, str(toml), UNCOUNTED) == [(True, True)] * 2


@pytest.mark.parametrize("flags", [(*ON, *GRADIENTS), (*GRADIENTS, UNCOUNTED), ()])
def test_a_closed_trainer_gives_torch_back_its_own(ranks, folder: Path, flags: tuple) -> None:
    toml = write_toml(folder, folder / "corpus", folder / "closed")
    assert ranks(2).run(is_untouched, str(toml), *flags) == [(False, True)] * 2


@pytest.mark.parametrize("section", ["all_gather", "reduce_scatter"])
def test_a_switch_that_cannot_work_is_named(ranks, folder: Path, section: str) -> None:
    flags = (f"--narrowcast.{section}.enable", "--parallelism.data_parallel_shard_degree", "1")
    flags += ("--parallelism.data_parallel_replicate_degree", "2")
    toml = write_toml(folder, folder / "corpus", folder / "cannot")
    for outcome in ranks(2).outcomes(train, str(toml), *flags):
        assert outcome.type == "ValueError"
        assert f"narrowcast.{section}.enable = true" in outcome.message
        assert "parallelism.data_parallel_shard_degree = 1" in outcome.message


ENTRIES = {
    "torchtitan_ext.train": (),
    "torchtitan.train": ("--module", "torchtitan_ext", "--config", "from_toml"),
}


# Ranks of other tests parse what the other entry does (``tiny.train``); most of it is imports.
@pytest.mark.parametrize("entry", wide_but(ENTRIES, "torchtitan_ext.train"))
def test_torchrun_launches_it(folder: Path, entry: str) -> None:
    toml = write_toml(folder, folder / "corpus", folder / entry.replace(".", "_"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", entry, *ENTRIES[entry]]
    command += ["--job.config_file", str(toml), "--training.steps", "2", *ON, *GRADIENTS]
    command += ["--narrowcast.topology.ranks_per_node", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launched = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert launched.returncode == 0, launched.stderr[-3000:]
    assert "step:  2  loss:" in launched.stdout
    assert re.search(
        r"bits a parameter: first gather \S+, later \S+, gradients \d", launched.stdout
    )


@pytest.mark.parametrize("section", ["all_gather", "reduce_scatter"])
def test_a_job_that_shards_nothing_is_told_so_and_by_which_key(
    ranks, folder: Path, section: str
) -> None:
    toml = write_toml(folder, folder / "corpus", folder / f"unsharded {section}")
    degrees = ("--parallelism.data_parallel_replicate_degree", "2")
    degrees += ("--parallelism.data_parallel_shard_degree", "1")
    switch = f"--narrowcast.{section}.enable"
    for outcome in ranks(2).outcomes(train, str(toml), *degrees, switch):
        assert isinstance(outcome, Raised)
        assert outcome.message.startswith(
            f"narrowcast.{section}.enable = true cannot work with "
            "parallelism.data_parallel_shard_degree = 1 on 2 ranks"
        )


def test_what_plain_torch_would_send_is_said_to_be_the_least() -> None:
    """gloo's reduce-scatter sends about twice as much as a ring."""
    step = StepVolume()
    step.sent["all_gather"], step.plain["all_gather"] = 1 << 20, 4 << 20
    line = console_line(7, step)
    assert line == "step:  7  sent: 1.00 MiB, baseline at least 4.00 MiB (25%)"
    charts = layout(NarrowcastConfig())["Communication volume"]
    assert "bytes that the baseline would send at least (ring)" in charts
