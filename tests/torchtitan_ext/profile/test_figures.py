"""Figures are drawn from a profile alone."""

import copy
import sys
from pathlib import Path

import pytest

from torchtitan_ext.profile.figures import draw

PROFILE = {
    "job": {
        "name": "tiny.toml",
        "world_size": 2,
        "backend": "gloo",
        "device": "cpu",
        "learning_rate": 1e-4,
        "steps": 4,
        "settled_after_step": 2,
    },
    "communication": {
        "seconds_per_step": {"all_gather": 0.5, "reduce_scatter": 0.3, "all_reduce": 0.2},
        "bytes_per_step": {"all_gather": 60, "reduce_scatter": 20, "dispatch": 15, "combine": 5},
    },
    "exponent_change_by_step": [
        {"step": step, "rates": {"all": 0.01 * step, "norm": 0.0}} for step in (2, 3, 4)
    ],
    "shard_change_by_world_size": [
        {"world_size": 1, "how": "joined", "rate": 0.6},
        {"world_size": 2, "how": "measured", "rate": 0.5},
        {"world_size": 4, "how": "projected", "rate": 0.4},
    ],
    "block_change_by_block_size": {
        "block_sizes": [64, 128],
        "rates": {"all": [0.1, 0.2], "norm": [0.0, 0.0]},
    },
    "block_change_by_shard_type": {
        "block_size": 512,
        "shards": {
            kind: {
                "shards": 3,
                "least": 0.1,
                "lower_quartile": 0.2,
                "median": 0.3,
                "upper_quartile": 0.4,
                "most": 0.5,
            }
            for kind in ("all", "norm")
        },
    },
    "exponent_change_by_interval": {
        "sampled_share": 1.0,
        "intervals": [1, 2],
        "rates": [0.01, 0.02],
    },
    "check_cost": {
        "seconds": {"hash": 0.1, "compare": 0.01},
        "intervals": [1, 2],
        "share_of_step": {"hash": [0.1, 0.05], "compare": [0.01, 0.005]},
    },
}


def test_five_pictures_show_the_numbers_of_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    bars, lines, boxes = [], [], []
    barh, plot, bxp = Axes.barh, Axes.plot, Axes.bxp

    def record_barh(axes, place, width, **options):
        bars.append((place, width))
        return barh(axes, place, width, **options)

    def record_plot(axes, x, y, *rest, **options):
        lines.append((options.get("label"), x, y))
        return plot(axes, x, y, *rest, **options)

    def record_bxp(axes, given, **options):
        boxes.extend(given)
        return bxp(axes, given, **options)

    monkeypatch.setattr(Axes, "barh", record_barh)
    monkeypatch.setattr(Axes, "plot", record_plot)
    monkeypatch.setattr(Axes, "bxp", record_bxp)
    files = draw(PROFILE, tmp_path)
    assert [file.name for file in files] == [f"figure_{number}.png" for number in range(1, 6)]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    # Of time: all-gather, reduce-scatter, all-to-all, others; then of bytes.
    assert bars == [(0, 50), (0, 30), (0, 0), (0, 20), (1, 60), (1, 20), (1, 20), (1, 0)]
    assert ("measured", [2], [50]) in lines
    assert ("joined: neighboring shards", [1], [60]) in lines
    assert ("projected: shards divided", [4], [40]) in lines
    assert ("all shards", [2, 3, 4], [2, 3, 4]) in lines
    assert ("all shards", [64, 128], [10, 20]) in lines
    assert ("all exponents", [1, 2], [1, 2]) in lines
    (norm,) = boxes
    assert (norm["whislo"], norm["med"], norm["whishi"]) == (10, 30, 50)


def test_what_was_not_seen_is_left_out(tmp_path: Path) -> None:
    profile = copy.deepcopy(PROFILE)
    profile["communication"] = {"seconds_per_step": {}, "bytes_per_step": {}}
    profile["exponent_change_by_interval"]["rates"] = [0.01, None]
    assert len(draw(profile, tmp_path)) == 5


def test_a_full_disk_leaves_the_older_figure_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    draw(PROFILE, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def half(figure: Figure, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match=r"figure_1\.png cannot be written: No space left"):
        draw(PROFILE, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_without_matplotlib_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'narrowcast\[plots\]'"):
        draw(PROFILE, tmp_path)
