"""Writes configs and values as TOML."""

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from torchtitan_ext.toml import schema


def to_literal(value: Any) -> str:
    """A value on one line as TOML writes it; None, which TOML lacks, as "None".

    Raises:
        TypeError: TOML has no such value.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str) or value is None:
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_literal, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_key(k)} = {to_literal(v)}" for k, v in value.items()) + "}"
    raise TypeError(f"TOML has no value for {value!r}")


def to_key(name: str) -> str:
    """A key as TOML writes it: in quotes where it has to be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else to_literal(name)


def to_lines(values: dict[str, Any]) -> list[str]:
    """One line ``key = value`` for each value."""
    return [f"{to_key(name)} = {to_literal(value)}" for name, value in values.items()]


def tables(config: Any, hint: Any) -> list[tuple[str, list[str]]]:
    """The tables of a config, its own keys first: paths relative to it, and lines.

    ``hint`` is the type of the field that holds the config; where that is a union of named configs,
    ``type`` is one of the keys.
    """
    own: dict[str, Any] = {}
    below: list[tuple[str, list[str]]] = []
    for name, cls in schema.variants(hint).items():
        if type(config) is cls:
            own["type"] = name
    for name, value in schema.values(config).items() if config is not None else ():
        field_hint = schema.settable(type(config))[name]
        if is_dataclass(value) or (value is None and schema.variants(field_hint)):
            below += _under(name, tables(value, field_hint))
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            if all(map(_is_flat, value)):
                own[name] = [schema.values(element) for element in value]
                continue
            for key, element in _ranges([tables(element, None) for element in value]):
                below += _under(f"{name}.{to_key(key)}", element)
        elif _is_literal(value):
            own[name] = value
    return [("", to_lines(own)), *below]


def _under(name: str, tables: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    return [(f"{name}.{path}" if path else name, lines) for path, lines in tables]


def _ranges(elements: list[Any]) -> Iterator[tuple[str, Any]]:
    """Ranges of equal elements under the keys that name them: "*", "0", "1-5"."""
    first = 0
    for end in range(1, len(elements) + 1):
        if end == len(elements) or elements[end] != elements[first]:
            key = str(first) if end == first + 1 else f"{first}-{end - 1}"
            yield "*" if end - first == len(elements) else key, elements[first]
            first = end


def _is_literal(value: Any) -> bool:
    try:
        to_literal(value)
    except TypeError:
        return False
    return True


def _is_flat(config: Any) -> bool:
    """Whether TOML can make the config from values alone."""
    values = schema.values(config)
    return values.keys() == {f.name for f in dataclasses.fields(config)} and _is_literal(values)
