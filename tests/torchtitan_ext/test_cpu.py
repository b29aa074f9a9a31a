"""CPU support patches the process it runs in, so that these tests look at another process.

Run as a script, this file is that process: it writes what it sees to the folder it is given.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

LOW_PRECISION = (torch.bfloat16, torch.float16)
# Products of a (3, 8, 16) and b (3, 16, 24).
PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": lambda a, b: a[0] @ b[0],
    "bmm": torch.bmm,
    "addmm": lambda a, b: torch.addmm(torch.ones(24, dtype=a.dtype), a[0], b[0]),
    # rows 0 to 2, none, and 3 to 7
    "grouped_mm": lambda a, b: torch._grouped_mm(
        a[0], b, offs=torch.tensor([3, 3, 8], dtype=torch.int32)
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script wrote."""
    folder = tmp_path_factory.mktemp("cpu")
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-P", __file__, str(folder)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "seen.json").read_text())


def test_apply_changes_nothing_where_there_is_an_accelerator(seen):
    assert seen["changed with an accelerator"] == []


def test_apply_reaches_torchtitan_modules_imported_before_it(seen):
    assert "torchtitan.distributed.parallel_dims.device_type" in seen["changed"]
    assert "torchtitan.components.metrics.device_module" in seen["changed"]
    assert seen["device types"] == ["cpu"]


def test_apply_a_second_time_changes_nothing(seen):
    assert seen["changed by a second apply"] == []


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_low_precision_products_and_gradients_are_torchs_fp32_ones_rounded(folder, name, dtype):
    expected = torch.load(folder / f"{dtype} in fp32 by torch.pt")[name]
    actual = torch.load(folder / f"{dtype}.pt")[name]
    assert [t.dtype for t in actual] == [dtype] * 3
    assert all(torch.equal(x, y.to(dtype)) for x, y in zip(actual, expected, strict=True))


def test_products_are_computed_in_fp32_where_operands_are_of_low_precision_and_only_there(seen):
    assert seen["cast"] == {"torch.bfloat16": True, "torch.float16": True, "torch.float32": False}


@pytest.mark.parametrize("name", PRODUCTS)
def test_fp32_products_and_gradients_are_torchs(folder, name):
    expected = torch.load(folder / "torch.float32 in fp32 by torch.pt")[name]
    actual = torch.load(folder / "torch.float32.pt")[name]
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("layout", ["fsdp 4", "fsdp 2 x ep 2"])
def test_initial_parameters_do_not_depend_on_the_number_of_ranks(folder, layout):
    one = torch.load(folder / "fsdp 1.pt")
    several = torch.load(folder / f"{layout}.pt")
    assert one.keys() == several.keys()
    differing = [name for name in one if not torch.equal(one[name], several[name])]
    assert differing == []


@pytest.mark.parametrize("layout", ["fsdp 4", "fsdp 2 x ep 2"])
def test_all_experts_start_with_different_weights(folder, layout):
    parameters = torch.load(folder / f"{layout}.pt")
    experts = [(n, p) for n, p in parameters.items() if n.endswith("_EFD") or n.endswith("_EDF")]
    assert len(experts) == 2 * 3
    for _, weights in experts:
        assert len(weights.flatten(1).unique(dim=0)) == len(weights) == 16


def _products(values: torch.dtype, computed_in: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """By name, the product of random operands and its gradients for both."""
    torch.manual_seed(0)
    a, b, weights = (
        torch.randn(shape).to(values).to(computed_in)
        for shape in ((3, 8, 16), (3, 16, 24), (3, 8, 24))
    )
    products = {}
    for name, product in PRODUCTS.items():
        out = product(a.requires_grad_(), b.requires_grad_())
        gradients = torch.autograd.grad(out, (a, b), weights if out.ndim == 3 else weights[0])
        products[name] = [out.detach(), *gradients]
    return products


def _casts(dtype: torch.dtype) -> bool:
    """Whether a matrix product casts its operands."""
    a = torch.ones(4, 4, dtype=dtype)
    with torch.profiler.profile() as profile:
        a @ a
    return "aten::_to_copy" in {event.key for event in profile.key_averages()}


def _watched() -> dict[str, Any]:
    """Everything that apply() may change."""
    from torchtitan.protocols.module import Module

    from torchtitan_ext import cpu

    names = ("device_type", "device_module", "disable_fsdp_gradient_division")
    seen = {
        f"{module_name}.{name}": getattr(module, name)
        for module_name, module in sys.modules.items()
        for name in names
        if module_name.startswith("torchtitan.") and name in vars(module)
    }
    seen["Module"] = Module._init_self_parameters
    seen["kernels"] = cpu._kernels
    seen["set_timeout"] = hasattr(torch.distributed, "set_timeout")
    return seen


def _changed(before: dict[str, Any]) -> list[str]:
    return [name for name, value in _watched().items() if value is not before[name]]


def _init_and_save(rank: int, world_size: int, ep: int, file: str) -> None:
    """One rank: initialize a small MoE in a layout as torchtitan's trainer does, save it whole."""
    from torch.distributed.tensor import DTensor
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    from torchtitan_ext import models

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}.rendezvous", rank=rank, world_size=world_size
    )
    config = models.demo()
    config.model_spec = models.qwen3_moe(
        flavor="test",
        n_layers=2,
        dim=32,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        moe_hidden_dim=8,
        num_experts=16,
        top_k=2,
    )
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.expert_parallel_degree = ep
    set_spmd_backend(config.parallelism.spmd_backend)
    parallel_dims = ParallelDims.from_config(config.parallelism, world_size)
    parallel_dims.build_mesh()
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model = config.model_spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    torch.manual_seed(42)
    with torch.no_grad():
        model.init_weights()
    full = {
        name: p.full_tensor() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }
    if rank == 0:
        torch.save(full, f"{file}.pt")
    torch.distributed.destroy_process_group()


def main(folder: Path) -> None:
    """The other process: see the module's docstring."""
    import torchtitan.trainer  # noqa: F401  as with torchtitan's own entry

    from torchtitan_ext import cpu

    before = _watched()
    is_available = torch.accelerator.is_available
    torch.accelerator.is_available = lambda: True
    cpu.apply()
    torch.accelerator.is_available = is_available
    seen: dict[str, Any] = {"changed with an accelerator": _changed(before)}

    dtypes = (*LOW_PRECISION, torch.float32)
    for dtype in dtypes:
        torch.save(_products(dtype, torch.float32), folder / f"{dtype} in fp32 by torch.pt")
    cpu.apply()
    for dtype in dtypes:
        torch.save(_products(dtype, dtype), folder / f"{dtype}.pt")

    seen["cast"] = {str(dtype): _casts(dtype) for dtype in dtypes}
    seen["changed"] = _changed(before)
    after = _watched()
    seen["device types"] = sorted({v for k, v in after.items() if k.endswith(".device_type")})
    cpu.apply()
    seen["changed by a second apply"] = _changed(after)
    (folder / "seen.json").write_text(json.dumps(seen))

    for layout, world_size, ep in (("fsdp 1", 1, 1), ("fsdp 4", 4, 1), ("fsdp 2 x ep 2", 4, 2)):
        torch.multiprocessing.start_processes(
            _init_and_save,
            (world_size, ep, str(folder / layout)),
            nprocs=world_size,
            start_method="fork",
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
