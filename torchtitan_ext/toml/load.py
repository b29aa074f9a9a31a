"""TOML over torchtitan's config tree: every key of the tree by torchtitan's own name, all checked.

``docs/toml.md`` is the reference for users. Reading is an overlay: the values of the file are laid
over the config that a torchtitan config function returns. The result is a new tree, so that every
changed dataclass runs its ``__post_init__`` on the final values, and the base is not changed.
"""

import dataclasses
import re
import tomllib
from dataclasses import MISSING, dataclass, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from torchtitan.trainer import Trainer

from narrowcast.section import renamed_value, unknown_key
from torchtitan_ext.config import JobConfig, with_narrowcast
from torchtitan_ext.private import BaseError, load_base_config
from torchtitan_ext.toml import schema
from torchtitan_ext.toml.writer import tables, to_key, to_lines, to_literal

_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    NoneType: '"None"',
    list: "an array",
    tuple: "an array",
    dict: "a table",
    Any: "any value",
}
# How a key of a table over a list of configs names elements: all, one, or first to last.
_ELEMENTS = re.compile(r"(?P<all>\*)|(?P<first>\d+)(-(?P<last>\d+))?")


class TomlError(ValueError):
    """A TOML file that cannot be read, or that has what the config tree does not allow.

    The message names the file and, for every error in it, the key, what was given and what is
    allowed.
    """

    def __init__(self, file: str | Path, problems: list[str]) -> None:
        found = list(dict.fromkeys(problems))
        lines = found if len(found) == 1 else [f"{len(found)} errors", *found]
        super().__init__(f"{file}: " + "\n  ".join(lines))


@dataclass(kw_only=True, slots=True)
class Base:
    """The section ``[base]``: which torchtitan config function the file is laid over."""

    module: str
    config: str


def load_config(file: str | Path) -> Trainer.Config:
    """The trainer config that a TOML file describes, with narrowcast's sections in it.

    Raises:
        TomlError: the file is missing, is no TOML, or has a wrong key or value.
    """
    document = _read(file)
    overlay = _Overlay()
    base = _load_base(file, _read_base(file, document))
    extended = with_narrowcast(base, job=JobConfig(config_file=str(file)))
    config = overlay.config("", type(extended), extended, document)
    if overlay.problems:
        raise TomlError(file, overlay.problems)
    return config


def to_toml(config: Trainer.Config) -> str:
    """``config`` as TOML that ``load_config`` reads back: every key that TOML can set."""
    (_, root), *sections = tables(config, None)
    file = config.job.config_file if hasattr(config, "job") else ""
    if file:
        base = _read_base(file, _read(file))
        sections = [("base", to_lines(schema.values(base))), *sections]
    printed = ["\n".join([f"[{path}]", *lines, ""]) for path, lines in sections if lines]
    return "\n".join(["\n".join([*root, ""]), *printed])


