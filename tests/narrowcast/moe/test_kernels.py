"""The Triton experts give the results of plain torch, in the interpreter, and compile for GPUs.

Triton reads TRITON_INTERPRET as it is imported: kernels run in processes of their own. fp32 alone,
for the interpreter's bf16 is wrong.
"""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from narrowcast.moe import swiglu, swiglu_triton
from narrowcast.moe.brim import assign, build_brim
from narrowcast.moe.swiglu import ExpertRows
from torchtitan_ext.benchmarks import gpu_check
from torchtitan_ext.benchmarks.gpu_check import RESULTS, Problem, Shape, looped_experts

Results = tuple[Tensor, ...]
Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """Sizes, and the experts that rows may select, of which each has up to ``places``."""

    num_rows: int
    num_experts: int
    places: int
    selectable: tuple[int, ...] | None = None
    dim: int = 40
    hidden_dim: int = 24
    padding: int = 0
    grad_is_expanded: bool = False

    def problem(self, dtype: torch.dtype = torch.float32) -> Problem:
        generator = torch.Generator().manual_seed(0)

        def normal(*size: int, scale: float = 1) -> Tensor:
            return (torch.randn(size, generator=generator) * scale).to(dtype)

        num_experts, dim, hidden_dim = self.num_experts, self.dim, self.hidden_dim
        chosen = range(num_experts) if self.selectable is None else self.selectable
        # Some of the places, and now and then all of a row's, are taken by no expert.
        options = torch.tensor([*chosen, *[num_experts] * self.places])
        order = torch.rand(self.num_rows, len(options), generator=generator).argsort(dim=1)
        assigned = assign(options[order][:, : self.places], num_experts)
        brim = build_brim(assigned, int(assigned.counts_B.sum()))
        leaves = (
            normal(self.num_rows, dim + self.padding)[:, :dim],
            torch.rand(self.num_rows, self.places, generator=generator),
            normal(num_experts, hidden_dim, dim, scale=dim**-0.5),
            normal(num_experts, dim, hidden_dim, scale=hidden_dim**-0.5),
            normal(num_experts, hidden_dim, dim, scale=dim**-0.5),
        )
        for leaf in leaves:
            leaf.requires_grad_()
        rows = ExpertRows(brim, assigned.counts_B.cumsum(0).int(), leaves[1])
        grad_y_SD = normal(self.num_rows, dim)
        if self.grad_is_expanded:
            grad_y_SD = torch.ones(()).expand(self.num_rows, dim)
        return Problem(rows, leaves, grad_y_SD)


CASES = {
    "sizes that no tile divides": Case(num_rows=13, num_experts=3, places=2, dim=44),
    "several tiles in each dimension, of a message": Case(70, 2, 2, hidden_dim=40, padding=4),
    "one place": Case(num_rows=37, num_experts=4, places=1),
    "nearly all rows to one expert": Case(40, 1, 1, selectable=(0,) * 40),
    "many experts a row": Case(num_rows=21, num_experts=5, places=5),
    "experts without rows": Case(num_rows=19, num_experts=5, places=2, selectable=(1, 3)),
    "no expert with rows": Case(num_rows=5, num_experts=3, places=2, selectable=()),
    "no rows": Case(num_rows=0, num_experts=3, places=2),
    "any stride of rows, an expanded gradient": Case(13, 2, 2, padding=3, grad_is_expanded=True),
}


@pytest.fixture(scope="module")
def interpret() -> Iterator[Call]:
    """``interpret(function, *args)`` calls it where kernels are interpreted."""
    with (
        patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"),
        ProcessPoolExecutor(1, get_context("spawn")) as pool,
    ):
        yield lambda function, *args: pool.submit(function, *args).result()


def run(case: Case) -> Results:
    return case.problem().run(swiglu_triton.swiglu_experts)


@pytest.mark.parametrize("name", CASES)
def test_output_and_all_gradients_are_those_of_plain_torch(name: str, interpret: Call) -> None:
    problem = CASES[name].problem()
    exact = problem.double().run(looped_experts)
    reference = problem.run(swiglu.swiglu_experts)
    for i, result in enumerate(interpret(run, CASES[name])):
        torch.testing.assert_close(result, reference[i], msg=lambda m, i=i: f"{RESULTS[i]}: {m}")
        torch.testing.assert_close(
            result.double(), exact[i], rtol=1e-5, atol=1e-5, msg=lambda m, i=i: f"{RESULTS[i]}: {m}"
        )


def test_a_second_run_gives_the_same_bits(interpret: Call) -> None:
    case = CASES["many experts a row"]
    for first, second in zip(interpret(run, case), interpret(run, case), strict=True):
        assert torch.equal(first, second)


