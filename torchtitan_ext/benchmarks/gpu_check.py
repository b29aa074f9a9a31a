"""Checks the Triton experts on a CUDA GPU: their errors, their repeatability, time and memory.

``scripts/gpu_check`` runs ``swiglu_triton.swiglu_experts`` forward and backward in bf16, for one
rank of OLMoE and one of DeepSeek-MoE, against plain torch: ``swiglu.swiglu_experts`` on grouped_mm,
and a loop in fp64. It ends with status 1 where a result is wrong, and with 2 where there is no GPU.

    error      ||result - fp64|| / ||fp64||: the kernels' must be at most 1.25 of grouped_mm's
    repeats    a second run is bitwise identical
    ratio      kernels / grouped_mm of alternating runs: the median, and the middle half of them
    MiB        the peak beyond the inputs; beside it x_ND and y_ND, which the kernels do not need
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowcast.moe import swiglu, swiglu_triton
from narrowcast.moe.brim import assign, build_brim
from narrowcast.moe.swiglu import ExpertRows
from narrowcast.util import aligned
from torchtitan_ext.benchmarks.command_line import make_parser, write_json

Experts = Callable[[Tensor, ExpertRows, Tensor, Tensor, Tensor], Tensor]

MOST_ERROR = 1.25
RESULTS = ("y", "dx", "dprob", "dw1", "dw2", "dw3")


@dataclass(frozen=True)
class Shape:
    """A layer, and the ranks that share its experts."""

    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    ranks: int
    tokens: int


SHAPES = {
    "OLMoE": Shape(2048, 1024, 64, 8, ranks=8, tokens=8 * 4096),
    "DeepSeek-MoE": Shape(2048, 1408, 64, 6, ranks=8, tokens=8 * 4096),
}


@dataclass(frozen=True)
class Problem:
    """Inputs of one rank.

    Attributes:
        rows: whose ``prob_SJ`` is among the leaves.
        leaves: x_SD, prob_SJ, w1_eFD, w2_eDF and w3_eFD.
        grad_y_SD: the gradient of the output.
    """

    rows: ExpertRows
    leaves: tuple[Tensor, ...]
    grad_y_SD: Tensor

    def run(self, experts: Experts) -> tuple[Tensor, ...]:
        """The output and the gradients of the leaves, in the order of ``RESULTS``."""
        x_SD, _, *weights = self.leaves
        y_SD = experts(x_SD, self.rows, *weights)
        return y_SD.detach(), *torch.autograd.grad(y_SD, self.leaves, self.grad_y_SD)

    def double(self) -> "Problem":
        leaves = tuple(leaf.detach().double().requires_grad_() for leaf in self.leaves)
        rows = ExpertRows(self.rows.brim, self.rows.offsets_e, leaves[1])
        return Problem(rows, leaves, self.grad_y_SD.double())


def make_problem(shape: Shape, dtype: torch.dtype, device: torch.device) -> Problem:
    """The inputs of rank 0, with tokens that select experts at random, in rows as they arrive."""
    generator = torch.Generator(device).manual_seed(0)
    local = shape.num_experts // shape.ranks

    def normal(*size: int, scale: float = 1) -> Tensor:
        values = torch.randn(size, generator=generator, device=device) * scale
        return values.to(dtype)

    score_TE = torch.rand(shape.tokens, shape.num_experts, generator=generator, device=device)
    id_TK = score_TE.topk(shape.top_k).indices.clamp(max=local).sort(dim=1).values
    id_SJ = id_TK[id_TK[:, 0] < local, : min(local, shape.top_k)]
    assigned = assign(id_SJ, local)
    brim = build_brim(assigned, int(assigned.counts_B.sum()))
    num_rows, places = id_SJ.shape
    padding = 16 // dtype.itemsize  # row strides of 16 bytes, not more
    x_SD = normal(num_rows, shape.dim + padding)[:, : shape.dim]
    prob_SJ = torch.rand(num_rows, places, generator=generator, device=device)
    leaves = (
        x_SD,
        prob_SJ,
        normal(local, shape.hidden_dim, shape.dim, scale=shape.dim**-0.5),
        normal(local, shape.dim, shape.hidden_dim, scale=shape.hidden_dim**-0.5),
        normal(local, shape.hidden_dim, shape.dim, scale=shape.dim**-0.5),
    )
    for leaf in leaves:
        leaf.requires_grad_()
    rows = ExpertRows(brim, assigned.counts_B.cumsum(0).int(), prob_SJ)
    return Problem(rows, leaves, normal(num_rows, shape.dim))


def looped_experts(
    x_SD: Tensor, rows: ExpertRows, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor
) -> Tensor:
    """The outputs (S, D) of the experts, one after the other, in the dtype of the arguments."""
    y_SD = torch.zeros_like(x_SD)
    start = 0
    for expert, end in enumerate(rows.offsets_e.tolist()):
        source_M = rows.brim.source_W[start:end]
        x_MD = x_SD[source_M]
        hidden_MF = F.silu(x_MD @ w1_eFD[expert].T) * (x_MD @ w3_eFD[expert].T)
        y_MD = (hidden_MF * rows.prob_N[start:end, None]) @ w2_eDF[expert].T
        y_SD = y_SD.index_add(0, source_M, y_MD)
        start = end
    return y_SD


@dataclass(frozen=True)
class Outcome:
    """How one result compares with grouped_mm's. Errors are relative, against fp64."""

    result: str
    error: float
    plain_error: float
    repeats: bool

    @property
    def right(self) -> bool:
        return self.repeats and self.error <= MOST_ERROR * self.plain_error


