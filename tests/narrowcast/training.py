"""A small model trained with FSDP2, plain or narrowed, in all the ways that FSDP2 offers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from narrowcast import NarrowedGradients, NarrowedModel, narrow_all_gather, narrow_reduce_scatter
from narrowcast.telemetry.step_volume import StepVolume

DIM = 24


class Experts(nn.Module):
    """Two-layer experts; each row of the batch goes to one of them."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.w1_EFD = nn.Parameter(torch.empty(num_experts, 2 * DIM, DIM))
        self.w2_EDF = nn.Parameter(torch.empty(num_experts, DIM, 2 * DIM))

    def forward(self, x_TD: Tensor) -> Tensor:
        expert_T = torch.arange(x_TD.shape[0]) % self.w1_EFD.shape[0]
        hidden_TF = torch.einsum("td,tfd->tf", x_TD, self.w1_EFD[expert_T]).relu()
        return torch.einsum("tf,tdf->td", hidden_TF, self.w2_EDF[expert_T])


class Block(nn.Module):
    """Odd sizes on purpose: rows fewer than ranks (empty shards), rows no rank count divides."""

    def __init__(self, num_experts: int, frozen: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        for dtype in frozen:
            table = torch.arange(3 * 5).view(3, 5).to(dtype)
            name = f"table_{dtype}".replace(".", "_")
            self.register_parameter(name, nn.Parameter(table, requires_grad=False))
        self.attention_norm = nn.LayerNorm(DIM)
        self.attention = nn.Linear(DIM, DIM)
        self.router = nn.Linear(DIM, 3)
        self.scale = nn.Parameter(torch.empty(1))
        self.experts = Experts(num_experts)

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD))
        for name, table in self.named_parameters(recurse=False):
            if name.startswith("table"):
                x_TD = x_TD + table.sum().to(x_TD.dtype) / 1000
        score_T1 = self.router(x_TD).softmax(dim=-1).amax(dim=-1, keepdim=True)
        return x_TD + self.experts(x_TD) * score_T1 * self.scale


@dataclass(frozen=True)
class Setup:
    """How to shard, train and narrow.

    ``gathered`` and ``reduced`` are the dtypes of mixed precision, ``narrow`` and ``gradients`` the
    arguments of ``narrow_all_gather`` and ``narrow_reduce_scatter``, with ``None`` for FSDP2 as it
    is; ``frozen`` adds a table of each dtype; ``synced`` reduces gradients after each microbatch.
    """

    narrow: dict[str, Any] | None = None
    gradients: dict[str, Any] | None = None
    gathered: torch.dtype | None = torch.bfloat16
    reduced: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    reshard: bool | int = True
    optimizer: str = "AdamW"
    num_experts: int = 6
    frozen: tuple[torch.dtype, ...] = ()
    expert_shard_dim: int = 0
    offload: bool = False
    replicas: int = 1
    microbatches: int = 1
    synced: bool = True
    loss_scale: float = 1
    divide_factor: float | None = None
    force_sum: bool = False
    prefetch: bool = False
    async_unshard: bool = False
    checkpointing: bool = False
    backend: str | None = None
    steps: int = 4


def build(setup: Setup) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The sharded model and its optimizer; the same initial weights for every setup."""
    torch.manual_seed(0)
    blocks = [Block(setup.num_experts, setup.frozen) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(DIM, 5))
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
            parameter.data = parameter.data.to(setup.dtype)
    options: dict[str, Any] = {
        "mesh": _mesh(setup.replicas),
        "reshard_after_forward": setup.reshard,
        "mp_policy": MixedPrecisionPolicy(setup.gathered, setup.reduced),
    }
    if setup.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if setup.expert_shard_dim:
        shard = Shard(setup.expert_shard_dim)
        options["shard_placement_fn"] = lambda p: shard if p.ndim == 3 else None
    for index in range(2):
        if setup.checkpointing:
            model[index] = checkpoint_wrapper(model[index])
        if setup.backend:
            model[index].compile(backend=setup.backend)
        fully_shard(model[index], **options)
    fully_shard(model, **options)
    if setup.prefetch:
        model[0].set_modules_to_forward_prefetch([model[1]])
        model[1].set_modules_to_backward_prefetch([model[0]])
    for module in (model[0], model[1], model):
        module._set_unshard_async_op(setup.async_unshard)
        module.set_force_sum_reduction_for_comms(setup.force_sum)
        if setup.divide_factor is not None:
            module.set_gradient_divide_factor(setup.divide_factor)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if setup.optimizer == "Adafactor":
        return model, _adafactor_of_shards(model)
    return model, getattr(torch.optim, setup.optimizer)(trained, lr=1e-3)


class TwoLayers(nn.Module):
    """Two layers of one parameter group, of which the second need not be used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x_TD: Tensor, uses_second: bool) -> Tensor:
        x_TD = self.first(x_TD)
        return self.second(x_TD) if uses_second else x_TD