def test_rows_without_expert_and_experts_without_row_get_zeros(interpret: Call) -> None:
    case = CASES["experts without rows"]
    is_alone_S = torch.ones(case.num_rows, dtype=torch.bool)
    is_alone_S[case.problem().rows.brim.source_W] = False
    assert 0 < is_alone_S.sum() < case.num_rows
    y, dx, _, *weights = interpret(run, case)
    assert not y[is_alone_S].any()
    assert not dx[is_alone_S].any()
    assert y[~is_alone_S].any(dim=1).all()
    for grad in weights:
        assert grad.flatten(1).any(dim=1).tolist() == [False, True, False, True, False]


class LargestStorage(TorchDispatchMode):
    """Bytes of the largest storage that an operator returns."""

    nbytes = 0

    def __torch_dispatch__(
        self, func: Call, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return out


def largest_storages(case: Case) -> list[int]:
    found = []
    for module in (swiglu_triton, swiglu):
        problem = case.problem()
        with LargestStorage() as largest:
            problem.run(module.swiglu_experts)
        found.append(largest.nbytes)
    return found


def test_copies_of_the_rows_are_never_made(interpret: Call) -> None:
    case = Case(num_rows=30, num_experts=3, places=3, dim=48, hidden_dim=8)
    rows_at_experts = len(case.problem().rows.brim.source_W)
    assert rows_at_experts > 1.2 * case.num_rows
    ours, reference = interpret(largest_storages, case)
    assert ours == 4 * case.num_rows * case.dim
    assert reference >= 4 * rows_at_experts * case.dim


def test_weights_that_are_not_contiguous_are_refused() -> None:
    problem = CASES["one place"].problem()
    x_SD, _, w1_eFD, w2_eDF, w3_eFD = problem.leaves
    with pytest.raises(ValueError, match=r"w2 has strides .* call \.contiguous\(\)"):
        swiglu_triton.swiglu_experts(x_SD, problem.rows, w1_eFD, w2_eDF.mT.contiguous().mT, w3_eFD)


def compiled_kernels(capability: int) -> dict[str, list[str]]:
    """The PTX of each kernel, once for each way that it is launched in, for a GPU that is not here.
    All went on to be cubins."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
        )
    )
    compiled: dict[int, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled[id(kernel)] = kernel

    # Rows that are 16 bytes further apart than they are long.
    case = Case(num_rows=9, num_experts=3, places=2, dim=2048, hidden_dim=1024, padding=8)
    with patch.object(JITFunction, "run", compile_only):
        case.problem(torch.bfloat16).run(swiglu_triton.swiglu_experts)
    found: dict[str, list[str]] = {}
    for kernel in compiled.values():
        assert kernel.asm["cubin"].startswith(b"\x7fELF")
        found.setdefault(kernel.name, []).append(kernel.asm["ptx"])
    return found


def test_kernels_compile_for_gpus_to_wide_loads_and_tensor_cores() -> None:
    with patch.dict(os.environ), ProcessPoolExecutor(2, get_context("spawn")) as pool:
        os.environ.pop("TRITON_INTERPRET", None)
        capabilities = {80: "mma.sync", 90: "wgmma.mma_async"}
        found = dict(zip(capabilities, pool.map(compiled_kernels, capabilities), strict=True))
    for capability, instruction in capabilities.items():
        launches = {name: len(ptxs) for name, ptxs in found[capability].items()}
        assert launches == {
            "scatter_swiglu": 1,
            "scatter_swiglu_backward": 1,
            "merge_product": 2,
            "weight_gradient": 2,
        }
        for name, ptxs in found[capability].items():
            for ptx in ptxs:
                assert instruction in ptx, name
                assert re.search(r"cp\.async\.cg\.shared\.global [^;]*, 0x10,", ptx), name
                assert not re.search(r"(ld|st)\.global[.\w]*\.b16 ", ptx), name
                assert not re.search(r"cp\.async\.ca\.shared\.global [^;]*, 0x[24],", ptx), name


def test_gpu_check_says_that_it_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(torch.cuda, "is_available", return_value=False):
        assert gpu_check.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "gpu_check needs a CUDA GPU, and torch finds none here.\n"


def test_gpu_check_distinguishes_wrong_results_from_right_ones() -> None:
    shape = Shape(dim=16, hidden_dim=8, num_experts=8, top_k=3, ranks=2, tokens=20)
    problem = gpu_check.make_problem(shape, torch.float32, torch.device("cpu"))

    def coarse(*args: Any) -> Tensor:
        return swiglu.swiglu_experts(*args).bfloat16().float()

    calls = []

    def unsteady(*args: Any) -> Tensor:
        calls.append(args)
        return swiglu.swiglu_experts(*args) * (1 + 1e-7 * len(calls))

    assert all(outcome.right for outcome in gpu_check.compare(swiglu.swiglu_experts, problem))
    is_wrong = {o.result: not o.right for o in gpu_check.compare(coarse, problem)}
    assert is_wrong["y"]
    assert not all(outcome.repeats for outcome in gpu_check.compare(unsteady, problem))
