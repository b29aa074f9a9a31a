"""Checks of files that users give: what kind of file it is, and whether its fields are valid."""

import codecs
import contextlib
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowcast.util import KINDS

SAFETENSORS = "a safetensors file"
_MAGIC = {
    b"\x93NUMPY": "an array of numpy.save",
    b"\x89PNG": "a PNG picture",
    b"\x1f\x8b": "a gzip archive",
    b"\x80": "a pickle",
}
_HEAD = 4096
_MAX_HEADER = 100_000_000  # bytes: the limit of safetensors
_MAX_JSON = 64 << 20  # bytes
_MAX_SHOWN = 60  # characters of a value in a message


def kind_of(path: str | Path) -> str:
    """Return what a file is, in words, judging by its first bytes.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the file cannot be read.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        return KINDS.get(stat.S_IFMT(mode), "no regular file")
    with Path(path).open("rb") as file:
        head = file.read(_HEAD)
    if not head:
        return "an empty file"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_HEADER:
        return SAFETENSORS
    if head.startswith(b"PK\x03\x04"):
        inside = {b".pkl": "a file of torch.save", b".npy": "an .npz of numpy.savez"}
        return next((k for name, k in inside.items() if name in head[:256]), "a zip archive")
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head)
    except UnicodeDecodeError:
        return "binary data"
    if not "".join(text.split()).isprintable():
        return "binary data"
    return _kind_of_json(path) if text.lstrip()[:1] in ("{", "[") else "text"


def _kind_of_json(path: str | Path) -> str:
    if os.path.getsize(path) <= _MAX_JSON:
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if isinstance(content, list):
                return "a list in JSON"
            form = content.get("format")
            return f"JSON of format {shown(form)}" if form else "JSON of another kind"
    return "text"


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, has a key twice in an object, or is nested too deeply.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if (twice := first_twice([key for key, _ in pairs])) is not None:
            raise ValueError(f"it has {shown(twice)} twice")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def field(
    described: Mapping[str, Any], name: str, is_valid: Callable[[Any], bool], expected: str
) -> Any:
    """Return a field of a header, which must be valid.

    Args:
        described: the header.
        name: the name of the field.
        is_valid: returns whether a value is valid.
        expected: what is valid, in words.

    Raises:
        ValueError: the field is missing or invalid. The message names it, its value and what is
            expected.
    """
    if name not in described:
        others = f" (it has {', '.join(described)})" if described else ""
        raise ValueError(f"it lacks {name!r}{others:.{_MAX_SHOWN}}, expected {expected}")
    value = described[name]
    if not is_valid(value):
        raise ValueError(f"{name} is {shown(value)}, expected {expected}")
    return value


def shown(value: Any) -> str:
    """Return a value as JSON, shortened."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def is_integer(value: Any, least: int, most: int) -> bool:
    """Return whether a value is an integer in a range, and not a bool."""
    return type(value) is int and least <= value <= most


def is_name(value: Any) -> bool:
    """Return whether a value is a printable string that is not empty."""
    return isinstance(value, str) and value != "" and value.isprintable()


def are_names(value: Any) -> bool:
    """Return whether a value is a list of at least one name, and has no name twice."""
    is_list = isinstance(value, list) and bool(value) and all(map(is_name, value))
    return is_list and first_twice(value) is None


def first_twice(values: Sequence[Any]) -> Any:
    """Return the first value that occurs a second time; None if there is none."""
    seen = set()
    return next((v for v in values if v in seen or seen.add(v)), None)
