from pathlib import Path

import pytest

from narrowcast.experts.files import check_writable, whole


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
