"""What a gather, a reduction and a step cost does not grow faster than the number of groups."""

import subprocess
import sys


def test_calls_do_not_grow_with_groups() -> None:
    command = [
        sys.executable,
        "-m",
        "torchtitan_ext.benchmarks.scale",
        "--ranks",
        "4",
        "8",
        "--groups",
        "2",
        "6",
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    header, *rows = (line.split() for line in output.splitlines())
    found = [dict(zip(header, map(float, row), strict=True)) for row in rows]
    assert [(one["ranks"], one["groups"]) for one in found] == [(4, 2), (4, 6), (8, 2), (8, 6)]
    assert {one["gather_calls"] for one in found} == {1}
    # Sizes and payloads: a swap each with every other rank.
    assert {(one["ranks"], one["reduction_calls"]) for one in found} == {(4, 6), (8, 14)}
