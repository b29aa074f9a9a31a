"""What a section of settings is: a frozen dataclass whose fields have their type, their default,
what values are allowed, and below them what they mean.

From these come the checks, the arguments of the Python calls, the TOML sections, their reference
page and what `--print-config` prints.
"""

import ast
import difflib
import functools
import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any, ClassVar, Literal, ParamSpec, Self, TypeVar, get_args, get_origin

P = ParamSpec("P")
R = TypeVar("R")


def rule(allowed: str, is_allowed: Callable[[Any], bool]) -> dict[str, Any]:
    """The metadata of a field whose type does not say all of what it accepts."""
    return {"allowed": allowed, "is_allowed": is_allowed}


def checked(default: Any, allowed: str, is_allowed: Callable[[Any], bool]) -> Any:
    """A field with a rule."""
    return field(default=default, metadata=rule(allowed, is_allowed))


def integer(default: int, at_least: int, at_most: int | None = None) -> Any:
    """An integer field within bounds."""
    allowed = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    return checked(
        default,
        f"an integer {allowed}",
        lambda value: (
            is_integer(value) and value >= at_least and (at_most is None or value <= at_most)
        ),
    )


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_patterns(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(pattern, str) and pattern for pattern in value)
    )


class Section:
    """A TOML section of one feature, checked when it is made.

    Attributes:
        path: of the section.
        renamed: the keys of earlier releases, and what they are called now.
        renamed_values: the same of the values of a key.

    Raises:
        ValueError: a value is not allowed, or cannot work with another. The message names the key,
            the value and what is allowed.
    """

    path: ClassVar[str]
    renamed: ClassVar[dict[str, str]] = {}
    renamed_values: ClassVar[dict[str, dict[str, str]]] = {}

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if not _is_allowed(one, value):
                raise ValueError(
                    f"{self.path}.{one.name} = {value!r}: must be {allowed_values(one)}"
                    f"{renamed_value(type(self), one.name, value)}"
                )
        self._check()

    def _check(self) -> None:
        """Raises a ValueError where values cannot work with each other."""

    def default_of(self, name: str) -> Any:
        return defaults(type(self))[name]

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Self:
        """The section with these keys set, as the Python calls are given them: all but ``enable``.

        Raises:
            ValueError: a key is not one of the section's, or its value is not allowed. The message
                names the key without the section.
        """
        allowed = [name for name in defaults(cls) if name != "enable"]
        for name, value in settings.items():
            if name not in allowed:
                raise ValueError(f"{name} = {value!r}: {unknown_key(name, allowed, cls.renamed)}")
        try:
            return cls(**({"enable": True} if "enable" in defaults(cls) else {}), **settings)
        except ValueError as error:
            raise ValueError(str(error).removeprefix(f"{cls.path}.")) from None


def _is_allowed(one: Field, value: Any) -> bool:
    if get_origin(one.type) is Literal:
        return any(value is choice or value == choice for choice in get_args(one.type))
    if one.type is bool:
        return isinstance(value, bool)
    return one.metadata["is_allowed"](value)


def allowed_values(one: Field) -> str:
    """What a field accepts, in words; empty where its type says all."""
    if get_origin(one.type) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(one.type))
    return "true or false" if one.type is bool else one.metadata.get("allowed", "")


@functools.cache
def _meanings(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    return {
        stated.target.id: inspect.cleandoc(text.value.value).replace("\n", " ")
        for stated, text in itertools.pairwise(body)
        if isinstance(stated, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(stated.target, ast.Name)
        and isinstance(text.value, ast.Constant)
    }


def meanings(cls: type) -> dict[str, str]:
    """What each field of a section means, on one line: the text below it."""
    return dict(_meanings(cls))


def defaults(cls: type) -> dict[str, Any]:
    """The default of each field of a section."""
    return {
        one.name: one.default if one.default_factory is MISSING else one.default_factory()
        for one in fields(cls)
    }


def renamed_value(cls: type, key: str, value: Any) -> str:
    """What is added to an error where a value of an earlier release is called otherwise now."""
    new = getattr(cls, "renamed_values", {}).get(key, {}).get(str(value))
    return f'; "{value}" is called "{new}" now' if new else ""


def unknown_key(key: str, allowed: Sequence[str], renamed: Mapping[str, str]) -> str:
    """What is said of a key that is not one of those allowed: the name that it has now, or a close
    one."""
    close = difflib.get_close_matches(key, allowed, n=1)
    hint = f'; did you mean "{close[0]}"?' if close else ""
    if key in renamed:
        hint = f'; it is called "{renamed[key]}" now'
    return f"unknown key{hint} (allowed: {', '.join(allowed)})"


def takes_settings_of(
    cls: type, *, left_out: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Gives a function, which takes the keys of a section as ``**settings``, their signature, and
    adds their meanings to its docstring."""
    keys = [one for one in fields(cls) if one.name not in left_out]

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        own = inspect.signature(function)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        settings = [
            inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults(cls)[one.name],
                annotation=one.type,
            )
            for one in keys
        ]
        function.__signature__ = own.replace(parameters=[*named, *settings])  # type: ignore[attr-defined]
        lines = [f"{one.name}: {meanings(cls)[one.name]}" for one in keys]
        wrapped = textwrap.TextWrapper(92, subsequent_indent=" " * 4)
        function.__doc__ = "\n".join(
            [inspect.cleandoc(function.__doc__ or ""), "", "Settings:"]
            + [textwrap.indent(wrapped.fill(line), " " * 4) for line in lines]
        )
        return function

    return decorated


def check_left_at_default(
    section: Any, names: Sequence[str], works_with: str, is_allowed: bool, other: str
) -> None:
    """Raises a ValueError where keys are set that have no meaning with the value of another key.

    Args:
        works_with: what they have a meaning with.
        other: the value that they are given with.
    """
    for name in names:
        value, default = getattr(section, name), section.default_of(name)
        if value != default and not is_allowed:
            raise ValueError(
                f"{section.path}.{name} = {value!r}: works with {works_with}, not "
                f'"{other}": leave it out, or at {default!r}'
            )
