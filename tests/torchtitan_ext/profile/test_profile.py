"""A profile trains as baseline FSDP2 does, and writes what it measured and recommends."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from narrowcast import cli
from narrowcast.autotune.gradients import Reduction
from narrowcast.autotune.problem import Choice, Group, Option, Shard
from narrowcast.config import AllGatherConfig, NarrowcastConfig, ReduceScatterConfig
from tests.torchtitan_ext.tiny import _parse_docstrings_once, train_plain, write_toml
from torchtitan_ext import checking
from torchtitan_ext.launch import LAUNCHED
from torchtitan_ext.profile import command
from torchtitan_ext.profile.job import observed_job
from torchtitan_ext.profile.recommendation import recommend
from torchtitan_ext.profile.watch import StepWatch, seconds_per_step
from torchtitan_ext.toml.load import load_config

STEPS = 6


def _profiled(toml: str) -> tuple[list[float], list[float]]:
    """Losses of the profile by its command, and of plain torchtitan."""
    from torchtitan.components.metrics import MetricsProcessor

    _parse_docstrings_once()
    losses: list[float] = []
    log = MetricsProcessor.log

    def record(self: Any, step: int, loss: float, *rest: Any, **options: Any) -> None:
        losses.append(loss)
        log(self, step, loss, *rest, **options)

    flags = ["--job.config_file", toml, "--profile.steps", str(STEPS)]
    # What would change training, were it not for the profile.
    flags += ["--narrowcast.reduce_scatter.enable", "--narrowcast.volume.no-enable"]
    flags += ["--checkpoint.enable", "--checkpoint.interval", "2"]
    flags += ["--json", str(Path(toml).with_suffix(".json"))]
    with (
        patch("torchtitan.trainer.time.sleep"),
        patch.object(command.sys, "argv", ["it"]),
        patch.object(MetricsProcessor, "log", record),
        patch.object(dist, "destroy_process_group"),
    ):
        command.main(flags)
    return losses, train_plain(toml, "--training.steps", str(STEPS)).losses


@pytest.fixture(scope="module")
def dump(folder: Path) -> Path:
    return folder / "profiled"


def test_a_profiled_job_trains_as_plain_fsdp2_does_and_all_is_written(
    ranks, folder: Path, dump: Path
) -> None:
    toml = write_toml(folder, folder / "corpus", dump)
    for losses, plain_losses in ranks(2).run(_profiled, str(toml)):
        assert len(losses) == STEPS
        assert losses == plain_losses
    written = dump / "profile"
    for number in range(1, 6):
        assert (written / f"figure_{number}.png").read_bytes().startswith(b"\x89PNG")
    assert not list(dump.rglob("step-*"))  # checkpoints
    measured = json.loads((written / "profile.json").read_text())
    assert json.loads(Path(toml).with_suffix(".json").read_text()) == measured
    job = measured["job"]
    assert (job["name"], job["world_size"], job["steps"]) == ("profiled.toml", 2, STEPS)
    assert job["learning_rate"] == 1e-3
    communication = measured["communication"]
    assert communication["profiled_steps"] == 2
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= communication[
        "seconds_per_step"
    ].keys()
    assert all(seconds > 0 for seconds in communication["seconds_per_step"].values())
    # Parameters are gathered twice in bf16, but for the last groups; gradients are reduced in fp32.
    sent = communication["bytes_per_step"]
    assert 0.5 < sent["all_gather"] / sent["reduce_scatter"] <= 1
    assert [entry["step"] for entry in measured["exponent_change_by_step"]] == [2, 3, 4, 5, 6]
    assert all(0 < entry["rates"]["all"] < 0.5 for entry in measured["exponent_change_by_step"])
    rates = measured["exponent_change_by_interval"]["rates"]
    assert [rate is not None for rate in rates] == [True] * 5 + [False] * 5
    assert rates[0] < rates[3]
    for shares in measured["check_cost"]["share_of_step"].values():
        assert sorted(shares, reverse=True) == shares
    assert measured["selection"]["groups"]
    assert measured["calibration"]["coders"]
    assert "[narrowcast.all_gather]" in measured["recommendation"]["toml"]


def test_what_is_wrong_is_said_before_anything_is_trained(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.sys, "argv", ["it"])
    monkeypatch.setattr(command, "profile", lambda *_: pytest.fail("it was trained"))
    file = folder / "a_file"
    file.touch()
    toml = write_toml(folder, folder / "corpus", folder / "unwritable")
    job = ["--job.config_file", str(toml)]
    for flags, message in (
        ([*job, "--dump_folder", str(file)], f"{file}/profile"),
        ([*job, "--profile.steps=2"], "--profile.steps 2: must be an integer of at least 6"),
        ([*job, "--profile.steps"], "--profile.steps : must be"),
        (["--job.config_file", "no.toml"], "no.toml"),
    ):
        with pytest.raises(SystemExit) as raised:
            command.main(flags)
        assert raised.value.code == 2
        assert message in capsys.readouterr().err


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the process of `narrowcast profile` became."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(command.sys, "argv", ["narrowcast", "profile"])
    commands: list[list[str]] = []
    monkeypatch.setattr(command.os, "execv", lambda _, command: commands.append(command))
    return commands


def test_ranks_are_started_by_torchruns_launcher(
    folder: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = str(write_toml(folder, folder / "corpus", folder / "started"))
    command.launch(4, ["--job.config_file", toml])
    ((_, *arguments),) = started
    assert arguments[:3] == ["-m", "torch.distributed.run", "--standalone"]
    assert arguments[3:5] == ["--nproc-per-node", "4"]
    assert arguments[5:] == ["-m", "torchtitan_ext.profile", "--job.config_file", toml]
    assert command.sys.argv == ["narrowcast", "profile"]
    with pytest.raises(ValueError, match=r"1 rank: .* give --ranks"):
        command.launch(1, ["--job.config_file", toml])
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="--ranks 4: this machine has 2 accelerators"):
        command.launch(4, ["--job.config_file", toml])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="torchrun has started the ranks"):
        command.launch(4, [])


def test_a_missing_or_wrong_job_file_is_named_before_missing_ranks(
    folder: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", "--job.config_file", "no.toml"]) == 2
    assert "no.toml: there is no such file" in capsys.readouterr().err
    toml = write_toml(folder, folder / "corpus", folder / "no_ranks")
    assert cli.main(["profile", "--job.config_file", str(toml)]) == 2
    assert "give --ranks N" in capsys.readouterr().err
    toml.write_text(toml.read_text() + "[narrowcast.all_gather]\nno_key = 1\n")
    assert cli.main(["profile", "--job.config_file", str(toml)]) == 2
    assert "narrowcast.all_gather.no_key" in capsys.readouterr().err
    assert not started


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--profile.steps", "2"), "--profile.steps 2: must be an integer of at least 6"),
        (("--narrowcast.placement.file", "no.json"), "expert_parallel_degree = 1"),
        (("--parallelism.expert_parallel_degree", "3"), "does not divide the 2 ranks"),
        (("--parallelism.data_parallel_replicate_degree", "2"), "no parameter is sharded"),
        (("--dump_folder", "pyproject.toml"), "pyproject.toml"),
    ],
)
def test_what_is_wrong_is_said_before_any_rank_is_started(
    folder: Path,
    started: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    toml = str(write_toml(folder, folder / "corpus", folder / "not_started"))
    arguments = ["profile", "--ranks", "2", "--job.config_file", toml, *flags]
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not started


def test_a_rank_without_a_launcher_is_told_how_to_start(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.sys, "argv", ["it"])
    toml = str(write_toml(folder, folder / "corpus", folder / "alone"))
    with pytest.raises(SystemExit) as raised:
        command.main(["--job.config_file", toml])
    assert raised.value.code == 2
    assert "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set" in capsys.readouterr().err


def test_a_job_that_is_too_short_to_tell_ends_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def profiled(*_: Any) -> None:
        raise command.ProfileError("the job's data ended")

    for name, value in zip(LAUNCHED, ("0", "1", "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command.sys, "argv", ["it"])
    monkeypatch.setattr(command, "profile", profiled)
    monkeypatch.setattr(checking, "_check_sharded", lambda *_: None)  # this is one rank
    toml = str(write_toml(folder, folder / "corpus", folder / "short"))
    with pytest.raises(SystemExit) as raised:
        command.main(["--job.config_file", toml])
    assert raised.value.code == 2
    assert capsys.readouterr().err == "torchtitan_ext.profile: the job's data ended\n"


@pytest.mark.wide
@pytest.mark.parametrize("failing", [0, 1])
def test_a_profile_ends_when_a_rank_fails(folder: Path, tmp_path: Path, failing: int) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    process = _narrowcast_profile(folder, tmp_path, failing)
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "this rank fails" in printed


@pytest.mark.wide
def test_a_profile_that_is_ended_leaves_no_rank_behind(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    process = _narrowcast_profile(folder, tmp_path, failing=-1)
    assert any("step:  1" in line for line in process.stdout)
    process.terminate()
    # Ranks have its pipes too: they close when the last one has ended.
    process.communicate(timeout=200)
    assert process.returncode == 1


FAILING = """
import os, sys
from tests.torchtitan_ext.tiny import tiny

