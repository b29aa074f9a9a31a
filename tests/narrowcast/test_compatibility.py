"""What narrowed gathers and gradients go together with: training is bitwise that of baseline FSDP2.

``docs/compatibility.md`` names these cases. Each has two ranks a sharding group, where narrowed
gradients are bitwise those of baseline FSDP2.
"""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_map_only

from narrowcast import narrow_all_gather, narrow_reduce_scatter
from narrowcast.fsdp2 import AllGather, DefaultAllocMixin
from tests.narrowcast.training import same_bits, state_of
from tests.ranks import Raised

DIM, STEPS = 16, 4
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

Narrow = Callable[[nn.Module, torch.optim.Optimizer | None], None]


class Block(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD + self.down(self.up(x_TD).relu())


class LoraLinear(nn.Module):
    """A frozen linear layer, and the product of two small trained matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.base(x_TD) + self.up(self.down(x_TD))


def _blocks(num_blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(num_blocks)])


def _shard(model: nn.Sequential, policy: MixedPrecisionPolicy = POLICY, mesh=None) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def _adamw(model: nn.Module, **options: bool) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, **options)


def _batch(step: int, rank: int | None = None, num_tokens: int = 6) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(step * 100 + rank)
    return torch.randn(num_tokens, DIM, generator=generator)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        loss = model(_batch(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def lora(narrow: Narrow, folder: Path) -> list[Tensor]:
    """Frozen base weights, and trained adapters in the same parameter groups."""
    model = _blocks()
    for block in model:
        block.up, block.down = LoraLinear(block.up), LoraLinear(block.down)
    optimizer = _adamw(_shard(model))
    narrow(model, optimizer)
    return _train(model, optimizer, range(STEPS)) + state_of(model, optimizer)


def ema_beside(narrow: Narrow, folder: Path) -> list[Tensor]:
    """``AveragedModel`` of a second sharded model, which is evaluated after every step."""
    source = _blocks()
    average = AveragedModel(source, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    _shard(average.module)
    model = _shard(copy.deepcopy(source))
    optimizer = _adamw(model)
    narrow(model, optimizer)
    narrow(average.module, None)
    seen = []
    for step in range(STEPS):
        seen += _train(model, optimizer, range(step, step + 1))
        average.update_parameters(model)
        with torch.no_grad():
            seen.append(average(_batch(step)).clone())
    return seen + [_local(p) for p in average.parameters()] + state_of(model, optimizer)


def ema_swapped_in(narrow: Narrow, folder: Path) -> list[Tensor]:
    """Averaged weights are copied into the trained model for an evaluation, and out again."""
    model = _shard(_blocks())
    optimizer = _adamw(model)
    narrow(model, optimizer)
    averages = [_local(parameter) for parameter in model.parameters()]
    seen = []
    for step in range(STEPS):
        seen += _train(model, optimizer, range(step, step + 1))
        trained = [_local(parameter) for parameter in model.parameters()]
        torch._foreach_lerp_(averages, trained, 0.1)
        with torch.no_grad():
            for weights in (averages, trained):
                for parameter, weight in zip(model.parameters(), weights, strict=True):
                    parameter.to_local().copy_(weight)
                seen.append(model(_batch(step)).clone())
    return seen + averages + state_of(model, optimizer)


def scaled_fp16(narrow: Narrow, folder: Path) -> list[Tensor]:
    """``GradScaler`` skips the second step on every rank, since its gradients overflow."""
    model = _shard(_blocks(), MixedPrecisionPolicy(torch.float16, torch.float32))
    optimizer, scaler = _adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    narrow(model, optimizer)
    seen = []
    for step in range(STEPS):
        x_TD = _batch(step) * (1e4 if step == 1 else 1)
        loss = model(x_TD).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [loss.detach(), torch.tensor(scaler.get_scale())]
    assert scaler.get_scale() == 2.0**7, "the second step was not skipped"
    return seen + state_of(model, optimizer)


def checkpointed(narrow: Narrow, folder: Path) -> list[Tensor]:
    """A distributed checkpoint is saved, training goes on, and goes back to the checkpoint."""
    model = _shard(_blocks())
    optimizer = _adamw(model)
    narrow(model, optimizer)
    seen = _train(model, optimizer, range(2))
    saved = folder / "checkpoint"
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=saved)
    seen += _train(model, optimizer, range(2, 4))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=saved)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    again = _train(model, optimizer, range(2, 4))
    assert all(torch.equal(one, other) for one, other in zip(seen[2:], again, strict=True))
    return seen + again + state_of(model, optimizer)


def clipped(narrow: Narrow, folder: Path) -> list[Tensor]:
    model = _shard(_blocks())
    optimizer = _adamw(model)
    narrow(model, optimizer)
    seen = []
    for step in range(STEPS):
        model(_batch(step)).float().square().mean().backward()
        seen.append(_local(nn.utils.clip_grad_norm_(model.parameters(), 1e-2)))
        optimizer.step()
        optimizer.zero_grad()
    return seen + state_of(model, optimizer)


def fused_optimizer(narrow: Narrow, folder: Path) -> list[Tensor]:
    model = _shard(_blocks())
    optimizer = _adamw(model, fused=True)
    narrow(model, optimizer)
    return _train(model, optimizer, range(STEPS)) + state_of(model, optimizer)


def optimizer_in_backward(narrow: Narrow, folder: Path) -> list[Tensor]:
    """Each parameter has an optimizer that steps as soon as its gradient is there."""
    model = _shard(_blocks())
    narrow(model, None)
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    seen = []
    for step_index in range(STEPS):
        loss = model(_batch(step_index)).float().square().mean()
        loss.backward()
        seen.append(loss.detach())
    return seen + [_local(parameter) for parameter in model.parameters()]


def tensor_parallel(narrow: Narrow, folder: Path) -> list[Tensor]:
    """Blocks cut over two ranks, their parts sharded over two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = _blocks()
    for block in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
    _shard(model, mesh=mesh["shard"])
    optimizer = _adamw(model)
    narrow(model, optimizer)
    losses = []
    for step in range(STEPS):
        loss = model(_batch(step, mesh.get_local_rank("shard"))).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses + state_of(model, optimizer)


class SequenceAttention(Block):
    """Attention whose tokens are cut over a mesh: keys and values are gathered."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.group = group

    def forward(self, x_TD: Tensor) -> Tensor:
        query_TD, kv_TD = self.qkv(x_TD).split([DIM, 2 * DIM], dim=-1)
        key_SD, value_SD = all_gather_tensor_autograd(kv_TD, 0, self.group).chunk(2, dim=-1)
        weight_TS = (query_TD @ key_SD.T).softmax(dim=-1)
        return super().forward(x_TD + weight_TS @ value_SD)


def context_parallel(narrow: Narrow, folder: Path) -> list[Tensor]:
    """Sequences cut over two ranks; parameters are sharded over all of data and sequence."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context"))
    torch.manual_seed(0)
    group = mesh["context"].get_group()
    model = nn.Sequential(*[SequenceAttention(group) for _ in range(2)])
    _shard(model, mesh=mesh["data", "context"]._flatten("sharded"))
    optimizer = _adamw(model)
    narrow(model, optimizer)
    return _train(model, optimizer, range(STEPS)) + state_of(model, optimizer)


