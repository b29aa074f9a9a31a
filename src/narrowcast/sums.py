"""Records of numbers that are added up, over pieces of a tensor, steps or ranks."""

from dataclasses import astuple
from typing import Self


class Summable:
    """A dataclass of numbers: their sums, one by one."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
