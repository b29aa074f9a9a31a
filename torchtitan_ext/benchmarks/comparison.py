"""Compares runs of the training job bit by bit, and shows what each of them sent."""

import math
import sys
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from narrowcast.telemetry.step_volume import COLLECTIVES
from narrowcast.util import aligned
from torchtitan_ext.benchmarks.runs import Run

# Bits and bytes are medians of the last so many steps, which come after the warm-up.
LAST_STEPS = 20
_MIB = 1 << 20


@dataclass(frozen=True)
class Job:
    """A run to be made.

    Attributes:
        name: of its folder.
        compression: how it exchanges parameters and gradients, by a key of the demo's.
        label: the same for people.
        flags: of ``torchtitan_ext.train``.
        equal_to: the name of the run whose losses and parameters must be bitwise identical; None
            where there is none.
    """

    name: str
    compression: str
    label: str
    learning_rate: float
    steps: int
    flags: tuple[str, ...]
    equal_to: str | None


@dataclass(frozen=True)
class RunSummary(Job):
    """A run beside baseline FSDP2 at the same learning rate; ``docs/demo.md`` has its fields."""

    losses: list[float]
    plain_losses: list[float]
    max_loss_difference: float
    max_parameter_difference: float
    bits_per_parameter: dict[str, float]
    bytes_per_step: dict[str, float]
    plain_bytes_per_step: dict[str, float]
    zero_gradients: float | None
    step_seconds: list[float]
    plain_step_seconds: list[float]
    cache_bytes: float | None
    peak_memory_gib: float

    @property
    def is_as_expected(self) -> bool:
        """Whether it is bitwise identical to the run that it must equal, if there is one."""
        differences = self.max_loss_difference, self.max_parameter_difference
        return self.equal_to is None or differences == (0, 0)


@dataclass(frozen=True)
class Summary:
    """All runs of a demo."""

    commit: str | None
    world_size: int
    parameters: int
    runs: list[RunSummary]

    @property
    def unequal(self) -> list[RunSummary]:
        """Runs with a loss or a parameter that is not bitwise identical to what it must be."""
        return [run for run in self.runs if not run.is_as_expected]


def compare(job: Job, run: Run, plain: Run, reference: Run, world_size: int) -> RunSummary:
    """What a run sent beside ``plain``, and how far its losses and parameters are from those of
    ``reference``.

    Raises:
        ValueError: a run did not log ``job.steps`` steps, or the runs have different parameters.
    """
    losses, plain_losses, reference_losses = (_losses(job, r) for r in (run, plain, reference))
    sent, plain_sent = (
        {c: last_median(r.scalars, f"narrowcast/bytes/{c}") for c in COLLECTIVES}
        for r in (run, plain)
    )
    zeros = "narrowcast/zero_gradients"
    # A rank sends its share of the parameters to each of the others.
    sent_parameters = (world_size - 1) / world_size * run.parameter_count
    cache_bytes = run.scalars.get("narrowcast/cache_bytes")
    return RunSummary(
        **asdict(job),
        losses=losses,
        plain_losses=plain_losses,
        max_loss_difference=max(map(_difference, losses, reference_losses)),
        max_parameter_difference=parameter_difference(run.parameters, reference.parameters),
        bits_per_parameter={
            **{
                part: last_median(run.scalars, f"narrowcast/bits_per_parameter/{part}")
                for part in ("first_gather", "later_gathers", "gradients")
            },
            "step": 8 * sent["all_gather"] / sent_parameters,
            "whole_step": 8 * (sent["all_gather"] + sent["reduce_scatter"]) / sent_parameters,
        },
        bytes_per_step=sent,
        plain_bytes_per_step=plain_sent,
        zero_gradients=last_median(run.scalars, zeros) if zeros in run.scalars else None,
        step_seconds=run.scalars["time_metrics/end_to_end(s)"],
        plain_step_seconds=plain.scalars["time_metrics/end_to_end(s)"],
        cache_bytes=max(cache_bytes) if cache_bytes else None,
        peak_memory_gib=max(run.scalars["memory/max_active(GiB)"]),
    )


def last_median(scalars: dict[str, list[float]], tag: str) -> float:
    """The median of a tag over the last steps; 0 where it was never logged, as nothing was sent."""
    return median(scalars.get(tag, [0.0])[-LAST_STEPS:])


def parameter_difference(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest difference of any number; above 0 wherever a bit differs, infinite with NaN.

    Raises:
        ValueError: the two do not have the same tensors.
    """
    for name in sorted(found.keys() | reference.keys()):
        one, other = (
            (t[name].shape, t[name].dtype) if name in t else None for t in (found, reference)
        )
        if one != other:
            raise ValueError(f"{name} is {one} in one run and {other} in the other")
    return max(_tensor_difference(found[name], reference[name]) for name in reference)


def tables(summary: Summary) -> str:
    """The summary for people."""
    return (
        "Bits a parameter that a rank sends to another in a step (gathers: first, later, sizes;\n"
        "whole step: with gradients), MiB that it sends in each collective (the rank that sends\n"
        "most), and zeros among gradients: medians of the last "
        f"{LAST_STEPS} steps, headers included\n\n{_wire_table(summary)}\n\n"
        "Largest difference in any loss and any parameter to the run that it must equal, or else\n"
        "to baseline FSDP2; and what a step costs where bytes are free (cache: of a rank; peak:\n"
        f"all memory of the first rank)\n\n{_cost_table(summary)}"
    )


def _wire_table(summary: Summary) -> str:
    lines = [["lr", "run", "first", "later", "gathers", "gradients", "whole step"]]
    lines[0] += ["all_gather", "reduce_scatter", "other", "gathers/plain", "total/plain", "zeros"]
    for run in summary.runs:
        sent, plain_sent = run.bytes_per_step, run.plain_bytes_per_step
        total, plain_total = sum(sent.values()), sum(plain_sent.values())
        gathered, reduced = sent["all_gather"], sent["reduce_scatter"]
        parts = ("first_gather", "later_gathers", "step", "gradients", "whole_step")
        lines.append(
            [
                *_title(run),
                *(f"{run.bits_per_parameter[part]:.2f}" for part in parts),
                *(f"{n / _MIB:.2f}" for n in (gathered, reduced, total - gathered - reduced)),
                f"{gathered / plain_sent['all_gather']:.1%}",
                f"{total / plain_total:.1%}",
                "" if run.zero_gradients is None else f"{run.zero_gradients:.1%}",
            ]
        )
    return aligned(lines, words=2)


def _cost_table(summary: Summary) -> str:
    lines = [["lr", "run", "equal to", "loss", "parameter", "last loss", "s/step", "s/plain s"]]
    lines[0] += ["cache MiB", "peak GiB"]
    for run in summary.runs:
        seconds, plain_seconds = median(run.step_seconds), median(run.plain_step_seconds)
        other_sums = "" if run.compression == "plain" else "none: other order of sums"
        lines.append(
            [
                *_title(run),
                run.equal_to or other_sums,
                f"{run.max_loss_difference:.3g}",
                f"{run.max_parameter_difference:.3g}",
                f"{run.losses[-1]:.4f}",
                f"{seconds:.2f}",
                f"{seconds / plain_seconds:.2f}",
                "" if run.cache_bytes is None else f"{run.cache_bytes / _MIB:.2f}",
                f"{run.peak_memory_gib:.2f}",
            ]
        )
    return aligned(lines, words=3)


def _title(run: RunSummary) -> tuple[str, str]:
    return short_number(run.learning_rate), run.label


def short_number(value: float) -> str:
    """``1e-4`` for 0.0001."""
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
