"""Which cases of a matrix run always, and which with ``--all`` alone."""

from collections.abc import Iterable
from typing import Any

import pytest


def wide_but(cases: Iterable[Any], *always: Any) -> list[Any]:
    """All ``cases``, those that are not in ``always`` marked ``wide``."""
    cases = list(cases)
    assert all(case in cases for case in always), always
    return [c if c in always else pytest.param(c, marks=pytest.mark.wide) for c in cases]