def build_two_layers() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = TwoLayers()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mesh=_mesh(replicas=1), mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _adafactor_of_shards(model: nn.Module) -> torch.optim.Optimizer:
    """Adafactor on each rank's own shards: torch 2.13's fails on DTensors (in-place square of a
    partial norm), with baseline FSDP2 too."""
    sharded = [parameter for parameter in model.parameters() if local(parameter).numel()]
    shards = [nn.Parameter(local(parameter).detach()) for parameter in sharded]
    optimizer = torch.optim.Adafactor(shards, lr=1e-3)

    def take_gradients(*_: Any) -> None:
        for parameter, shard in zip(sharded, shards, strict=True):
            shard.grad, parameter.grad = local(parameter.grad), None

    optimizer.register_step_pre_hook(take_gradients)
    return optimizer


def _mesh(replicas: int) -> Any:
    if replicas == 1:
        return init_device_mesh("cpu", (dist.get_world_size(),))
    shape, names = (replicas, dist.get_world_size() // replicas), ("replicate", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def train(
    setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer, first_step: int = 0
) -> list[float]:
    """Trains on data that differs by rank and step; the loss of every microbatch."""
    losses = []
    for step in range(first_step, first_step + setup.steps):
        for microbatch in range(setup.microbatches):
            model.set_requires_gradient_sync(setup.synced or microbatch == setup.microbatches - 1)
            seed = (step * setup.microbatches + microbatch) * dist.get_world_size()
            generator = torch.Generator().manual_seed(seed + dist.get_rank())
            x_TD = torch.randn(7, DIM, generator=generator).to(setup.dtype)
            loss = model(x_TD).float().square().mean()
            (loss * setup.loss_scale).backward()
            losses.append(loss.item())
        if setup.loss_scale != 1:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    local(parameter.grad).div_(setup.loss_scale)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def narrow(
    setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[NarrowedModel, list[StepVolume]]:
    """Narrows gathers as ``setup`` says; the second list gains the volume of every step."""
    handle = narrow_all_gather(model, optimizer, **setup.narrow)
    volumes: list[StepVolume] = []
    optimizer.register_step_post_hook(lambda *_: volumes.append(handle.ledger.last))
    return handle, volumes


@contextmanager
def narrowed(
    setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[list[NarrowedModel | NarrowedGradients]]:
    """Narrows gathers and gradients as ``setup`` says, for as long as the block runs."""
    handles: list[NarrowedModel | NarrowedGradients] = []
    try:
        if setup.narrow is not None:
            handles.append(narrow_all_gather(model, optimizer, **setup.narrow))
        if setup.gradients is not None:
            handles.append(narrow_reduce_scatter(model, optimizer, **setup.gradients))
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This rank's part of every parameter and of every optimizer state."""
    tensors = [local(parameter.detach()) for parameter in model.parameters()]
    for states in optimizer.state.values():
        tensors += [local(value) for value in states.values() if isinstance(value, Tensor)]
    return [tensor.clone() for tensor in tensors]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bitwise equality: of NaN payloads and the sign of zero too."""
    return len(a) == len(b) and all(
        x.shape == y.shape
        and torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
        for x, y in zip(a, b, strict=True)
    )
