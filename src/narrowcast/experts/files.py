"""Files that are written whole or not at all."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` if nothing was raised.

    Raises:
        OSError: the folder cannot be made, or `path` is one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the name of a file")
    unfinished = path.with_name(f"{path.name}.part")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise the OSError now that writing `path` would raise later. Leaves what is there."""
    with contextlib.suppress(InterruptedError), whole(path) as unfinished:
        unfinished.touch()
        raise InterruptedError  # before it takes the place of anything
