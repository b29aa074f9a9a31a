import json
import signal
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from torchtitan_ext import demo, runs
from torchtitan_ext.comparison import Job, RunSummary, compare, parameter_difference

# Of dcp.save without a process group, which says so.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STEPS = 25
LOG = "Model qwen3 demo size: 1,200 total parameters\n"
PARAMETERS = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(())}
# What the ranks of a plain run send a step, in bytes.
PLAIN_BYTES = {"all_gather": 3600, "reduce_scatter": 3600, "other": 10}


def make_run(
    folder: Path,
    *,
    losses: Sequence[float] = tuple(5 - 0.1 * i for i in range(STEPS)),
    gather_bytes: Callable[[int], float] = lambda step: 900.0,
    bits: Mapping[str, float] = {"first_gather": 4.0},
    parameters: Mapping[str, Tensor] = PARAMETERS,
    kept_bytes: float | None = None,
) -> Path:
    """A folder as the job leaves it."""
    log = folder / "logs" / "id_x" / "attempt_0" / "0" / "stdout.log"
    log.parent.mkdir(parents=True)
    log.write_text(LOG)
    with SummaryWriter(str(folder / "tb" / "20260101-0000")) as writer:
        for step, loss in enumerate(losses, start=1):
            scalars = {
                "loss_metrics/global_avg_loss": loss,
                "time_metrics/end_to_end(s)": 0.5,
                "memory/max_active(GiB)": step / 100,
                "narrowcast/bytes/dispatch": 0,
                "narrowcast/bytes/combine": 0,
                **{f"narrowcast/bytes/{c}": sent for c, sent in PLAIN_BYTES.items()},
                "narrowcast/bytes/all_gather": gather_bytes(step),
                **{f"narrowcast/bits_per_parameter/{name}": b for name, b in bits.items()},
            }
            if kept_bytes is not None:
                scalars["narrowcast/kept_bytes"] = kept_bytes
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, step)
    checkpoint = folder / "checkpoint" / f"step-{len(losses)}"
    dcp.save(dict(parameters), checkpoint_id=checkpoint, no_dist=True)
    return folder


def job(treatment: str = "value") -> Job:
    return next(j for j in demo.plan(STEPS, [treatment], [1e-4]) if j.treatment == treatment)


def summary_of(folder: Path, plain: Path) -> RunSummary:
    run, plain_run = (runs.read_run(f, STEPS) for f in (folder, plain))
    return compare(job(), run, plain_run, world_size=4)


def as_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return make_run(
        tmp_path / "plain",
        gather_bytes=lambda step: 3600.0,
        bits={"first_gather": 16.0, "later_gathers": 16.0},
    )


def test_a_run_is_read_back_to_the_bit(plain: Path) -> None:
    run = runs.read_run(plain, STEPS)
    losses = run.scalars["loss_metrics/global_avg_loss"]
    assert losses == [as_float32(5 - 0.1 * i) for i in range(STEPS)]
    assert run.parameters.keys() == PARAMETERS.keys()
    assert all(torch.equal(run.parameters[name], PARAMETERS[name]) for name in PARAMETERS)
    assert run.parameter_count == 1200


def test_bits_and_bytes_are_medians_of_the_last_20_steps(tmp_path: Path, plain: Path) -> None:
    # Large in the first half of all steps, which is less than half of the last 20.
    run = make_run(tmp_path / "run", gather_bytes=lambda step: 9e6 if step <= 13 else 900.0)
    summary = summary_of(run, plain)
    assert summary.bytes_per_step["all_gather"] == 900
    assert summary.plain_bytes_per_step == {**PLAIN_BYTES, "dispatch": 0, "combine": 0}
    # 900 bytes go to 3 peers, from a rank with 300 of 1,200 parameters. Nothing is gathered later.
    assert summary.bits_per_parameter == {"first_gather": 4, "later_gathers": 0, "step": 8}


def test_equal_runs_differ_by_nothing(tmp_path: Path, plain: Path) -> None:
    summary = summary_of(make_run(tmp_path / "run", kept_bytes=77.0), plain)
    assert summary.equal
    assert summary.losses == summary.plain_losses
    assert summary.kept_bytes == 77
    assert summary.peak_memory_gib == as_float32(STEPS / 100)


def test_a_loss_that_differs_in_its_last_bit_is_told(tmp_path: Path, plain: Path) -> None:
    losses = [as_float32(5 - 0.1 * i) for i in range(STEPS)]
    losses[7] += 2**-21
    summary = summary_of(make_run(tmp_path / "run", losses=losses), plain)
    assert summary.max_loss_difference == 2**-21
    assert not summary.equal


def test_a_loss_that_is_no_number_is_told(tmp_path: Path, plain: Path) -> None:
    losses = [5 - 0.1 * i for i in range(STEPS - 1)] + [float("nan")]
    assert not summary_of(make_run(tmp_path / "run", losses=losses), plain).equal


@pytest.mark.parametrize(
    ("value", "plain_value"),
    [(1.0, 1.0 + 2**-23), (-0.0, 0.0), (float("nan"), 1.0), (float("inf"), -float("inf"))],
)
def test_a_parameter_that_differs_in_any_bit_is_told(value: float, plain_value: float) -> None:
    ours, plain = ({"w": torch.tensor([0.0, 2.0, v])} for v in (value, plain_value))
    assert parameter_difference(ours, plain) > 0
    assert parameter_difference(ours, {"w": ours["w"].clone()}) == 0


