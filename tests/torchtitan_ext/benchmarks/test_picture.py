"""The picture has the bits of the demo's summary."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan_ext.benchmarks.picture import COLLECTIVES, draw, main


def _run(compression: str, rate: float, *bits: float) -> dict[str, Any]:
    of_parts = {**dict(zip(COLLECTIVES, bits, strict=True)), "step": 1.0, "whole_step": 2.0}
    return {"compression": compression, "learning_rate": rate, "bits_per_parameter": of_parts}


SUMMARY = {
    "world_size": 4,
    "parameters": 6_076_352,
    "runs": [
        _run("plain", 1e-4, 16, 16, 32),
        _run("delta", 1e-4, 2.9, 0.002, 32),
        _run("delta_gradients", 1e-4, 2.92, 0.0023, 9.86),
        _run("plain", 1e-5, 1, 1, 1),
    ],
}


def test_bars_are_the_bits_of_the_baseline_and_of_narrowcast() -> None:
    (axes,) = draw(SUMMARY).axes
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
    assert heights == [[16, 16, 32], [2.92, 0.0023, 9.86]]
    assert [text.get_text() for text in axes.texts] == [
        "16.0",
        "16.0",
        "32.0",
        "2.9",
        "0.0023",
        "9.9",
    ]


def test_a_small_png_is_written(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    assert main([str(tmp_path / "summary.json"), str(tmp_path / "bits.png")]) == 0
    written = (tmp_path / "bits.png").read_bytes()
    assert written.startswith(b"\x89PNG")
    assert len(written) < 60 << 10


def test_a_summary_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {**SUMMARY, "runs": SUMMARY["runs"][:2]}
    (tmp_path / "summary.json").write_text(json.dumps(few))
    assert main([str(tmp_path / "summary.json"), str(tmp_path / "bits.png")]) == 1
    assert "no runs of delta_gradients" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "summary.json"]
