"""The command ``narrowcast``: what it prints, writes and returns."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowcast import cli
from narrowcast.cli import main
from narrowcast.placement import routers, trace
from narrowcast.placement.correlation import coselection
from narrowcast.placement.effort import Effort
from narrowcast.placement.placement import contiguous, load_placement
from narrowcast.placement.planning import HELD_OUT, Plan
from narrowcast.placement.trace import RoutingTrace
from tests.narrowcast.cli_files import LAYERS, best, error_of, make_trace, planned, rows_of


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.safetensors"
    make_trace().save(path)
    return path


def test_a_trace_is_shown_without_torchtitan(trace_file, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "narrowcast"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("torchtitan", "torchtitan_ext"):
        monkeypatch.setitem(sys.modules, name, None)  # whoever imports it fails
    anew = importlib.import_module("narrowcast.cli")
    assert anew is not cli
    assert anew.main(["trace", "show", str(trace_file)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "qwen3 demo: 2 MoE layers, top-2 of 8 experts, recorded at EP 2; "
        "3072 tokens of 3 steps, 1 to 3\n"
    )
    rows = rows_of(shown)
    # Four of 28 pairs occur, equally often; an expert is first of its pair half of the time, and
    # is followed by itself then.
    assert ["layers.1.moe", "1.00", "1.00", "25.0%", "3.6%", "50.0%", "1.000", "1.000", "-"] in rows
    assert ["layers.2.moe", "1.00", "1.00", "25.0%", "3.6%", "-", "1.000", "-", "-"] in rows
    # C_T at EP 2, 4 and 8.
    assert ["layers.1.moe", "2.00", "2.00", "2.00"] in rows
    assert ["layers.2.moe", "1.00", "1.00", "2.00"] in rows


def test_chosen_layers_are_shown_with_the_load_of_every_expert(trace_file, capsys):
    assert main(["trace", "show", str(trace_file), "--layers", LAYERS[1]]) == 0
    shown = capsys.readouterr().out
    assert "layers.1.moe" not in shown
    assert f"layers.2.moe, tokens of each expert:\n{' '.join(['768'] * 8)}\n" in shown


def test_a_short_trace_is_shown_without_correlations(tmp_path, capsys):
    path = tmp_path / "short.safetensors"
    make_trace(100).save(path)
    assert main(["trace", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "100 tokens of step 1\n" in shown
    assert "The trace is short" in shown
    first_layer = next(row for row in rows_of(shown) if row[:1] == ["layers.1.moe"])
    assert first_layer[-2:] == ["-", "-"]


def test_a_plan_is_written_and_judged(trace_file, tmp_path, capsys):
    output = tmp_path / "new" / "placement.json"
    arguments = ["placement", "plan", trace_file, "--ranks", "4", "--output", output]
    assert main([str(argument) for argument in arguments]) == 0
    shown = capsys.readouterr().out
    assert "\nFitted on 2458 of the earlier 2458 tokens, 64 restarts a layer; " in shown
    assert "judged by the later 614, load by all 3072\n" in shown
    assert "Before: contiguous; after: rows; on 4 ranks of 1 node\n" in shown
    c_t = {tuple(row[:2]): row[2] for row in rows_of(shown) if len(row) == 11}
    assert c_t["layers.1.moe", "before"] == "2.00"
    assert c_t["layers.1.moe", "after"] == "1.00"
    assert c_t["mean", "before"] == "1.50"
    assert c_t["mean", "after"] == "1.00"
    placement = load_placement(output)
    assert (placement.layers, placement.num_ranks, placement.method) == (LAYERS, 4, "rows")
    assert placement.ranks_LE[0].tolist()[:4] == placement.ranks_LE[0].tolist()[4:]


def test_a_plan_gets_every_option_and_is_judged_on_tokens_that_it_was_not_fitted_on(
    trace_file, tmp_path, capsys, monkeypatch
):
    calls = []
    given = make_trace()
    fitted, _ = given.split(HELD_OUT)
    given.ids_LTK[:, fitted.num_tokens :] = torch.arange(2)  # later ones: experts of one rank
    given.save(trace_file)

    def make_plan(trace: RoutingTrace, num_ranks: int, **options: object) -> Plan:
        calls.append((trace, num_ranks, options))
        return planned(replace(best(), num_nodes=2))

    monkeypatch.setattr(cli, "make_plan", make_plan)
    command = f"placement plan {trace_file} --ranks 4 --nodes 2 --method rows --max-load 1.5 "
    command += "--cross-node-weight 3 --seconds 4 --restarts 5 --seed 7"
    assert main([*command.split(), "--output", str(tmp_path / "p.json")]) == 0
    ((trace, num_ranks, options),) = calls
    assert torch.equal(trace.ids_LTK, given.ids_LTK)
    rows = [row[:3] for row in rows_of(capsys.readouterr().out)]
    assert ["layers.1.moe", "before", "1.00"] in rows
    assert ["layers.1.moe", "after", "2.00"] in rows
    assert num_ranks == 4
    assert options == {
        "num_nodes": 2,
        "method": "rows",
        "max_load": 1.5,
        "cross_node_weight": 3.0,
        "seconds": 4.0,
        "restarts": 5,
        "seed": 7,
        "processes": None,
        "progress": True,
    }


def test_a_load_bound_that_was_not_reached_causes_a_warning(
    trace_file, tmp_path, capsys, monkeypatch
):
    trace = make_trace()
    # Experts 4 to 7 of the second layer get no tokens: two of four ranks are idle.
    ids_LTK = trace.ids_LTK.clone()
    ids_LTK[1] %= 4
    replace(trace, ids_LTK=ids_LTK).save(trace_file)
    monkeypatch.setattr(cli, "make_plan", lambda *_, **__: planned(best()))
    command = f"placement plan {trace_file} --ranks 4 --output {tmp_path / 'p.json'} --max-load"
    assert main([*command.split(), "1.5"]) == 0
    warning = capsys.readouterr().err
    assert "too much in 1 of 2 layers, the most in layers.2.moe with 2.00" in warning
    assert "--max-load is not reached" in warning
    assert main([*command.split(), "2.1"]) == 0
    assert capsys.readouterr().err == ""


def test_the_table_of_a_plan_has_the_load_of_all_tokens_and_what_no_bound_would_gain(
    trace_file, tmp_path, capsys, monkeypatch
):
    trace = make_trace()
    # Experts 4 to 7 of the second layer are selected by earlier tokens alone.
    ids_LTK = trace.ids_LTK.clone()
    ids_LTK[1, 2400:] %= 4
    replace(trace, ids_LTK=ids_LTK).save(trace_file)
    made = Plan(contiguous("qwen3 demo", LAYERS, 8, 4), best(), Effort(1024, 4))
    monkeypatch.setattr(cli, "make_plan", lambda *_, **__: made)
    command = f"placement plan {trace_file} --ranks 4 --output {tmp_path / 'p.json'}"
    assert main(command.split()) == 0
    shown = capsys.readouterr().out
    assert "Fitted on 1024 of the earlier 2458 tokens, 4 restarts a layer; judged by" in shown
    load = {(row[0], *row[1:-9]): row[-2] for row in rows_of(shown) if len(row) > 10}
    assert load["layers.2.moe", "after"] == "1.22"  # and 2.00 of the later tokens
    c_t = {(row[0], *row[1:-9]): row[-9] for row in rows_of(shown) if len(row) > 10}
    assert c_t["layers.1.moe", "after"] == "2.00"
    assert c_t["layers.1.moe", "no", "bound"] == "1.00"


def test_a_plan_is_made_of_coselection_counts(tmp_path, capsys):
    counts, output = tmp_path / "counts.npz", tmp_path / "placement.json"
    counts_LEE = torch.stack([coselection(ids_TK, 8) for ids_TK in make_trace().ids_LTK])
    np.savez(counts, coselection=counts_LEE.numpy(), model="qwen3 demo", layers=LAYERS)
    command = f"placement plan {counts} --ranks 4 --output {output}".split()
    assert main([*command, "--top-k", "2"]) == 0
    shown = capsys.readouterr().out
    assert "qwen3 demo: co-selection counts of 2 MoE layers, top-2 of 8 experts\n" in shown
    c_t = {tuple(row[:2]): row[2] for row in rows_of(shown) if len(row) == 11}
    assert c_t["layers.1.moe", "before"] == "2.00"
    assert c_t["layers.1.moe", "after"] == "1.00"
    placement = load_placement(output)
    assert (placement.model, placement.layers, placement.method) == ("qwen3 demo", LAYERS, "rows")
    # Unless it is known that a token is a pair, pairs are what is planned by.
    assert main(command) == 0
    assert "Before: contiguous; after: pairwise; on 4 ranks" in capsys.readouterr().out
    assert load_placement(output).method == "pairwise"


def test_what_counts_cannot_answer_is_one_line(trace_file, tmp_path, capsys):
    counts = tmp_path / "counts.npz"
    np.savez(counts, coselection=coselection(make_trace().ids_LTK[0], 8)[None].numpy())
    plan = ("placement", "plan", "--ranks", "4", "--output", tmp_path / "placement.json")
    error = error_of(capsys, *plan, counts, "--method", "rows", "--top-k", "3")
    assert "for a top-2 router only, and top_k is 3 here" in error
    assert "record a trace" in error
    assert 'works with method "rows"' in error_of(capsys, *plan, counts, "--max-load", "1.1")
    error = error_of(capsys, *plan, trace_file, "--top-k", "2")
    assert "--top-k 2 is for co-selection counts" in error


def test_of_a_trace_only_the_layers_that_are_asked_for_are_measured(
    trace_file, capsys, monkeypatch
):
    measured, measure = [], routers._measure_router_layer

    def counted(router):
        measured.append(router.layer)
        return measure(router)

    monkeypatch.setattr(routers, "_measure_router_layer", counted)
    assert main(["trace", "show", str(trace_file), "--layers", LAYERS[1]]) == 0
    assert measured == [LAYERS[1]]
    shown = capsys.readouterr()
    assert "1/1" in shown.err  # the bar
    alone = [row for row in rows_of(shown.out) if row[:1] == [LAYERS[1]]]
    assert main(["trace", "show", str(trace_file)]) == 0
    all_rows = rows_of(capsys.readouterr().out)
    assert len(alone) == 2  # of its traffic and of its ranks
    assert all(row in all_rows for row in alone)


def test_a_placement_is_shown_and_drawn(trace_file, tmp_path, capsys, monkeypatch):
    from matplotlib.axes import Axes

    drawn, imshow = [], Axes.imshow
    lines = []

    def record(axes, matrix, **options):
        drawn.append((torch.from_numpy(matrix.copy()), options["norm"]))
        return imshow(axes, matrix, **options)

    monkeypatch.setattr(Axes, "imshow", record)
    monkeypatch.setattr(Axes, "axvline", lambda axes, x, **_: lines.append(x))
    placement_file, picture = tmp_path / "placement.json", tmp_path / "heat.png"
    best().save(placement_file)
    arguments = ["placement", "show", trace_file, placement_file, "--heatmap", picture]
    assert main([*map(str, arguments), "--layer", LAYERS[0]]) == 0
    assert ["layers.1.moe", "after", "1.00"] in [
        row[:3] for row in rows_of(capsys.readouterr().out)
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")

    (before, scale), (after, same_scale) = drawn
    counts_EE = coselection(make_trace().ids_LTK[0], 8)
    assert torch.equal(before, (counts_EE > 0).double())
    # Pairs lie beside the diagonal, within the borders of the ranks.
    assert after.nonzero().tolist() == [[slot, slot ^ 1] for slot in range(8)]
    assert scale is same_scale
    assert lines == [1.5, 3.5, 5.5] * 2


def test_without_matplotlib_a_heat_map_is_refused_with_how_to_install_it(
    trace_file, tmp_path, capsys, monkeypatch
):
    placement_file = tmp_path / "placement.json"
    best().save(placement_file)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    show = ("placement", "show", trace_file, placement_file)
    error = error_of(capsys, *show, "--heatmap", tmp_path / "heat.png")
    assert "pip install 'narrowcast[plots]'" in error
    assert main([*map(str, show)]) == 0


def test_a_heat_map_of_an_unknown_layer_is_refused(trace_file, tmp_path, capsys):
    placement_file = tmp_path / "placement.json"
    best().save(placement_file)
    arguments = ("placement", "show", trace_file, placement_file, "--layer", "layers.9.moe")
    error = error_of(capsys, *arguments, "--heatmap", tmp_path / "heat.png")
    assert "there is no layer layers.9.moe: there are layers.1.moe, layers.2.moe" in error


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (contiguous("llama", LAYERS, 8, 4), "another model: llama there, qwen3 demo here"),
        (contiguous("qwen3 demo", LAYERS[:1], 8, 4), "number of MoE layers: 1 there, 2 here"),
        (contiguous("qwen3 demo", LAYERS, 16, 4), "number of experts: 16 there, 8 here"),
    ],
    ids=["model", "layers", "experts"],
)
def test_a_placement_of_something_else_is_refused(other, message, trace_file, tmp_path, capsys):
    placement_file = tmp_path / "placement.json"
    other.save(placement_file)
    assert message in error_of(capsys, "placement", "show", trace_file, placement_file)


@pytest.mark.parametrize(
    "content", [b"", b"not a trace", b"\xff" * 99], ids=["empty", "text", "ff"]
)
def test_a_file_of_another_kind_is_refused_in_one_line(content, trace_file, tmp_path, capsys):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert f"{path} is not a routing trace: it is " in error_of(capsys, "trace", "show", path)
    error = error_of(capsys, "placement", "show", trace_file, path)
    assert f"{path} is not a narrowcast.placement" in error


def test_a_placement_with_its_layers_in_another_order_is_judged_by_their_names(
    trace_file, tmp_path, capsys
):
    shown = []
    for number, placement in enumerate((best(), best().in_order(LAYERS[::-1]))):
        file, picture = tmp_path / f"{number}.json", tmp_path / f"{number}.png"
        placement.save(file)
        arguments = ["placement", "show", trace_file, file, "--heatmap", picture]
        assert main([str(argument) for argument in arguments]) == 0
        shown.append((capsys.readouterr().out.replace(str(picture), ""), picture.read_bytes()))
    assert shown[0] == shown[1]
    assert ["mean", "after", "1.00"] in [row[:3] for row in rows_of(shown[0][0])]


def test_a_folder_is_neither_a_trace_nor_a_placement(trace_file, tmp_path, capsys):
    error = error_of(capsys, "trace", "show", tmp_path)
    assert (
        f"{tmp_path} is not a routing trace: it is a folder, expected the safetensors file" in error
    )
    error = error_of(capsys, "placement", "show", trace_file, tmp_path)
    assert "it is a folder, expected the JSON that" in error
    error = error_of(capsys, "placement", "show", trace_file, trace_file)
    assert "it is a safetensors file, expected the JSON that" in error


def test_a_trace_that_no_plan_can_come_of_is_refused_before_any_work(
    trace_file, tmp_path, capsys, monkeypatch
):
    """Where today's writer would not write it."""
    monkeypatch.setattr(trace, "_described", lambda _: None)
    monkeypatch.setattr(trace, "_check_values", lambda _: None)
    ids_LTK = make_trace().ids_LTK.clone()
    ids_LTK[1, 5] = 3
    replace(make_trace(), layers=("a", "a")).save(tmp_path / "layers twice")
    replace(make_trace(), num_groups=3).save(tmp_path / "num_groups is 3")
    replace(make_trace(), num_ranks="x").save(tmp_path / 'num_ranks is "x"')
    replace(make_trace(), ids_LTK=ids_LTK).save(tmp_path / "expert 3 twice")
    monkeypatch.undo()
    for name in ("layers twice", "num_groups is 3", 'num_ranks is "x"', "expert 3 twice"):
        plan = ("placement", "plan", tmp_path / name, "--ranks", "4", "--output", tmp_path / "p")
        error = error_of(capsys, *plan)
        assert f"{tmp_path / name} is damaged: " in error
        assert name in error.replace("layers is", "layers twice")
    assert not (tmp_path / "p").exists()


