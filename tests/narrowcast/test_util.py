"""Files are whole or not there, at the end of links, with the modes that users gave them."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from narrowcast import util
from narrowcast.util import check_writable, whole, write_text


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with whole(path) as unfinished:
        unfinished.write_text("old")
        assert not path.exists()
    with pytest.raises(TypeError), whole(path) as unfinished:
        unfinished.write_text("half") + "of it"
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("kept")
    check_writable(path)
    assert path.read_text() == "kept"
    check_writable(tmp_path / "folder" / "file")
    with pytest.raises(OSError, match="is a folder"):
        check_writable(tmp_path)
    with pytest.raises(OSError, match="file"):
        check_writable(path / "in a file")
    assert {p.name for p in tmp_path.iterdir()} == {"file", "folder"}


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    far, near = tmp_path / "far", tmp_path / "near"
    far.mkdir()
    near.mkdir()
    (far / "file").write_text("old")
    (near / "link").symlink_to("../far/file")
    (near / "link to the link").symlink_to(near / "link")
    write_text(near / "link to the link", "new")
    assert (far / "file").read_text() == "new"
    assert (near / "link").readlink() == Path("../far/file")
    assert (near / "link to the link").is_symlink()
    assert [*far.iterdir()] == [far / "file"]
    assert {path.name for path in near.iterdir()} == {"link", "link to the link"}


def test_a_link_to_nothing_yet_leads_to_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("folder/file")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "folder" / "file").read_text() == "new"
    assert (tmp_path / "link").is_symlink()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


KINDS: dict[str, Callable[[Path], None]] = {
    "a folder": Path.mkdir,
    "a named pipe": _pipe,
    "a socket": _socket,
    "a device": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", [check_writable, lambda path: write_text(path, "new")])
def test_what_is_no_regular_file_is_refused_by_name_and_stays(tmp_path, kind, write) -> None:
    path = tmp_path / "there"
    KINDS[kind](path)
    before = path.stat()
    with pytest.raises(OSError, match=rf"/there cannot be written: it is {kind}") as raised:
        write(path)
    assert path.stat().st_ino == before.st_ino
    assert path.stat().st_mode == before.st_mode
    assert "\n" not in str(raised.value)
    assert [*tmp_path.iterdir()] == [path]


def test_links_in_a_circle_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="/a cannot be written: Too many levels"):
        write_text(tmp_path / "a", "")


def test_a_new_file_has_the_mode_of_any_other_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        write_text(tmp_path / "new", "")
        with whole(tmp_path / "tensors") as unfinished:  # by a writer that opens it itself
            save_file({"a": torch.zeros(3)}, unfinished)
    finally:
        os.umask(umask)
    (tmp_path / "old").write_text("")
    (tmp_path / "old").chmod(0o751)
    write_text(tmp_path / "old", "new")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"new": 0o640, "tensors": 0o640, "old": 0o751}


def test_a_write_protected_file_is_refused(tmp_path: Path, monkeypatch) -> None:
    write_text(tmp_path / "file", "old")
    # To root, as tests may run, nothing is protected.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="/file cannot be written: it is write-protected"):
        write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    write_text(tmp_path / "file", "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for place in ("fsync", "open"):
        with monkeypatch.context() as patched:
            patched.setattr(util.os, place, full)
            with pytest.raises(OSError, match="/file cannot be written: No space left") as raised:
                write_text(tmp_path / "file", "new")
        assert raised.value.errno == 28
        assert (tmp_path / "file").read_text() == "old"
        assert [*tmp_path.iterdir()] == [tmp_path / "file"]


_TOO_MUCH = """
import resource, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from narrowcast.util import whole

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for write in (
    lambda path: path.write_bytes(bytes(9999)),
    lambda path: save_file({"a": torch.zeros(9999)}, path),
):
    try:
        with whole(Path(sys.argv[1])) as unfinished:
            write(unfinished)
    except OSError as error:
        print(error)
"""


def test_a_disk_that_fills_up_while_writing_is_told_with_the_name(tmp_path: Path) -> None:
    """Also where a library has errors of its own: a file may grow to 4 KiB here."""
    save_file({"a": torch.ones(3)}, tmp_path / "file")
    command = [sys.executable, "-c", _TOO_MUCH, tmp_path / "file"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(told) == 2
    for line in told:
        assert line.startswith(f"{tmp_path / 'file'} cannot be written: ")
        assert "too large" in line
    assert load_file(tmp_path / "file")["a"].tolist() == [1, 1, 1]
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]
