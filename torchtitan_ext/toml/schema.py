"""Which values a torchtitan config class accepts, read from its dataclass fields and type hints."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import MISSING, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from torchtitan.protocols.model_spec import ModelSpec

# Fields whose values are Python functions or layouts, and the record of the file itself.
_NOT_IN_TOML = {"param_init", "sharding_config", "job"}
_PLAIN = (bool, int, float, str, NoneType, list, tuple, dict, Any)


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The types of the public fields of a dataclass, by name."""
    hints = get_type_hints(cls, include_extras=True)
    names = [f.name for f in dataclasses.fields(cls) if f.init and not f.name.startswith("_")]
    return {name: hints[name] for name in names}


@functools.cache
def settable(cls: type) -> dict[str, Any]:
    """The types of the fields that TOML can set, by name: data, not functions or classes."""
    if issubclass(cls, ModelSpec):  # name and flavor only say what the model was made from
        return {"model": field_types(cls)["model"]}
    return {
        name: hint
        for name, hint in field_types(cls).items()
        if name not in _NOT_IN_TOML and any(m is not NoneType for m in data_types(members_of(hint)))
    }


def members_of(hint: Any) -> list[Any]:
    """The types that a value may have: those of a union, without annotations."""
    if get_origin(hint) is Annotated:
        return members_of(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [member for arg in get_args(hint) for member in members_of(arg)]
    return [hint]


def data_types(members: list[Any]) -> list[Any]:
    """The types among ``members`` whose values TOML can give."""
    return [m for m in members if is_dataclass(m) or m in _PLAIN or get_origin(m) in _FITS]


def variants(hint: Any) -> dict[str, type]:
    """The classes of a union of configs by the names tyro gives them on the command line."""
    named = {}
    for member in get_args(hint) if get_origin(hint) in (Union, UnionType) else ():
        for note in get_args(member)[1:] if get_origin(member) is Annotated else ():
            if isinstance(getattr(note, "name", None), str):  # tyro.conf.subcommand(name)
                named[note.name] = get_args(member)[0]
    return named


def config_element(members: list[Any], current: Any) -> Any:
    """The config class that a list holds, or None where it is no list of configs.

    Its elements show it where its type does not: model configs have ``layers: list``.
    """
    if isinstance(current, list) and current and is_dataclass(current[0]):
        return type(current[0])
    typed = (get_args(member)[0] for member in members if get_origin(member) is list)
    return next(filter(is_dataclass, typed), None)


def is_mapping(members: list[Any]) -> bool:
    """Whether one of the types is a plain dict."""
    return any(m is dict or get_origin(m) is dict for m in members)


def defaults(cls: type) -> dict[str, Any]:
    """The defaults of all fields of a new ``cls``, by name; MISSING where there is none."""
    return {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in dataclasses.fields(cls)
        if f.init
    }


def values(config: Any) -> dict[str, Any]:
    """The values of the fields that TOML can set, by name."""
    return {name: getattr(config, name) for name in settable(type(config))}


def fit(members: list[Any], given: Any) -> Any:
    """``given`` as a value of one of the types, MISSING where it is of none."""
    if type(given) in members:
        return given
    fitted = (_FITS[get_origin(m) or m](m, given) for m in members if (get_origin(m) or m) in _FITS)
    return next((value for value in fitted if value is not MISSING), MISSING)


def _fit_literal(hint: Any, given: Any) -> Any:
    equal = (value for value in get_args(hint) if value == given and type(value) is type(given))
    return next(equal, MISSING)


def _fit_array(hint: Any, given: Any) -> Any:
    if not isinstance(given, list):
        return MISSING
    of = get_args(hint) or (Any, ...)
    if get_origin(hint) is list or of[-1] is ...:
        of = of[:1] * len(given)
    if len(of) != len(given):
        return MISSING
    fitted = [fit(members_of(arg), value) for arg, value in zip(of, given, strict=True)]
    return MISSING if MISSING in fitted else (get_origin(hint) or hint)(fitted)


def _fit_float(_hint: Any, given: Any) -> Any:
    return float(given) if type(given) is int else MISSING


_FITS: dict[Any, Callable[[Any, Any], Any]] = {
    Literal: _fit_literal,
    list: _fit_array,
    tuple: _fit_array,
    dict: lambda _hint, given: given if isinstance(given, dict) else MISSING,
    float: _fit_float,
    Any: lambda _hint, given: given,
}


def fit_like(current: Any, given: Any) -> Any:
    """``given`` for an untyped place that holds ``current``, MISSING if it is of another kind."""
    if current is MISSING or current is None:
        return given
    if type(current) in (int, float) and type(given) in (int, float):
        return float(given) if type(current) is float else given
    if isinstance(current, list | tuple) and isinstance(given, list):
        return type(current)(given)
    return given if type(given) is type(current) else MISSING
