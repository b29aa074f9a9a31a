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

from torchtitan_ext.benchmarks import demo, runs
from torchtitan_ext.benchmarks.comparison import (
    Job,
    RunSummary,
    compare,
    parameter_difference,
    tables,
)

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
    cache_bytes: float | None = None,
    zeros: float | None = None,
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
            if cache_bytes is not None:
                scalars["narrowcast/cache_bytes"] = cache_bytes
            if zeros is not None:
                scalars["narrowcast/zero_gradients"] = zeros if step > 13 else 0.9
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, step)
    checkpoint = folder / "checkpoint" / f"step-{len(losses)}"
    dcp.save(dict(parameters), checkpoint_id=checkpoint, no_dist=True)
    return folder


def job(compression: str = "delta") -> Job:
    return next(j for j in demo.plan(STEPS, [compression], [1e-4]) if j.compression == compression)


def summary_of(
    folder: Path, plain: Path, reference: Path | None = None, compression: str = "delta"
) -> RunSummary:
    folders = (folder, plain, reference or plain)
    return compare(job(compression), *(runs.read_run(f, STEPS) for f in folders), world_size=4)


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
    assert summary.bits_per_parameter == {
        "first_gather": 4,
        "later_gathers": 0,
        "step": 8,
        "gradients": 0,
        "whole_step": 8 + 32,  # 3,600 bytes of gradients
    }


def test_a_plain_run_is_told_in_the_same_figures(plain: Path) -> None:
    summary = summary_of(plain, plain, compression="plain")
    assert summary.bits_per_parameter["whole_step"] == 64
    assert summary.zero_gradients is None
    assert summary.equal_to is None


def test_gradients_and_the_zeros_among_them_are_told(tmp_path: Path, plain: Path) -> None:
    bits = {"first_gather": 4.0, "gradients": 9.5}
    summary = summary_of(make_run(tmp_path / "run", bits=bits, zeros=0.25), plain)
    assert summary.bits_per_parameter["gradients"] == 9.5
    assert summary.zero_gradients == 0.25


def test_equal_runs_differ_by_nothing(tmp_path: Path, plain: Path) -> None:
    summary = summary_of(make_run(tmp_path / "run", cache_bytes=77.0), plain)
    assert summary.is_as_expected
    assert summary.losses == summary.plain_losses
    assert summary.cache_bytes == 77
    assert summary.peak_memory_gib == as_float32(STEPS / 100)


def test_a_loss_that_differs_in_its_last_bit_is_told(tmp_path: Path, plain: Path) -> None:
    losses = [as_float32(5 - 0.1 * i) for i in range(STEPS)]
    losses[7] += 2**-21
    summary = summary_of(make_run(tmp_path / "run", losses=losses), plain)
    assert summary.max_loss_difference == 2**-21
    assert not summary.is_as_expected


def test_a_loss_that_is_no_number_is_told(tmp_path: Path, plain: Path) -> None:
    losses = [5 - 0.1 * i for i in range(STEPS - 1)] + [float("nan")]
    assert not summary_of(make_run(tmp_path / "run", losses=losses), plain).is_as_expected


def test_a_run_is_compared_with_the_one_that_it_must_equal(tmp_path: Path, plain: Path) -> None:
    other_order = {"losses": [4 - 0.1 * i for i in range(STEPS)]}
    raw = make_run(tmp_path / "none", **other_order)
    coded = make_run(tmp_path / "entropy", **other_order)
    assert summary_of(coded, plain, raw, "delta_gradients").is_as_expected
    assert not summary_of(coded, plain, plain, "delta_gradients").is_as_expected
    assert not summary_of(plain, plain, raw, "delta_gradients").is_as_expected


def test_another_order_of_sums_is_told_and_is_no_failure(tmp_path: Path, plain: Path) -> None:
    run = make_run(tmp_path / "run", losses=[5.5 - 0.1 * i for i in range(STEPS)])
    summary = summary_of(run, plain, compression="uncompressed_gradients")
    assert summary.max_loss_difference == pytest.approx(0.5, abs=1e-6)
    assert summary.is_as_expected


@pytest.mark.parametrize(
    ("value", "plain_value"),
    [(1.0, 1.0 + 2**-23), (-0.0, 0.0), (float("nan"), 1.0), (float("inf"), -float("inf"))],
)
def test_a_parameter_that_differs_in_any_bit_is_told(value: float, plain_value: float) -> None:
    ours, plain = ({"w": torch.tensor([0.0, 2.0, v])} for v in (value, plain_value))
    assert parameter_difference(ours, plain) > 0
    assert parameter_difference(ours, {"w": ours["w"].clone()}) == 0


def test_runs_of_different_models_are_not_compared() -> None:
    with pytest.raises(ValueError, match="b is None in one run"):
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
        compare(job(), runs.read_run(early, 3), *[runs.read_run(plain, STEPS)] * 2, 4)


def test_event_files_of_two_runs_are_never_mixed(plain: Path) -> None:
    with SummaryWriter(str(plain / "tb" / "20260102-0000")) as writer:
        writer.add_scalar("loss_metrics/global_avg_loss", 1.0, 1)
    with pytest.raises(ValueError, match="2 event files"):
        runs.read_scalars(plain)