def test_runs_of_different_models_are_not_compared() -> None:
    with pytest.raises(ValueError, match="b is None with the treatment"):
        parameter_difference({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(ValueError, match="a is"):
        parameter_difference({"a": torch.ones(2)}, {"a": torch.ones(3)})


def test_a_run_that_is_missing_or_ended_early_is_an_error(tmp_path: Path, plain: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        runs.read_run(tmp_path / "nowhere", STEPS)
    with pytest.raises(ValueError, match="no checkpoint of step 26"):
        runs.read_run(plain, STEPS + 1)
    early = make_run(tmp_path / "early", losses=[5.0] * 3)
    with pytest.raises(ValueError, match="3 losses, not 25"):
        compare(job(), runs.read_run(early, 3), runs.read_run(plain, STEPS), 4)


def test_event_files_of_two_runs_are_never_mixed(plain: Path) -> None:
    with SummaryWriter(str(plain / "tb" / "20260102-0000")) as writer:
        writer.add_scalar("loss_metrics/global_avg_loss", 1.0, 1)
    with pytest.raises(ValueError, match="2 event files"):
        runs.read_scalars(plain)


def test_a_plain_run_precedes_those_compared_with_it() -> None:
    jobs = demo.plan(60, list(demo.TREATMENTS), [1e-4, 1e-5])
    names = [j.name for j in jobs]
    assert names[0] == "lr1e-4-plain"
    assert names.index("lr1e-5-plain") == names.index("lr1e-5-value") - 1
    assert len(names) == len(set(names))
    # The others run at the first learning rate only.
    assert [n for n in names if n.startswith("lr1e-5")] == [
        "lr1e-5-plain",
        "lr1e-5-value",
        "lr1e-5-exponent",
    ]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict]:
    """Replaces training: a run leaves what is given here for its name."""
    given: dict[str, dict] = {}

    def train(folder: Path, flags: Sequence[str], world_size: int, on_line: Callable) -> None:
        on_line("[titan] - INFO - step:  1  loss:  7.7  grad_norm: 5")
        make_run(folder, **given.get(folder.name, {}))

    monkeypatch.setattr(demo, "train", train)
    return given


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Makes `demo.main()` that of `--quick`, with this output folder."""
    output = tmp_path / "demo"
    monkeypatch.setattr("sys.argv", ["demo", "--quick", "--output", str(output)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return output


def test_the_demo_writes_a_summary(
    trained: dict, quick: Path, capsys: pytest.CaptureFixture
) -> None:
    assert demo.main() == 0
    summary = json.loads((quick / "summary.json").read_text())
    assert (summary["world_size"], summary["parameters"]) == (4, 1200)
    assert [run["treatment"] for run in summary["runs"]] == ["plain", "value"]
    assert summary["runs"][1]["plain_losses"] == summary["runs"][0]["losses"]
    for run in summary["runs"]:
        assert run["max_loss_difference"] == run["max_parameter_difference"] == 0
        assert len(run["losses"]) == len(run["step_seconds"]) == run["steps"] == STEPS
    shown = capsys.readouterr().out
    assert "to the last bit" in shown
    assert f"tensorboard --logdir {quick}" in shown


def test_the_demo_fails_loudly_where_anything_differs(
    trained: dict, quick: Path, capsys: pytest.CaptureFixture
) -> None:
    trained["lr1e-4-value"] = {"parameters": {**PARAMETERS, "b": torch.tensor(1e-20)}}
    assert demo.main() == 1
    shown = capsys.readouterr()
    assert "DIFFERENT FROM PLAIN FSDP2: lr1e-4-value" in shown.err
    assert "last bit" not in shown.out


def test_a_second_demo_leaves_nothing_of_the_first(trained: dict, tmp_path: Path) -> None:
    arguments = {"steps": STEPS, "output": tmp_path, "learning_rates": [1e-4]}
    demo.run_demo(treatments=["value", "coded"], **arguments)
    (tmp_path / "mine").mkdir()
    demo.run_demo(treatments=["value"], **arguments)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"lr1e-4-plain", "lr1e-4-value", "summary.json", "mine"}


def test_an_unknown_treatment_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "summary.json").touch()
    with pytest.raises(ValueError, match=r"\['values'\] are unknown: there are plain, .*value"):
        demo.run_demo(treatments=["values"], output=tmp_path)
    assert (tmp_path / "summary.json").exists()


def test_a_failed_run_shows_the_end_of_its_log_and_where_it_is(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    lines: list[str] = []
    with pytest.raises(runs.RunError) as raised:
        runs.train(tmp_path, ["--job.config_file", "missing.toml"], 1, lines.append)
    message = str(raised.value)
    (log,) = tmp_path.glob("logs/*/attempt_0/0/stdout.log")
    assert "missing.toml" in log.read_text()
    assert "missing.toml" in message
    assert str(log) in message
    assert log.read_text().splitlines() == lines
    assert signal.getsignal(signal.SIGINT) is handler
