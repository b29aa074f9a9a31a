"""Small helpers: a clock that waits for the device, sums of records, tables as text, ordinary
tensors in any mode, and files that are written whole or not at all."""

import contextlib
import math
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from torch import Tensor

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}
"""What a path may lead to that is no regular file, by the type in its mode."""


def now(device: torch.device) -> float:
    """Seconds of a clock, once the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


class Summable:
    """A dataclass of numbers: their sums, one by one."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def aligned(rows: Sequence[Sequence[str]], words: int) -> str:
    """Rows in columns, of which the first ones hold words, and the others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def percent(share: float) -> str:
    """With a digit behind the point; - for nan."""
    return "-" if math.isnan(share) else f"{share:.1%}"


def number(value: float, digits: int) -> str:
    """With so many digits behind the point; - for nan."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


@contextlib.contextmanager
def own_mode() -> Iterator[None]:
    """Tensors made within are ordinary ones, whatever mode the caller runs in.

    Caches that were first filled in an evaluation under ``torch.inference_mode`` would be inference
    tensors, which nothing may write to outside of it.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def ordinary(tensor: Tensor) -> Tensor:
    """The same memory as an ordinary tensor, to be written to in ``own_mode``."""
    if not tensor.is_inference():
        return tensor
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` if nothing was raised.

    Where `path` is a link, it takes the place of what the link leads to. A file that was there
    keeps its mode and, where that is allowed, its owner.

    Raises:
        OSError: it cannot be written, or is no regular file. The message names `path`.
    """
    unfinished = None
    try:
        with _naming(path):
            target, there = _target(path)
            unfinished = _unfinished_beside(target)
            mode = stat.S_IMODE((there or unfinished.stat()).st_mode)
            yield unfinished
            if there is not None:
                with contextlib.suppress(PermissionError):
                    os.chown(unfinished, there.st_uid, there.st_gid)
            unfinished.chmod(mode)
            _to_disk(unfinished)
            unfinished.replace(target)
            with contextlib.suppress(OSError):  # not every file system does that to folders
                _to_disk(target.parent)
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all. Raises what `whole` raises."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def check_writable(path: Path) -> None:
    """Raise the OSError now that writing `path` would raise later. Leaves what is there."""
    with _naming(path):
        _unfinished_beside(_target(path)[0]).unlink()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Makes every error of writing an OSError that names the file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        is_ours = isinstance(error, OSError)
        reason = (error.strerror if is_ours else None) or str(error)
        named = (type(error) if is_ours else OSError)(f"{path} cannot be written: {reason}")
        named.errno = error.errno if is_ours else None
        raise named from error


def _target(path: Path) -> tuple[Path, os.stat_result | None]:
    """The file that a path leads to, by links too, and what is there now."""
    try:
        there = os.stat(path)
    except FileNotFoundError:  # at the end of a link either
        there = None
    if there is not None and not stat.S_ISREG(there.st_mode):
        kind = KINDS.get(stat.S_IFMT(there.st_mode), "no regular file")
        raise OSError(f"it is {kind}: give the name of a file")
    target = Path(os.path.realpath(path))
    if there is not None and not os.access(target, os.W_OK):
        raise PermissionError("it is write-protected")
    return target, there


def _unfinished_beside(target: Path) -> Path:
    """A new file in the same folder, which is made where it is missing."""
    if target.parent.exists() and not target.parent.is_dir():
        raise NotADirectoryError(f"{target.parent} is no folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{secrets.token_hex(8)}.part")
    os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    return unfinished


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
