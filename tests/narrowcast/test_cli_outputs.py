"""The files that commands write, and standard output that cannot be written."""

import errno
import io
import json
import sys
from pathlib import Path

import pytest

from narrowcast import cli
from narrowcast.cli import main
from narrowcast.placement.placement import load_placement
from tests.narrowcast.cli_files import LAYERS, best, error_of, make_trace, rows_of


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.safetensors"
    make_trace().save(path)
    return path


def test_a_plan_without_output_is_shown_and_nothing_is_written(trace_file, tmp_path, capsys):
    assert main(["placement", "plan", str(trace_file), "--ranks", "4"]) == 0
    shown = capsys.readouterr().out
    assert ["mean", "after", "1.00"] in [row[:3] for row in rows_of(shown)]
    assert "Wrote" not in shown
    assert [*tmp_path.iterdir()] == [trace_file]


def test_a_plan_goes_to_standard_output_and_its_table_beside_it(
    trace_file, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["placement", "plan", str(trace_file), "--ranks", "4", "--output", "-"]) == 0
    captured = capsys.readouterr()
    file = tmp_path / "placement.json"
    file.write_text(captured.out)
    assert load_placement(file).layers == LAYERS
    assert ["mean", "after", "1.00"] in [row[:3] for row in rows_of(captured.err)]
    assert "Wrote" not in captured.err
    assert {path.name for path in tmp_path.iterdir()} == {"trace.safetensors", "placement.json"}


def test_a_plan_is_written_through_a_link_and_never_over_a_device(trace_file, tmp_path, capsys):
    link, device = tmp_path / "link", tmp_path / "device"
    link.symlink_to("placement.json")
    device.symlink_to("/dev/null")
    plan = ("placement", "plan", str(trace_file), "--ranks", "4", "--output")
    assert main([*plan, str(link)]) == 0
    assert link.is_symlink()
    assert load_placement(tmp_path / "placement.json").layers == LAYERS
    capsys.readouterr()
    assert f"{device} cannot be written: it is a device" in error_of(capsys, *plan, device)
    assert f"{tmp_path} cannot be written: it is a folder" in error_of(capsys, *plan, tmp_path)
    best().save(tmp_path / "best.json")
    show = ("placement", "show", trace_file, tmp_path / "best.json", "--heatmap")
    assert f"{device} cannot be written: it is a device" in error_of(capsys, *show, device)
    assert '--heatmap "-": give the name of a file' in error_of(capsys, *show, "-")
    assert Path("/dev/null").is_char_device()