def test_a_truncated_trace_is_refused_in_one_line(trace_file, capsys):
    trace_file.write_bytes(trace_file.read_bytes()[:-100])
    assert f"{trace_file} is damaged" in error_of(capsys, "trace", "show", trace_file)


def test_wrong_arguments_are_refused_in_one_line(trace_file, tmp_path, capsys):
    missing = tmp_path / "missing"
    assert "no such routing trace" in error_of(capsys, "trace", "show", missing)
    assert "no such placement" in error_of(capsys, "placement", "show", trace_file, missing)
    error = error_of(capsys, "trace", "show", trace_file, "--layers", "layers.9.moe")
    assert "has no layer layers.9.moe: it has layers.1.moe, layers.2.moe" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "3"], "8 experts do not divide over 3 ranks"),
        (["--ranks", "4", "--nodes", "3"], "4 ranks do not divide over 3 nodes"),
        (["--ranks", "4", "--max-load", "0.5"], "max_load = 0.5"),
    ],
)
def test_what_cannot_be_planned_is_refused_and_nothing_is_written(
    options, message, trace_file, tmp_path, capsys
):
    output = tmp_path / "placement.json"
    plan = ("placement", "plan", trace_file, "--output", output)
    assert message in error_of(capsys, *plan, *options)
    assert not output.exists()


