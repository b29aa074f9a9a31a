"""Writes the tables of narrowcast's sections in docs/toml.md from the dataclasses themselves.

``python -m torchtitan_ext.toml.reference docs/toml.md``
"""

import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_origin

from narrowcast.config import NarrowcastConfig
from narrowcast.section import allowed_values, defaults, meanings
from narrowcast.util import write_text
from torchtitan_ext.toml.writer import to_literal

START = "<!-- tables: python -m torchtitan_ext.toml.reference docs/toml.md -->"
END = "<!-- end of tables -->"


def with_tables(page: str) -> str:
    """The page with the text between its two marks made anew."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return "".join([before, START, "\n\n", "\n".join(_tables()), "\n", END, after])


def _tables() -> Iterator[str]:
    for section in fields(NarrowcastConfig):
        meaning, default = meanings(section.type), defaults(section.type)
        yield f"### `[narrowcast.{section.name}]`\n"
        yield "| key | type | default | allowed | meaning |"
        yield "|---|---|---|---|---|"
        for key in fields(section.type):
            typed = "str" if get_origin(key.type) is Literal else _name(key.type)
            allowed = allowed_values(key) or "any"
            cells = [f"`{key.name}`", f"`{typed}`", f"`{to_literal(default[key.name])}`", allowed]
            yield f"| {' | '.join([*cells, meaning[key.name]])} |"
        yield ""


def _name(cls: type) -> str:
    return cls.__name__ if get_origin(cls) is None else str(cls)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_text(page, with_tables(page.read_text(encoding="utf-8")))
