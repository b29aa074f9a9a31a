"""Flags that all benchmarks have, and their results as JSON."""

import argparse
import json
from pathlib import Path
from typing import Any

from narrowcast.util import write_text


def make_parser(module: str, doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser with the flag ``--json FILE``.

    Args:
        module: of ``torchtitan_ext.benchmarks``.
        doc: its docstring, whose first sentence is the description.
        options: of ``ArgumentParser``.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m torchtitan_ext.benchmarks.{module}",
        description=(doc or "").partition("\n\n")[0],
        allow_abbrev=False,
        **options,
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows of all tables there as well"
    )
    return parser


def make_job_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for a benchmark of a training job. ``parse_known_args`` returns its own flags, and
    those of ``torchtitan_ext.train``."""
    return make_parser(module, doc, epilog="All other flags are those of torchtitan_ext.train.")


def write_json(file: Path | None, rows: Any) -> None:
    """Write rows to a file, whole or not at all; do nothing if ``file`` is None.

    Args:
        file: is replaced if it exists.
        rows: a list of objects, whose keys name their units; where there are several tables, such
            a list for each by its name.

    Raises:
        OSError: the file cannot be written.
    """
    if file is not None:
        write_text(file, json.dumps(rows, indent=1) + "\n")