def failing():
    if os.environ.get("RANK") == os.environ["FAILING"]:
        sys.modules["torchtitan_ext.profile.watch"].StepWatch.after_step = raises
    return tiny()

def raises(self):
    raise RuntimeError("this rank fails")
"""


def _narrowcast_profile(folder: Path, tmp_path: Path, failing: int) -> subprocess.Popen:
    toml = write_toml(folder, folder / "corpus", tmp_path / "failing", config="failing")
    toml.write_text(toml.read_text().replace("tests.torchtitan_ext.tiny", "failing"))
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3]), *sys.path])
    command = [sys.executable, "-m", "narrowcast.cli", "profile", "--ranks", "2"]
    command += ["--job.config_file", str(toml), "--profile.steps", "40"]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path, "FAILING": str(failing)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _event(name: str, shape: list[int] | None = None) -> SimpleNamespace:
    return SimpleNamespace(name=lambda: name, shapes=lambda: [] if shape is None else [shape])


@pytest.mark.parametrize(
    ("on_cpu", "event", "kind"),
    [
        (True, _event("gloo:all_gather", [64]), "all_gather"),
        (True, _event("gloo:all_reduce", [128]), "reduce_scatter"),
        (True, _event("gloo:all_reduce", [2, 64]), "all_reduce"),
        (True, _event("gloo:all_reduce", []), "all_reduce"),
        (True, _event("gloo:all_to_all"), "all_to_all"),
        (True, _event("gloo:broadcast"), "other"),
        (True, _event("gloo:barrier"), None),
        (True, _event("aten::add"), None),
        (False, _event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)"), "all_gather"),
        (False, _event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"), "reduce_scatter"),
        (False, _event("ncclDevKernel_AllReduce_Sum_f32_TREE_LL", [128]), "all_reduce"),
        (False, _event("ncclDevKernel_SendRecv(ncclDevKernelArgs)"), "all_to_all"),
        (False, _event("nccl:all_gather"), None),  # the same once more, as a range
    ],
)
def test_collectives_are_recognized_by_the_names_of_their_events(on_cpu, event, kind) -> None:
    watch = SimpleNamespace(_on_cpu=on_cpu, _reduced={128})
    assert StepWatch._kind(watch, event) == kind


def test_of_each_collective_the_rank_counts_that_waits_least() -> None:
    ranks = [
        [("all_gather", 4.0), ("all_reduce", 1.0), ("all_gather", 1.0)],
        [("all_gather", 2.0), ("all_gather", 3.0)],
    ]
    seconds = seconds_per_step(ranks, num_steps=2)
    assert seconds == {"all_gather": (2.0 + 1.0) / 2, "all_reduce": 0.5}


PLAIN_SECONDS = 1.0


def _chosen(*compressions: str, cache_bytes: int = 0) -> tuple[list[Group], Choice]:
    """A group of shards with these compressions; of none, a group that stays plain."""
    options = {
        "none": Option(link=1.0),
        "entropy": Option(link=0.7, bits=11.0),
        "delta": Option(link=0.1, bits=3.0),
    }
    shards = [Shard(f"w{i}", "other", 100, 0.5, options) for i in range(max(len(compressions), 1))]
    names = {shard.name: t for shard, t in zip(shards, compressions, strict=False)}
    choice = Choice(
        compressions={"layer": names} if names else {},
        plain_seconds=PLAIN_SECONDS,
        seconds=0.25 if names else PLAIN_SECONDS,
        cache_bytes=cache_bytes,
        budget_bytes=4 << 30,
        reasons={},
        unlimited_seconds=0.25 if names else PLAIN_SECONDS,
        unlimited_cache_bytes=cache_bytes,
    )
    return [Group("layer", tuple(shards), 0.0, 0.0)], choice


def _reductions(coded: float) -> list[Reduction]:
    return [Reduction("layer", plain=1.0, none=1.0, entropy=coded, bits=9.0)]


@pytest.mark.parametrize(
    ("chosen", "reductions", "expected"),
    [
        (_chosen(), [], {"all_gather": {"enable": False}}),
        (
            _chosen("delta", "delta", cache_bytes=1 << 20),
            _reductions(0.5),
            {
                "all_gather": {
                    "enable": True,
                    "compression": "auto",
                    "cache_budget_gib": 0.1,
                    "reselect_interval": 50,
                    "block_size": 256,
                },
                "reduce_scatter": {"enable": True},
            },
        ),
        (
            _chosen("delta", "entropy", cache_bytes=(3 << 30) // 2),
            _reductions(0.97),
            {
                "all_gather": {
                    "enable": True,
                    "compression": "auto",
                    "cache_budget_gib": 1.5,
                    "reselect_interval": 50,
                    "block_size": 256,
                },
                "reduce_scatter": {"enable": False},
            },
        ),
        (
            _chosen("delta", "entropy", cache_bytes=(3 << 30) // 2 + 1),
            [],
            {
                "all_gather": {
                    "enable": True,
                    "compression": "auto",
                    "cache_budget_gib": 1.55,  # not above what was granted
                    "reselect_interval": 50,
                    "block_size": 256,
                },
            },
        ),
    ],
    ids=["nothing is worthwhile", "one compression", "several", "budget"],
)
def test_the_recommended_lines_are_of_a_valid_job(
    chosen, reductions, expected, folder: Path
) -> None:
    problem, choice = chosen
    switches = NarrowcastConfig(
        all_gather=AllGatherConfig(
            enable=True, block_size=256, reselect_interval=50, cache_budget_gib=1.55
        ),
        reduce_scatter=ReduceScatterConfig(),
    )
    recommended = recommend(switches, problem, choice, reductions, step_seconds=3.0)
    assert tomllib.loads(recommended["toml"]) == {"narrowcast": expected}
    toml = write_toml(folder, folder / "corpus", folder / "recommended")
    toml.write_text(f"{toml.read_text()}\n{recommended['toml']}")
    assert load_config(toml).narrowcast.all_gather.enable == bool(choice.compressions)
    saves = recommended["expected"]
    assert saves["saved_share_of_step"] == pytest.approx(0.25 if choice.compressions else 0)
    if expected["all_gather"].get("cache_budget_gib") == 0.1:  # all shards get "delta"
        assert saves["bits_per_parameter_first_gather"] == {"plain": 16, "chosen": 3}
        assert "750.0 ms less, where a step takes 3,000.0 ms (25%)" in recommended["text"]
    if not choice.compressions:
        assert "no compression of any shard is worthwhile" in recommended["text"]


def test_learning_rates_are_those_of_the_whole_job_and_nothing_else_is_narrowed(
    folder: Path,
) -> None:
    toml = write_toml(folder, folder / "corpus", folder / "whole")
    lines = toml.read_text().replace("total_steps = 8\n", "").replace("steps = 4\n", "steps = 99\n")
    lines += "[narrowcast.reduce_scatter]\nenable = true\n"
    lines += "[narrowcast.all_gather]\nenable = true\nblock_size = 128\nreselect_interval = 5\n"
    toml.write_text(lines)
    observed = observed_job(load_config(toml), steps=40)
    assert (observed.training.steps, observed.lr_scheduler.total_steps) == (40, 99)
    longer = observed_job(load_config(toml), steps=100)
    assert (longer.training.steps, longer.lr_scheduler.total_steps) == (100, 100)
    assert observed.dump_folder == str(folder / "whole" / "profile")
    gathers = observed.narrowcast.all_gather
    assert (gathers.compression, gathers.block_size) == ("observe", 128)
    assert (gathers.warmup_steps, gathers.reselect_interval) == (30, 40)
    assert not observed.narrowcast.reduce_scatter.enable
    # Steps that come after the profile's are no error of it.
    sections = "[narrowcast.routing_trace]\nenable = true\nfirst_step = 90\n"
    toml.write_text(f"{lines}{sections}[narrowcast.placement]\nafter_steps = 90\n")
    observed = observed_job(load_config(toml), steps=40)
    assert not observed.narrowcast.routing_trace.enable
    assert not observed.narrowcast.placement.enable