def pipeline(narrow: Narrow, folder: Path) -> list[Tensor]:
    """Two stages of two ranks each, four microbatches of 1F1B."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    stage_index = mesh.get_local_rank("pipeline")
    stage_module = nn.Sequential(_blocks()[stage_index])
    _shard(stage_module, mesh=mesh["shard"])
    optimizer = _adamw(stage_module)
    narrow(stage_module, optimizer)
    stage = PipelineStage(
        stage_module, stage_index, 2, torch.device("cpu"), group=mesh["pipeline"].get_group()
    )
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, z: (y - z).float().square().mean())
    seen = []
    for step in range(STEPS):
        x_TD = _batch(step, mesh.get_local_rank("shard"), num_tokens=8)
        losses: list[Tensor] = []
        if stage_index == 0:
            schedule.step(x_TD)
        else:
            schedule.step(target=x_TD.flip(0), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.detach() for loss in losses]
    return seen + state_of(stage_module, optimizer)


def compiled_whole(narrow: Narrow, folder: Path) -> list[Tensor]:
    """``torch.compile`` of the whole sharded model: the graph breaks at FSDP2's hooks."""
    model = _shard(_blocks())
    optimizer = _adamw(model)
    narrow(model, optimizer)
    compiled = torch.compile(model, backend="aot_eager")
    return _train(compiled, optimizer, range(STEPS)) + state_of(model, optimizer)