class FullStream(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("output", [(), ("--output", "-")])
def test_a_full_disk_behind_standard_output_is_one_line(trace_file, capsys, monkeypatch, output):
    plan = ("placement", "plan", str(trace_file), "--ranks", "4", *output)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", FullStream())
        assert main(plan) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line == "narrowcast: standard output cannot be written: No space left on device"


def test_a_full_disk_leaves_the_older_plan(trace_file, tmp_path, capsys, monkeypatch):
    output = tmp_path / "placement.json"
    best().save(output)
    before = output.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for write in ("write_text", "chmod"):
        with monkeypatch.context() as patched:
            patched.setattr(Path, write, full)
            plan = ("placement", "plan", str(trace_file), "--ranks", "8", "--output", str(output))
            assert main(plan) == 2
        captured = capsys.readouterr()
        assert "Wrote" not in captured.out
        last_line = captured.err.splitlines()[-1]
        assert last_line == f"narrowcast: {output} cannot be written: No space left on device"
        assert output.read_bytes() == before
        assert {path.name for path in tmp_path.iterdir()} == {trace_file.name, output.name}


def objects_of(file: Path) -> list[dict]:
    return json.loads(file.read_text(), parse_constant=pytest.fail)


def test_the_rows_of_a_trace_are_written_as_objects(trace_file, tmp_path, capsys):
    file = tmp_path / "new" / "rows.json"
    assert main(["trace", "show", str(trace_file), "--json", str(file)]) == 0
    assert f"\nWrote {file}\n" in capsys.readouterr().out
    first, second = objects_of(file)
    assert first["layer"] == "layers.1.moe"
    assert first["busiest_expert_load_over_mean"] == 1
    assert first["top_pairs_fraction"] == 0.25
    assert first["most_frequent_next_fraction"] == 0.5
    assert first["second_order_correlation"] is None  # what is printed as -
    assert first["rows_per_token_by_ep_degree"] == {"2": 2, "4": 2, "8": 2}
    assert first["tokens_by_expert"] == [768] * 8
    assert second["layer"] == "layers.2.moe"
    assert second["most_frequent_next_fraction"] is None


@pytest.mark.parametrize("command", ["plan", "show"])
def test_the_rows_of_a_placement_are_written_as_objects(command, trace_file, tmp_path, capsys):
    file, placement_file = tmp_path / "rows.json", tmp_path / "placement.json"
    best().save(placement_file)
    arguments = {
        "plan": [trace_file, "--ranks", "4", "--output", "-"],
        "show": [trace_file, placement_file],
    }[command]
    assert main([str(a) for a in ("placement", command, *arguments, "--json", file)]) == 0
    rows = {(row["layer"], row["placement"]): row for row in objects_of(file)}
    assert [*rows] == [(layer, name) for layer in LAYERS for name in ("before", "after")]
    assert rows["layers.1.moe", "before"]["rows_per_token"] == 2
    after = rows["layers.1.moe", "after"]
    assert after["rows_per_token"] == 1
    assert after["rows_removed_fraction"] == 0.5
    assert after["intra_rank_pairs_fraction"] == 1
    assert after["busiest_rank_load_over_mean"] == 1
    assert {*after} - {"layer", "placement"} == {
        *("rows_per_token", "rows_removed_fraction", "intra_rank_pairs_fraction"),
        *("local_assignments_fraction", "nodes_per_token", "rows_to_other_ranks_per_token"),
        *("rows_to_other_nodes_per_token", "busiest_rank_load_over_mean"),
        "busiest_rank_rows_over_mean",
    }
    captured = capsys.readouterr()
    if command == "plan":  # the plan itself is all of standard output
        placement_file.write_text(captured.out)
        assert load_placement(placement_file).layers == LAYERS
    assert f"Wrote {file}" in (captured.err if command == "plan" else captured.out)


def test_rows_that_cannot_be_written_are_refused_before_any_work(
    trace_file, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(cli, "make_plan", pytest.fail)
    monkeypatch.setattr(cli, "measure_router", pytest.fail)
    monkeypatch.setattr(cli, "measure", pytest.fail)
    best().save(tmp_path / "best.json")
    device = tmp_path / "device"
    device.symlink_to("/dev/null")
    for command in (
        ("trace", "show", trace_file),
        ("placement", "plan", trace_file, "--ranks", "4"),
        ("placement", "show", trace_file, tmp_path / "best.json"),
    ):
        for nothing in ("-", ""):
            error = error_of(capsys, *command, "--json", nothing)
            assert f'--json "{nothing}": give the name of a file' in error
        error = error_of(capsys, *command, "--json", device)
        assert f"{device} cannot be written: it is a device" in error
    plan = ("placement", "plan", trace_file, "--ranks", "4", "--output", tmp_path / "a.json")
    error = error_of(capsys, *plan, "--json", tmp_path / "new" / ".." / "a.json")
    assert "is also the file of --json: give another name" in error
    assert not (tmp_path / "a.json").exists()


def test_a_full_disk_leaves_the_older_rows(trace_file, tmp_path, capsys, monkeypatch):
    file = tmp_path / "rows.json"
    file.write_text("[]")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["trace", "show", str(trace_file), "--json", str(file)]) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line == f"narrowcast: {file} cannot be written: No space left on device"
    assert file.read_text() == "[]"
    assert {path.name for path in tmp_path.iterdir()} == {trace_file.name, file.name}