def compare(experts: Experts, problem: Problem) -> list[Outcome]:
    """Compare each result of ``experts`` with grouped_mm's and the loop's."""

    def error(actual: Tensor, exact: Tensor) -> float:
        return float((actual.double() - exact).norm() / exact.norm())

    exact = problem.double().run(looped_experts)
    plain = problem.run(swiglu.swiglu_experts)
    actual, again = problem.run(experts), problem.run(experts)
    return [
        Outcome(
            RESULTS[i],
            error(actual[i], exact[i]),
            error(plain[i], exact[i]),
            torch.equal(actual[i], again[i]),
        )
        for i in range(len(RESULTS))
    ]


def time_ms(experts: Experts, problem: Problem) -> float:
    """Milliseconds of a run on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    problem.run(experts)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def peak_mib(experts: Experts, problem: Problem) -> float:
    """The peak memory of a run in MiB, beyond its inputs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    problem.run(experts)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(problem: Problem, rounds: int = 30, warm_up: int = 3) -> dict[str, float]:
    """Time and memory of the kernels and of grouped_mm."""
    both = swiglu_triton.swiglu_experts, swiglu.swiglu_experts
    times = [[time_ms(experts, problem) for experts in both] for _ in range(warm_up + rounds)]
    of_kernels, of_grouped_mm = zip(*times[warm_up:], strict=True)
    ratios = [a / b for a, b in zip(of_kernels, of_grouped_mm, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    x_SD = problem.leaves[0]
    copied_bytes = 2 * len(problem.rows.brim.source_W) * x_SD.shape[1] * x_SD.itemsize
    return {
        "kernels_ms": statistics.median(of_kernels),
        "grouped_mm_ms": statistics.median(of_grouped_mm),
        "ratio": median,
        "ratio_lower_quartile": low,
        "ratio_upper_quartile": high,
        "kernels_peak_mib": peak_mib(swiglu_triton.swiglu_experts, problem),
        "grouped_mm_peak_mib": peak_mib(swiglu.swiglu_experts, problem),
        "copies_mib": copied_bytes / 2**20,
    }


def accuracy_table(rows: Sequence[dict[str, Any]]) -> str:
    """The errors for people."""
    lines = [["layer", "result", "error", "grouped_mm's", "repeats", "right"]]
    for row in rows:
        errors = f"{row['error']:.2e}", f"{row['plain_error']:.2e}"
        verdicts = ("yes" if row[key] else "NO" for key in ("repeats", "right"))
        lines.append([row["layer"], row["result"], *errors, *verdicts])
    return aligned(lines, words=2)


def speed_table(rows: Sequence[dict[str, Any]]) -> str:
    """Time and memory for people."""
    lines = [["layer", "ms", "grouped_mm's", "ratio", "MiB", "grouped_mm's", "x_ND and y_ND"]]
    for row in rows:
        spread = f"({row['ratio_lower_quartile']:.3f} to {row['ratio_upper_quartile']:.3f})"
        lines.append(
            [
                row["layer"],
                f"{row['kernels_ms']:.2f}",
                f"{row['grouped_mm_ms']:.2f}",
                f"{row['ratio']:.3f} {spread}",
                f"{row['kernels_peak_mib']:.0f}",
                f"{row['grouped_mm_peak_mib']:.0f}",
                f"{row['copies_mib']:.0f}",
            ]
        )
    return aligned(lines, words=1)


def main(arguments: Sequence[str] = ()) -> int:
    """Command line. Returns the exit code."""
    args = make_parser("gpu_check", __doc__).parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA GPU, and torch finds none here.", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    accuracy: list[dict[str, Any]] = []
    speed: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        problem = make_problem(shape, torch.bfloat16, device)
        for outcome in compare(swiglu_triton.swiglu_experts, problem):
            accuracy.append({"layer": name, **asdict(outcome), "right": outcome.right})
        speed.append({"layer": name, **measure(problem)})
    print(f"{accuracy_table(accuracy)}\n\n{speed_table(speed)}")
    write_json(args.json, {"accuracy": accuracy, "speed": speed})
    return 0 if all(row["right"] for row in accuracy) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