class _Overlay:
    """Lays parsed TOML over configs, and collects what is wrong with it in ``problems``.

    Each method returns the new value. After a problem the value must not be used.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []

    def config(self, path: str, cls: type, current: Any, given: dict[str, Any], *also: str) -> Any:
        """``current``, or a new ``cls`` where it is no dataclass, with the given keys set.

        ``also`` are keys of the table that the caller has handled.
        """
        hints = schema.settable(cls)
        known_before, exists = len(self.problems), is_dataclass(current)
        old = schema.values(current) if exists else schema.defaults(cls)
        new = {}
        for key, value in given.items():
            where = _join(path, key)
            if key in hints:
                cure = renamed_value(cls, key, value)
                new[key] = self.value(where, hints[key], old[key], value, cure)
            elif key in schema.field_types(cls):
                self._refuse(where, value, "cannot be set from TOML")
            else:
                self._refuse(
                    where, value, unknown_key(key, [*also, *hints], getattr(cls, "renamed", {}))
                )
        missing = [k for k, v in old.items() if v is MISSING and k not in new]
        self.problems += [f"{_join(path, key)} is missing" for key in missing]
        if len(self.problems) > known_before:
            return current
        try:
            return dataclasses.replace(current, **new) if exists else cls(**new)
        except (ValueError, TypeError, AssertionError) as error:
            names_it = not path or str(error).startswith(f"{path}.")
            self.problems.append(str(error) if names_it else f"[{path}]: {error}")
            return current

    def value(self, path: str, hint: Any, current: Any, given: Any, cure: str = "") -> Any:
        """``given`` as a value of type ``hint``, laid over ``current`` (MISSING if there is none).

        ``cure`` ends the message if ``given`` is no such value.
        """
        members = schema.members_of(hint)
        if given == "None" and NoneType in members:
            return None
        if any(map(is_dataclass, members)):
            return self._section(path, hint, current, given)
        element = schema.config_element(members, current)
        if element is not None:
            return self._elements(path, element, current, given)
        if isinstance(given, dict) and (isinstance(current, dict) or schema.is_mapping(members)):
            return self._mapping(path, members, current, given)
        fitted = schema.fit(members, given) if members != [Any] else schema.fit_like(current, given)
        if fitted is MISSING:
            wanted = members if members != [Any] else [type(current)]
            self._refuse(path, given, f"must be {_expected(wanted)}{cure}")
        return fitted

    def _section(self, path: str, hint: Any, current: Any, given: Any) -> Any:
        named = schema.variants(hint)
        if not isinstance(given, dict):
            self._refuse(path, given, "must be a table")
            return current
        if "type" in given and named:
            name = given["type"]
            given = {key: value for key, value in given.items() if key != "type"}
            if not isinstance(name, str) or name not in named:
                self._refuse(_join(path, "type"), name, f"must be {_one_of(named)}")
                return current
            if named[name] is NoneType:
                for key, value in given.items():
                    self._refuse(_join(path, key), value, f'unknown key with type = "{name}"')
                return None
            if not isinstance(current, named[name]):
                return self.config(path, named[name], MISSING, given, "type")
        if not is_dataclass(current) and named:
            self.problems.append(f"{_join(path, 'type')} is missing: must be {_one_of(named)}")
            return current
        cls = type(current)
        if not is_dataclass(current):
            cls = next(filter(is_dataclass, schema.members_of(hint)))
        return self.config(path, cls, current, given, *(["type"] if named else []))

    def _elements(self, path: str, element: Any, current: Any, given: Any) -> Any:
        """A list of configs: an array of tables replaces it, a table changes its elements."""
        elements = [] if current is MISSING or current is None else list(current)
        if isinstance(given, list):
            return [self.value(f"{path}[{i}]", element, MISSING, v) for i, v in enumerate(given)]
        if not isinstance(given, dict):
            self._refuse(path, given, "must be an array of tables, or a table")
            return elements
        if len(elements) == 1 and not any(map(_ELEMENTS.fullmatch, given)):
            return [self.value(path, element, elements[0], given)]
        for key, table in given.items():
            where, match = _join(path, key), _ELEMENTS.fullmatch(key)
            indices = _indices(match, len(elements)) if match else range(0)
            if not indices:
                self._refuse(
                    where,
                    table,
                    f"no such element: the list has {len(elements)}, chosen by a key as "
                    f'"*" (all), "0" (one) or "0-{max(len(elements) - 1, 0)}" (first to last)',
                )
            for i in indices:
                elements[i] = self.value(where, element, elements[i], table)
        return elements

    def _mapping(self, path: str, members: list[Any], current: Any, given: dict) -> dict:
        """A plain dict: keys are merged into it, at every depth."""
        of = next((get_args(m) for m in members if get_origin(m) is dict), ())
        merged = dict(current) if isinstance(current, dict) else {}
        for key, value in given.items():
            merged[key] = self.value(
                _join(path, key), of[1] if of else Any, merged.get(key, MISSING), value
            )
        return merged

    def _refuse(self, path: str, given: Any, why: str) -> None:
        try:
            shown = to_literal(given)
        except TypeError:  # dates and times
            shown = str(given)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        self.problems.append(f"{path} = {shown}: {why}")


def _read(file: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise TomlError(file, [f"cannot be read: {error.strerror}"]) from error
    except ValueError as error:
        raise TomlError(file, [f"is not TOML: {error}"]) from error


def _read_base(file: str | Path, document: dict[str, Any]) -> Base:
    """The section ``[base]``, which is removed from the document."""
    overlay = _Overlay()
    if "base" not in document:
        example = '[base]\n  module = "qwen3"\n  config = "qwen3_moe_debug"'
        raise TomlError(file, [f"[base] is missing; it says what the file changes:\n  {example}"])
    base = overlay.value("base", Base, MISSING, document.pop("base"))
    if overlay.problems:
        raise TomlError(file, overlay.problems)
    return base


def _load_base(file: str | Path, base: Base) -> Trainer.Config:
    try:
        config = load_base_config(base.module, base.config)
    except BaseError as error:
        key = f'module = "{base.module}"' if error.of_module else f'config = "{base.config}"'
        raise TomlError(file, [f"base.{key}: {error}"]) from error
    except (ImportError, ValueError) as error:
        raise TomlError(file, [f"[base]: {error}"]) from error
    if not isinstance(config, Trainer.Config):
        returned = type(config).__qualname__
        raise TomlError(
            file, [f'base.config = "{base.config}": returns {returned}, not a Trainer.Config']
        )
    return config


def _expected(members: list[Any]) -> str:
    """The values that a message says are allowed."""
    words = []
    for member in schema.data_types(members) or members:
        origin, args = get_origin(member), get_args(member)
        if origin is Literal:
            words += [to_literal(value) for value in args]
        elif origin is list:
            words.append(f"an array, each element {_expected(schema.members_of(args[0]))}")
        elif origin is tuple and args[-1] is not ...:
            words.append(f"an array of {len(args)}: {', '.join(_expected([a]) for a in args)}")
        else:
            words.append(_WORDS.get(origin or member, "set in a Python config function"))
    return " or ".join(dict.fromkeys(words))


def _one_of(names: Any) -> str:
    return " or ".join(f'"{name}"' for name in names)


def _indices(match: re.Match[str], length: int) -> range:
    """The elements that a key names; empty if one of them does not exist."""
    if match["all"]:
        return range(length)
    first, last = int(match["first"]), int(match["last"] or match["first"])
    return range(first, last + 1) if last < length else range(0)


def _join(path: str, key: str) -> str:
    return f"{path}.{to_key(key)}" if path else to_key(key)
