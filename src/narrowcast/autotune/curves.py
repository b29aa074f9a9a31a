"""The time of an operation as a line over the bytes that it handles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from narrowcast.autotune.stopwatch import Stopwatch

MAX_REPEATS = 5  # of one measurement

_SMALLEST, _LEAST_LARGEST = 1 << 10, 1 << 16  # bytes
_RATIO = 4  # of one measured size to the one before
_REPEATS_SHARE = 1 / 12  # of the time for a curve, for the repeats of one size
_MATTERS = 1 << 18  # bytes from which a curve's error is reported
_NOISE_PERIOD = 1 << 20  # bytes


@dataclass(frozen=True)
class Curve:
    """Seconds of an operation by the bytes that each rank gives.

    Attributes:
        latency, seconds_per_byte: of the fitted line.
        error: largest relative deviation of a measured time from the line, at sizes from 256 KiB
            (or at the largest, if none is as large).
        nbytes: measured sizes.
        measured: their seconds: of the slowest rank, median of a few repeats.
    """

    latency: float
    seconds_per_byte: float
    error: float
    nbytes: tuple[int, ...]
    measured: tuple[float, ...]

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes * self.seconds_per_byte

    def scaled(self, factor: float) -> "Curve":
        """The line, times a factor."""
        return replace(
            self, latency=self.latency * factor, seconds_per_byte=self.seconds_per_byte * factor
        )


def fit(nbytes: Sequence[int], seconds: Sequence[float]) -> Curve:
    """The line with the least squares of relative deviations, weighted by size, since large shards
    cost most. Neither coefficient is negative."""
    size_N, time_N = np.asarray(nbytes, dtype=float), np.asarray(seconds, dtype=float)
    largest = size_N.max()
    relative_N2 = np.stack([1 / time_N, size_N / largest / time_N], axis=1)
    weight_N = np.sqrt(size_N / largest)
    line_2, _ = nnls(relative_N2 * weight_N[:, None], weight_N)
    deviation_N = np.abs(relative_N2 @ line_2 - 1)
    return Curve(
        latency=float(line_2[0]),
        seconds_per_byte=float(line_2[1] / largest),
        error=float(deviation_N[size_N >= min(_MATTERS, largest)].max()),
        nbytes=tuple(nbytes),
        measured=tuple(seconds),
    )


def measure_curve(
    operation: Callable[[int], Callable[[], object]],
    largest: int,
    stopwatch: Stopwatch,
    seconds: float,
) -> Curve:
    """Times ``operation(nbytes)`` for sizes up to the ``largest``, or as far as ``seconds`` go."""
    sizes = _sizes(largest)
    smaller = operation(sizes[0])
    expected, _, spent = stopwatch.times(smaller, 1)  # a warm-up
    measured: list[float] = []
    for i, size in enumerate(sizes):
        if i >= 2:
            growth = max(measured[-1] - measured[-2], 0.0) / (sizes[i - 1] - sizes[i - 2])
            expected = measured[-1] + growth * (size - sizes[i - 1])
            if spent + expected > seconds:
                break
        repeats = min(max(int(_REPEATS_SHARE * seconds / expected), 1), MAX_REPEATS)
        this = operation(size)
        expected, _, took = stopwatch.times(this, repeats, before=this if repeats > 1 else smaller)
        smaller = this
        measured.append(expected)
        spent += took
    return fit(sizes[: len(measured)], measured)


def _sizes(largest: int) -> list[int]:
    """Ascending sizes at a ratio of 4, multiples of 4 bytes; integers, since all ranks need the
    same ones."""
    sizes = [max(largest, _LEAST_LARGEST)]
    while sizes[-1] >= _RATIO * _SMALLEST:
        sizes.append(sizes[-1] // _RATIO)
    return [size + -size % 4 for size in reversed(sizes)]


def noise(nbytes: int, device: torch.device) -> Tensor:
    """Bytes (uint8) of Gaussian fp32 values, which no link can compress; they repeat after a
    MiB."""
    generator = torch.Generator().manual_seed(0)  # the job's own stays as it is
    values = torch.randn(_NOISE_PERIOD // 4, generator=generator, device="cpu").view(torch.uint8)
    return values.repeat(-(-nbytes // _NOISE_PERIOD))[:nbytes].to(device)
