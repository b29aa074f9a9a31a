"""What a gather, a reduction and a step cost does not grow faster than the number of groups."""

import json
import subprocess
import sys
from pathlib import Path


def test_calls_do_not_grow_with_groups(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchtitan_ext.benchmarks.scale"]
    command += ["--ranks", "4", "8", "--groups", "2", "6", "--json", str(tmp_path / "rows.json")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads((tmp_path / "rows.json").read_text())
    header, *rows = (line.split() for line in output.splitlines())
    assert header == list(found[0])
    assert rows == [[f"{value:.0f}" for value in row.values()] for row in found]
    assert [(row["ranks"], row["groups"]) for row in found] == [(4, 2), (4, 6), (8, 2), (8, 6)]
    assert {row["gather_calls"] for row in found} == {1}
    # Sizes and payloads: an exchange each with every other rank.
    assert {(row["ranks"], row["reduction_calls"]) for row in found} == {(4, 6), (8, 14)}
