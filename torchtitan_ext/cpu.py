"""Lets torchtitan 0.3.0 and torch 2.13 train on CPU with gloo.

``apply()`` does everything, and does nothing where torch has an accelerator. Each part says what
fails without it, as seen with torchtitan 0.3.0 and torch 2.13.0 on Linux.

A model with FlexAttention, which has no backward on CPU, needs one line of configuration as well:
``override.imports = ["torchtitan_ext.cpu.scaled_dot_product_attention"]``.
"""

import functools
import os
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.distributed.fsdp as titan_fsdp
import torchtitan.tools.utils as titan_utils
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.protocols.module import Module

from torchtitan_ext.private import wrap_parameter_initialization

_LOW_PRECISION = (torch.bfloat16, torch.float16)

# Holds the kernel registrations, which end with it. Not None once apply() has run.
_kernels: torch.library.Library | None = None


def apply() -> None:
    """Make torchtitan train on CPU, where torch has no accelerator. Idempotent.

    May be called before or after torchtitan's modules were imported, but before a trainer is
    built.
    """
    global _kernels
    if _kernels is not None or torch.accelerator.is_available():
        return
    _use_cpu_device()
    _sum_gradients_without_scaling()
    _draw_full_parameters()
    _kernels = _multiply_low_precision_in_fp32()


class Fp32ScaledDotProductAttention(ScaledDotProductAttention):
    """Causal scaled-dot-product attention, computed in fp32 as the matrix products are."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        pass

    def forward(
        self, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        out_BLNH = super().forward(q_BLNH.float(), k_BLNH.float(), v_BLNH.float(), **kwargs)
        return out_BLNH.to(q_BLNH.dtype)


@override(target=FlexAttention.Config, description="scaled-dot-product attention, causal, for CPU")
def scaled_dot_product_attention(
    cfg: FlexAttention.Config,
) -> Fp32ScaledDotProductAttention.Config:
    """Replace FlexAttention, which has no backward on CPU.

    It differs in one point: attention crosses the boundaries of documents packed into one sequence,
    because its only mask is causal.
    """
    return derive(cfg, Fp32ScaledDotProductAttention.Config)


class _CpuDevice:
    """``torch.cpu`` with the functions that torchtitan calls and ``torch.cpu`` lacks.

    Memory is the peak resident set of the process, which cannot be reset.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        # torch.cpu returns "cpu", which barrier(device_ids=[...]) refuses.
        return 0

    def get_device_name(self, device: torch.device) -> str:
        return platform.processor() or "CPU"

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        )

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "active_bytes.all.peak": peak_bytes,
            "reserved_bytes.all.peak": peak_bytes,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def _use_cpu_device() -> None:
    """Without an accelerator torchtitan uses "cuda", and fails at its first tensor."""
    _rebind("device_type", titan_utils.device_type, "cpu")
    _rebind("device_module", titan_utils.device_module, _CpuDevice())


def _sum_gradients_without_scaling() -> None:
    """A gradient divide factor makes FSDP2 reduce with PREMUL_SUM, which gloo lacks.

    torchtitan's factor is 1, so that SUM is the same.
    """
    original = titan_fsdp.disable_fsdp_gradient_division

    @functools.wraps(original)
    def disable_fsdp_gradient_division(model: nn.Module) -> None:
        original(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    _rebind("disable_fsdp_gradient_division", original, disable_fsdp_gradient_division)


def _draw_full_parameters() -> None:
    """DTensor has no random number generator on a CPU mesh: every rank draws the same numbers for
    its shard without a warning, so that experts i and i + E/2 start identical. Every rank draws the
    full tensor instead, from the generator that torchtitan seeds alike, and takes its shard from
    it. Initial parameters then do not depend on the number of ranks.
    """

    def on_full_parameters(initialize: Callable[[Module], None]) -> Callable[[Module], None]:
        @functools.wraps(initialize)
        def initialize_full(module: Module) -> None:
            sharded = {
                name: parameter
                for name, parameter in module.named_parameters(recurse=False)
                if isinstance(parameter, DTensor)
            }
            full = {name: _full_like(parameter) for name, parameter in sharded.items()}
            _set_parameters(module, full)
            try:
                initialize(module)
            finally:
                _set_parameters(module, sharded)
            for name, parameter in sharded.items():
                _copy_shard(full[name], parameter)

        return initialize_full

    wrap_parameter_initialization(on_full_parameters)


def _set_parameters(module: Module, parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        setattr(module, name, parameter)


def _full_like(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the same shape that is not sharded, with no values yet."""
    full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(full, parameter.requires_grad)


def _copy_shard(full: nn.Parameter, sharded: nn.Parameter) -> None:
    """Copy this rank's part of a full parameter, if anything was written to it."""
    # Not written to by its initializer: a tied weight, which is initialized elsewhere.
    if full._version == 0:
        return
    shard = distribute_tensor(
        full.detach(), sharded.device_mesh, sharded.placements, src_data_rank=None
    )
    sharded.detach().copy_(shard)


def _multiply_low_precision_in_fp32() -> torch.library.Library:
    """Without bf16 units a CPU multiplies bf16 and fp16 matrices some 30 times slower than fp32.

    Operands are converted to fp32, and the product is rounded once, as on a tensor core.
    """
    library = torch.library.Library("aten", "IMPL")
    for name in ("mm", "bmm", "addmm", "_grouped_mm"):
        original = torch.library.get_kernel(f"aten::{name}", "CPU")
        library.impl(name, _in_fp32(original), "CPU", with_keyset=True, allow_override=True)
    return library


def _in_fp32(kernel: Any) -> Callable[..., torch.Tensor]:
    """The kernel, computed in fp32 where its first operand is of low precision."""

    def call(keys: Any, first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if first.dtype not in _LOW_PRECISION:
            return kernel.call_boxed(keys, first, *args, **kwargs)
        args = tuple(
            a.float() if isinstance(a, torch.Tensor) and a.dtype in _LOW_PRECISION else a
            for a in args
        )
        return kernel.call_boxed(keys, first.float(), *args, **kwargs).to(first.dtype)

    return call


def _rebind(name: str, old: Any, new: Any) -> None:
    """Replace a name of torchtitan's wherever an imported module of it has bound the value."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torchtitan.") and vars(module).get(name) == old:
            setattr(module, name, new)
