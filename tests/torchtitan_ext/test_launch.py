"""Before a job begins all ranks agree that it can, or end alike."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchtitan_ext.tiny import write_toml

ROOT = Path(__file__).parents[2]
RANK = """
import os, sys
from torchtitan_ext.launch import prepared

def prepare():
    print("a word")
    failing = sys.argv[1].split(",")
    if os.environ["RANK"] in failing:
        if sys.argv[2] == "exit":
            sys.exit(2)
        if sys.argv[2] == "fail":
            raise KeyError("a bug")
        raise OSError("no file")
    return 7

assert prepared("it", prepare) == 7
import torch.distributed as dist
dist.init_process_group("gloo")  # where the ranks have met already
dist.barrier()
"""


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _run(failing: str, how: str = "raise") -> list[tuple[int, str, str]]:
    """Exit code and what was printed of two ranks, which any launcher might have started."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    where["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, failing, how],
            env={**os.environ, **where, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    printed = [process.communicate(timeout=120) for process in processes]
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, printed, strict=True)]


@pytest.mark.parametrize(
    ("failing", "how", "said"),
    [
        ("1", "raise", "it: on rank 1: no file\n"),
        pytest.param("0", "raise", "it: no file\n", marks=pytest.mark.wide),
        pytest.param("0,1", "raise", "it: no file\n", marks=pytest.mark.wide),
        pytest.param(
            "1", "exit", "it: on rank 1: the command line is wrong\n", marks=pytest.mark.wide
        ),
        pytest.param("0,1", "exit", "", marks=pytest.mark.wide),  # the parser has said it
    ],
)
def test_what_is_wrong_on_any_rank_ends_every_one(failing: str, how: str, said: str) -> None:
    assert _run(failing, how) == [(2, "a word\n", said), (2, "", "")]


def test_a_rank_that_fails_otherwise_shows_its_traceback_and_ends_the_other() -> None:
    first, second = _run("1", "fail")
    assert first == (2, "a word\n", "it: on rank 1: KeyError: 'a bug'\n")
    assert second[0] == 1
    assert "Traceback" in second[2]


@pytest.mark.wide  # as every launch shows
def test_where_nothing_is_wrong_the_job_begins() -> None:
    (first, out, _), (second, others_out, _) = _run("none")
    assert (first, second) == (0, 0)
    assert (out, others_out) == ("a word\n", "")


@pytest.mark.wide  # of two ranks that torchtitan's imports slow down
def test_torchrun_ends_with_one_line_of_ours_and_code_2_of_every_rank(
    folder: Path, tmp_path: Path
) -> None:
    """A placement that the first rank alone looks for."""
    toml = write_toml(folder, folder / "corpus", tmp_path / "launched")
    missing = str(tmp_path / "missing.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "torchtitan_ext.train", "--job.config_file"]
    command += [str(toml), "--parallelism.expert_parallel_degree", "2"]
    command += ["--narrowcast.placement.file", missing]
    path = os.pathsep.join([str(ROOT), *sys.path])
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200
    )
    ours = [line for line in ended.stderr.splitlines() if missing in line]
    assert ours == [
        f'torchtitan_ext.train: narrowcast.placement.file = "{missing}": {missing}: there is no '
        "such placement"
    ]
    assert re.findall(r"exitcode  : (-?\d+)", ended.stderr) == ["2", "2"]