OF_TWO = [
    lora,
    ema_beside,
    ema_swapped_in,
    scaled_fp16,
    checkpointed,
    clipped,
    fused_optimizer,
    optimizer_in_backward,
    context_parallel,
    compiled_whole,
]
OF_FOUR = [tensor_parallel, pipeline]
SLOW = [compiled_whole]  # or like another case


def _named(cases: list[Callable]) -> list[Any]:
    return [
        pytest.param(case, id=case.__name__, marks=[pytest.mark.wide] if case in SLOW else [])
        for case in cases
    ]


@contextmanager
def _narrowing() -> Iterator[Narrow]:
    """Narrows what a case asks to narrow, for as long as the block runs."""
    handles = []

    def narrow(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        handles.append(narrow_all_gather(model, optimizer, compression="delta"))
        handles.append(narrow_reduce_scatter(model, optimizer, compression="entropy"))

    try:
        yield narrow
    finally:
        for handle in reversed(handles):
            handle.remove()


def _trains_as_plain(case: Callable, folder: Path) -> bool:
    plain = case(lambda model, optimizer: None, folder / "plain")
    assert len(plain) > STEPS
    with _narrowing() as narrow:
        return same_bits(case(narrow, folder / "narrowed"), plain)


@pytest.mark.parametrize("case", _named(OF_TWO))
def test_training_is_bitwise_that_of_plain_fsdp2(ranks, tmp_path: Path, case: Callable) -> None:
    assert ranks(2).run(_trains_as_plain, case, tmp_path) == [True] * 2


class Float8Weight(Tensor):
    """Gathers in a form of its own, as torchao's float8 weights do."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, tensor: Tensor) -> "Float8Weight":
        return Tensor._make_wrapper_subclass(cls, tensor.size(), dtype=tensor.dtype)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda one: one._tensor, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, call(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        raise NotImplementedError

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class OtherAllGather(DefaultAllocMixin, AllGather):
    def __call__(self, output: Tensor, shard: Tensor, group: dist.ProcessGroup, **_: Any) -> None:
        dist.all_gather_into_tensor(output, shard, group)


def _float8() -> None:
    model = _blocks()
    model[0].up.weight = nn.Parameter(Float8Weight(model[0].up.weight.detach()))
    _narrow_both(_shard(model))


def _other_all_gather() -> None:
    model = _shard(_blocks())
    model[0].set_custom_all_gather(OtherAllGather())
    _narrow_both(model)


def _sharded_by_fsdp1() -> None:
    _narrow_both(FullyShardedDataParallel(_blocks(), device_id=torch.device("cpu")))


def _replicated_by_ddp() -> None:
    _narrow_both(DistributedDataParallel(_blocks()))


def _narrow_both(model: nn.Module) -> None:
    narrow_all_gather(model, compression="delta")
    narrow_reduce_scatter(model, compression="entropy")


REFUSED = {
    _float8: r"0\.up\.weight is a Float8Weight.*fsdp_pre_all_gather.*Turn off that extension",
    _other_all_gather: r"has a OtherAllGather as its all-gather.*Leave out set_custom_all_gather",
    _sharded_by_fsdp1: r"not sharded by FSDP2: call torch\.distributed\.fsdp\.fully_shard",
    _replicated_by_ddp: r"not sharded by FSDP2: call torch\.distributed\.fsdp\.fully_shard",
}


@pytest.mark.parametrize("build", REFUSED)
def test_what_cannot_go_together_is_refused_with_its_cure(ranks, build: Callable) -> None:
    for outcome in ranks(2).outcomes(build):
        assert isinstance(outcome, Raised)
        assert outcome.type == "ValueError"
        assert re.search(REFUSED[build], outcome.message), outcome.message


@pytest.mark.parametrize("case", _named(OF_FOUR))
def test_beside_another_parallelism_too(ranks, tmp_path: Path, case: Callable) -> None:
    assert ranks(4).run(_trains_as_plain, case, tmp_path) == [True] * 4