def test_a_job_is_profiled_with_the_flags_of_torchtitan(tmp_path, monkeypatch):
    from torchtitan_ext.profile import command as profile_command

    calls = []
    monkeypatch.setattr(profile_command, "launch", lambda *arguments: calls.append(arguments) or 3)
    file = tmp_path / "x.toml"
    file.touch()
    command = f"profile --training.seq_len 8 --ranks 4 --job.config_file {file} --profile.steps 9"
    assert main([*command.split(), "--json", "it.json", "-x"]) == 3
    own = ["--job.config_file", str(file), "--profile.steps", "9", "--json", "it.json"]
    assert calls == [(4, [*own, "--training.seq_len", "8", "-x"])]


@pytest.mark.parametrize("ranks", [(), ("--ranks", "1")], ids=["no ranks", "one rank"])
def test_a_profile_of_a_missing_file_names_it_before_it_asks_for_ranks(ranks, tmp_path, capsys):
    file = tmp_path / "missing.toml"
    error = error_of(capsys, "profile", "--job.config_file", file, *ranks)
    assert error == f"narrowcast: --job.config_file {file}: there is no such file"


def test_a_profile_without_torchtitan_names_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    error = error_of(capsys, "profile", "--job.config_file", "x.toml")
    assert "torchtitan, which is not installed" in error


def test_other_commands_refuse_flags_that_they_do_not_have(trace_file, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["trace", "show", str(trace_file), "--ranks", "4"])
    assert raised.value.code == 2
    assert "unrecognized arguments: --ranks 4" in capsys.readouterr().err