def test_a_run_follows_those_that_it_is_compared_with() -> None:
    jobs = demo.plan(60, list(demo.COMPRESSIONS), [1e-4, 1e-5])
    names = [j.name for j in jobs]
    assert len(names) == len(set(names))
    assert names[0] == "lr1e-4-plain"
    assert names.index("lr1e-5-plain") == names.index("lr1e-5-delta") - 1
    for i, j in enumerate(jobs):
        assert j.equal_to is None or j.equal_to in names[:i]
    # The others run at the first learning rate only.
    assert [n for n in names if n.startswith("lr1e-5")] == ["lr1e-5-plain", "lr1e-5-delta"]


def test_only_what_sums_in_another_order_than_plain_need_not_equal_it() -> None:
    equal_to = {j.compression: j.equal_to for j in demo.plan(60, list(demo.COMPRESSIONS), [1e-4])}
    assert equal_to.pop("plain") is None
    assert equal_to.pop("uncompressed_gradients") is None
    assert equal_to.pop("delta_gradients") == "lr1e-4-uncompressed_gradients"
    assert set(equal_to.values()) == {"lr1e-4-plain"}


def test_what_a_run_must_equal_runs_too() -> None:
    jobs = demo.plan(60, ["delta_gradients"], [1e-4, 1e-5])
    names = [
        "lr1e-4-plain",
        "lr1e-4-uncompressed_gradients",
        "lr1e-4-delta_gradients",
        "lr1e-5-plain",
    ]
    assert [j.name for j in jobs] == names


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
    arguments = ["--quick", "--output", str(output), "--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr("sys.argv", ["demo", *arguments])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return output


def test_the_demo_writes_a_summary(
    trained: dict, quick: Path, capsys: pytest.CaptureFixture
) -> None:
    assert demo.main() == 0
    summary = json.loads((quick / "summary.json").read_text())
    assert (summary["world_size"], summary["parameters"]) == (4, 1200)
    assert json.loads((quick.parent / "rows.json").read_text()) == summary["runs"]
    compressions = [run["compression"] for run in summary["runs"]]
    assert compressions == ["plain", "delta", "uncompressed_gradients", "delta_gradients"]
    assert summary["runs"][1]["plain_losses"] == summary["runs"][0]["losses"]
    for run in summary["runs"]:
        assert run["max_loss_difference"] == run["max_parameter_difference"] == 0
        assert len(run["losses"]) == len(run["step_seconds"]) == run["steps"] == STEPS
    shown = capsys.readouterr().out
    assert "bitwise identical" in shown
    assert f"tensorboard --logdir {quick}" in shown


def test_the_demo_fails_loudly_where_anything_differs(
    trained: dict, quick: Path, capsys: pytest.CaptureFixture
) -> None:
    different = {"parameters": {**PARAMETERS, "b": torch.tensor(1e-20)}}
    trained.update({"lr1e-4-delta": different, "lr1e-4-delta_gradients": different})
    assert demo.main() == 1
    shown = capsys.readouterr()
    assert "*** lr1e-4-delta IS DIFFERENT FROM lr1e-4-plain ***" in shown.err
    assert (
        "*** lr1e-4-delta_gradients IS DIFFERENT FROM lr1e-4-uncompressed_gradients ***"
        in shown.err
    )
    assert "bitwise identical" not in shown.out


def test_coded_gradients_must_equal_the_raw_ones_and_not_plain(
    trained: dict, quick: Path, capsys: pytest.CaptureFixture
) -> None:
    other_order = {"parameters": {**PARAMETERS, "b": torch.tensor(1e-20)}}
    trained.update(
        {"lr1e-4-uncompressed_gradients": other_order, "lr1e-4-delta_gradients": other_order}
    )
    assert demo.main() == 0
    trained["lr1e-4-delta_gradients"] = {}  # as plain
    assert demo.main() == 1
    assert "delta_gradients IS DIFFERENT" in capsys.readouterr().err


def test_the_tables_show_a_run_a_line_and_fit_a_wide_terminal(
    trained: dict, tmp_path: Path
) -> None:
    bits = {"first_gather": 11.11, "later_gathers": 11.11, "gradients": 9.87}
    trained["lr1e-4-delta_gradients"] = {"bits": bits, "zeros": 0.125}
    trained["lr1e-4-uncompressed_gradients"] = {"losses": [5.0] * STEPS}
    trained["lr1e-4-delta_gradients"] |= trained["lr1e-4-uncompressed_gradients"]
    compressions = list(demo.COMPRESSIONS)
    shown = tables(
        demo.run_demo(
            steps=STEPS, compressions=compressions, learning_rates=[1e-4], output=tmp_path / "demo"
        )
    )
    assert max(map(len, shown.splitlines())) <= 150
    for compression in demo.COMPRESSIONS.values():
        assert sum(compression.label in line.split("  ") for line in shown.splitlines()) == 2
    (wire,) = (line for line in shown.splitlines() if "9.87" in line)
    assert "12.5%" in wire
    (raw,) = (line for line in shown.splitlines() if "none: other order of sums" in line)
    assert demo.COMPRESSIONS["uncompressed_gradients"].label in raw


def test_a_second_demo_leaves_nothing_of_the_first(trained: dict, tmp_path: Path) -> None:
    arguments = {"steps": STEPS, "output": tmp_path, "learning_rates": [1e-4]}
    demo.run_demo(compressions=["delta", "entropy"], **arguments)
    (tmp_path / "mine").mkdir()
    demo.run_demo(compressions=["delta"], **arguments)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"lr1e-4-plain", "lr1e-4-delta", "summary.json", "mine"}


def test_an_unknown_compression_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "summary.json").touch()
    with pytest.raises(ValueError, match=r"\['values'\] are unknown: there are plain, .*delta"):
        demo.run_demo(compressions=["values"], output=tmp_path)
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
