"""Tables as text."""

import math
from collections.abc import Sequence


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
