"""Compares runs of the training job with plain FSDP2, to the bit, and shows what each sent."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from narrowcast.volume import COLLECTIVES
from torchtitan_ext.runs import Run

# Figures of the wire are the median of the last so many steps: past the warm-up.
LAST_STEPS = 20
_MIB = 1 << 20


@dataclass(frozen=True)
class Job:
    """What was run: the name of its folder, and the flags of `torchtitan_ext.train`."""

    name: str
    treatment: str
    label: str
    learning_rate: float
    steps: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class RunSummary(Job):
    """A run beside plain FSDP2 at the same learning rate. `docs/demo.md` describes each field."""

    losses: list[float]
    plain_losses: list[float]
    max_loss_difference: float
    max_parameter_difference: float
    bits_per_parameter: dict[str, float]
    bytes_per_step: dict[str, float]
    plain_bytes_per_step: dict[str, float]
    step_seconds: list[float]
    plain_step_seconds: list[float]
    kept_bytes: float | None
    peak_memory_gib: float

    @property
    def equal(self) -> bool:
        return self.max_loss_difference == self.max_parameter_difference == 0


@dataclass(frozen=True)
class Summary:
    """All runs of a demo."""

    commit: str | None
    world_size: int
    parameters: int
    runs: list[RunSummary]

    @property
    def unequal(self) -> list[RunSummary]:
        """Runs with a loss or a parameter that is not that of plain FSDP2, to the last bit."""
        return [run for run in self.runs if not run.equal]


def compare(job: Job, run: Run, plain: Run, world_size: int) -> RunSummary:
    """What a job's run sent, and how far its losses and parameters are from plain FSDP2's.

    Raises:
        ValueError: a run logged other than `job.steps` steps, or the two have other parameters.
    """
    losses, plain_losses = (_losses(job, r) for r in (run, plain))
    sent, plain_sent = (
        {c: last_median(r.scalars, f"narrowcast/bytes/{c}") for c in COLLECTIVES}
        for r in (run, plain)
    )
    # A rank sends its share of the parameters to each of the others.
    crossing = (world_size - 1) / world_size * run.parameter_count
    kept = run.scalars.get("narrowcast/kept_bytes")
    return RunSummary(
        **asdict(job),
        losses=losses,
        plain_losses=plain_losses,
        max_loss_difference=max(map(_difference, losses, plain_losses)),
        max_parameter_difference=parameter_difference(run.parameters, plain.parameters),
        bits_per_parameter={
            "first_gather": last_median(run.scalars, "narrowcast/bits_per_parameter/first_gather"),
            "later_gathers": last_median(
                run.scalars, "narrowcast/bits_per_parameter/later_gathers"
            ),
            "step": 8 * sent["all_gather"] / crossing,
        },
        bytes_per_step=sent,
        plain_bytes_per_step=plain_sent,
        step_seconds=run.scalars["time_metrics/end_to_end(s)"],
        plain_step_seconds=plain.scalars["time_metrics/end_to_end(s)"],
        kept_bytes=max(kept) if kept else None,
        peak_memory_gib=max(run.scalars["memory/max_active(GiB)"]),
    )


def last_median(scalars: dict[str, list[float]], tag: str) -> float:
    """The median of a tag's last steps; 0 where it was never logged: there were no such gathers."""
    return median(scalars.get(tag, [0.0])[-LAST_STEPS:])


def parameter_difference(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    """The largest difference of any number; above 0 wherever a bit differs, infinite with NaN.

    Raises:
        ValueError: the two do not have the same tensors.
    """
    for name in sorted(ours.keys() | plain.keys()):
        one, other = ((t[name].shape, t[name].dtype) if name in t else None for t in (ours, plain))
        if one != other:
            raise ValueError(f"{name} is {one} with the treatment and {other} in plain FSDP2")
    return max(_tensor_difference(ours[name], plain[name]) for name in plain)


def tables(summary: Summary) -> str:
    """The summary for people."""
    gathers = ["first", "later", "step"]
    wire = [["lr", "all-gather", *gathers, *COLLECTIVES, "total/plain", "all_gather/plain"]]
    cost = [["lr", "all-gather", "loss", "parameter", "last loss", "s/step", "s/plain s"]]
    cost[0] += ["kept MiB", "peak GiB"]
    for run in summary.runs:
        title = [short_number(run.learning_rate), run.label]
        sent, plain_sent = run.bytes_per_step, run.plain_bytes_per_step
        wire.append(
            [
                *title,
                *(f"{bits:.2f}" for bits in run.bits_per_parameter.values()),
                *(f"{sent[c] / _MIB:.2f}" for c in COLLECTIVES),
                f"{sum(sent.values()) / sum(plain_sent.values()):.1%}",
                f"{sent['all_gather'] / plain_sent['all_gather']:.1%}",
            ]
        )
        seconds, plain_seconds = median(run.step_seconds), median(run.plain_step_seconds)
        cost.append(
            [
                *title,
                f"{run.max_loss_difference:g}",
                f"{run.max_parameter_difference:g}",
                f"{run.losses[-1]:.4f}",
                f"{seconds:.2f}",
                f"{seconds / plain_seconds:.2f}",
                "" if run.kept_bytes is None else f"{run.kept_bytes / _MIB:.2f}",
                f"{run.peak_memory_gib:.2f}",
            ]
        )
    return (
        "Bits a parameter in the gathers of a step, and MiB a step that a rank sends in each\n"
        f"collective (the rank that sends most; median of the last {LAST_STEPS} steps; headers "
        f"included)\n\n{_table(wire)}\n\n"
        "Largest difference to plain FSDP2 in any loss and any parameter, and what a step costs\n"
        "where bytes are free (kept: by a rank's caches; peak: all memory of the first rank)\n\n"
        f"{_table(cost)}"
    )


def short_number(value: float) -> str:
    """`1e-4` for 0.0001."""
    return np.format_float_scientific(value, trim="-", exp_digits=1)


def _losses(job: Job, run: Run) -> list[float]:
    losses = run.scalars.get("loss_metrics/global_avg_loss", [])
    if len(losses) != job.steps:
        raise ValueError(f"{job.name}: an event file has {len(losses)} losses, not {job.steps}")
    return losses


def _difference(a: float, b: float) -> float:
    return abs(a - b) if math.isfinite(a - b) else math.inf


def _tensor_difference(a: Tensor, b: Tensor) -> float:
    if torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
        return 0.0
    difference = (a.double() - b.double()).abs().nan_to_num(nan=math.inf).max().item()
    return max(difference, sys.float_info.min)  # 0 and -0 differ too


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
