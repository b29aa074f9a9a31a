"""Layers in processes: in order, with errors by name, and without any that outlive their parent."""

import operator
import os
import signal
import subprocess
import sys
import time

import pytest

from narrowcast.placement import parallel


@pytest.mark.parametrize("processes", [1, 2, 9])
def test_results_are_in_the_order_of_the_layers_whatever_the_processes(processes: int) -> None:
    assert parallel.each(operator.neg, iter(range(5)), 5, processes=processes) == [
        *(0, -1, -2, -3, -4)
    ]


def test_short_work_starts_no_process_and_long_work_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "processes_for", lambda _: 2)
    here = os.getpid()
    assert parallel.each(_pid, range(3), 3, processes=None) == [here] * 3
    monkeypatch.setattr(parallel, "_WORTH_STARTING", 0.0)
    first, *others = parallel.each(_pid, range(3), 3, processes=None)
    assert first == here
    assert here not in others


def _pid(_: int) -> int:
    return os.getpid()


def test_an_error_of_a_layer_is_raised_and_no_other_is_waited_for() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="invalid literal for int"):
        parallel.each(_slow_int, ["x", 300, 300], 3, processes=2)
    assert time.monotonic() - start < 60


def _slow_int(text: str | int) -> int:
    if isinstance(text, int):
        time.sleep(text)
    return int(text)


def test_a_process_that_is_killed_is_named_and_not_waited_for() -> None:
    with pytest.raises(ChildProcessError, match="killed from outside, as happens when memory"):
        parallel.each(os._exit, [1, 1], 2, processes=2)


@pytest.mark.wide  # processes of their own, which import torch
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_command(how: signal.Signals) -> None:
    script = (
        "import time; from narrowcast.placement import parallel\n"
        "if __name__ == '__main__':\n"
        "    parallel.each(time.sleep, [0, 1, 300, 300], 4, processes=2, progress=True)\n"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", script],
        stderr=subprocess.PIPE,
        start_new_session=True,
        # In the background of a shell, tests are run with it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    shown = b""
    while b"2/4" not in shown:  # two layers are done, and two have begun
        read = os.read(command.stderr.fileno(), 4096)
        assert read, shown.decode()  # it has ended
        shown += read
    command.send_signal(how)  # to it alone, as no terminal would
    assert command.wait(timeout=60) != 0
    deadline = time.monotonic() + 60
    while _alive(command.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(command.pid)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
