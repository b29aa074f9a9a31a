"""All that narrowcast touches of torch beyond its public API, in one place (seen in torch 2.13.0).

FSDP2 has a public setter for a custom all-gather, ``FSDPModule.set_custom_all_gather``, but it
refuses modules of several parameter groups (as torchtitan makes them with expert parallelism), does
not recurse, and offers no way back or to know which parameter lies where in the gathered buffer.
Hence ``_get_fsdp_state()``, ``FSDPParamGroup`` and ``FSDPParam``.

Collectives that nobody else counts are counted by replacing functions of ``torch.distributed`` for
as long as a ledger runs (``collectives``): there is no public hook that sees them.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultAllocMixin,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

__all__ = [
    "SENDING_METHODS",
    "AllGather",
    "DefaultAllocMixin",
    "ParamGroup",
    "ReduceScatter",
    "WorkThatFinishes",
    "functional_collectives",
    "is_default",
    "param_groups",
    "reduction",
    "rows_by_rank",
    "why_no_groups",
    "world_size_of",
]

# In which FSDP2 starts all collectives of a parameter group: its first argument.
SENDING_METHODS = ((FSDPParamGroup, "unshard"), (FSDPParamGroup, "post_backward"))

_WRAPPER_NAMES = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class ShardedParam:
    """One parameter of a group: its name in the model, and the dtype in which it is gathered."""

    name: str
    dtype: torch.dtype


@dataclass(eq=False)
class ParamGroup:
    """One FSDP2 parameter group: the parameters that are gathered by one all-gather.

    Attributes:
        name: of the module it belongs to.
        params: in the order in which they lie in the gathered buffer.
    """

    name: str
    params: tuple[ShardedParam, ...]
    _group: FSDPParamGroup

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks over which the parameters are sharded."""
        return self._group.mesh_info.shard_process_group

    @property
    def device(self) -> torch.device:
        return self._group.device

    @property
    def root(self) -> object:
        """The same for all parameter groups of a model, from its first forward on."""
        return self._group.comm_ctx

    @property
    def all_gather(self) -> AllGather:
        return self._group._all_gather_comm

    @all_gather.setter
    def all_gather(self, comm: AllGather) -> None:
        self._group._all_gather_comm = comm

    @property
    def reduce_scatter(self) -> ReduceScatter:
        return self._group._reduce_scatter_comm

    @reduce_scatter.setter
    def reduce_scatter(self, comm: ReduceScatter) -> None:
        self._group._reduce_scatter_comm = comm

    @property
    def numels(self) -> list[int]:
        """Elements of each parameter's padded shard, in the order of ``params``."""
        return [param.padded_sharded_param_size.numel() for param in self._group.fsdp_params]

    @property
    def shard_bytes(self) -> int:
        """Of the padded shards of all parameters, as they are gathered."""
        sizes = zip(self.numels, self.params, strict=True)
        return sum(numel * param.dtype.itemsize for numel, param in sizes)

    @torch.no_grad()
    def piece(self, index: int, start: int, stop: int) -> Tensor:
        """Values ``start`` to ``stop`` of the padded shard of parameter ``index``, as they will be
        gathered: a fresh copy."""
        data = self._group.fsdp_params[index]._sharded_param_data[start:stop]
        return data.to(device=self.device, dtype=self.params[index].dtype, copy=True)

    @torch.no_grad()
    def shard(self) -> Tensor:
        """This rank's padded shards as they will be gathered: cast, flat, uint8, a fresh copy."""
        pieces = [
            param._sharded_param_data.to(self.device).to(info.dtype).view(torch.uint8)
            for param, info in zip(self._group.fsdp_params, self.params, strict=True)
        ]
        return torch.cat(pieces)


def is_default(comm: AllGather | ReduceScatter) -> bool:
    """Whether a collective is the one that FSDP2 gives every group."""
    return type(comm) in (DefaultAllGather, DefaultReduceScatter)


def param_groups(*models: nn.Module) -> list[ParamGroup]:
    """Every FSDP2 parameter group of the models that is sharded over more than one rank, once.

    Raises:
        ValueError: a parameter brings an all-gather extension of its own.
    """
    groups: dict[int, ParamGroup] = {}
    for model in models:
        names = {id(module): _plain_name(name) for name, module in model.named_modules()}
        for module in model.modules():
            if not isinstance(module, FSDPModule):
                continue
            for group in module._get_fsdp_state()._fsdp_param_groups:
                sharded = isinstance(group.mesh_info, FSDPMeshInfo)
                if id(group) in groups or not sharded or group.mesh_info.shard_mesh_size == 1:
                    continue
                params = tuple(_describe(param, group, names) for param in group.fsdp_params)
                groups[id(group)] = ParamGroup(names[id(module)] or "(root)", params, group)
    return list(groups.values())


def why_no_groups(*models: nn.Module) -> str:
    """What is so of models of which ``param_groups`` finds none, and what to do."""
    modules = [module for model in models for module in model.modules()]
    groups = [
        group
        for module in modules
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    if any(not isinstance(group.mesh_info, FSDPMeshInfo) for group in groups):
        return (
            "the model's parameters are replicated on every rank, and not sharded: nothing is "
            "gathered that could be narrowed. Call torch.distributed.fsdp.fully_shard in the place "
            "of replicate"
        )
    if groups:
        return (
            "fully_shard was given a mesh of 1 rank for every parameter of the model: nothing is "
            "gathered that could be narrowed. Shard over 2 ranks or more (in torchtitan: "
            "parallelism.data_parallel_shard_degree is 1 here, or -1 with as many ranks as the "
            "other degrees take)"
        )
    if any(isinstance(module, FSDPModule) for module in modules):
        return (
            "fully_shard was applied to modules without parameters of their own: apply it to those "
            "that have some"
        )
    if any(type(module).__name__.startswith("SimpleFSDP") for module in modules):
        return (
            "the model is sharded by torchtitan's SimpleFSDP (graph_trainer), whose gathers are "
            "part of a compiled graph: narrowcast narrows those of FSDP2 alone. Train it with "
            "torchtitan's own trainer, or switch narrowcast off"
        )
    return (
        "the model was not sharded by FSDP2: call torch.distributed.fsdp.fully_shard on it first"
        + (
            " (its parameters are DTensors, sharded by other means, such as tensor parallelism)"
            if any(isinstance(p, DTensor) for model in models for p in model.parameters())
            else ""
        )
    )


def _describe(param: FSDPParam, group: FSDPParamGroup, names: dict[int, str]) -> ShardedParam:
    module = names[id(param._module_info.module)]
    name = f"{module}.{param._module_info.param_name}" if module else param._module_info.param_name
    if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
        raise ValueError(
            f"parameter {name} is a {type(param._sharded_local_tensor).__name__}, which brings an "
            "all-gather extension (fsdp_pre_all_gather) of its own. Turn off that extension, for "
            "instance the float8 all-gather, or do not narrow this model"
        )
    dtype = param.sharded_param.dtype
    if dtype.is_floating_point and group.mp_policy.param_dtype is not None:
        dtype = group.mp_policy.param_dtype
    return ShardedParam(name, dtype)


def _plain_name(name: str) -> str:
    for wrapper in _WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name


def reduction(
    op: dist.ReduceOp | dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> tuple[float, int]:
    """What each contribution is multiplied by, and their sum divided by, as the group's own
    backend would for this operation.

    Raises:
        ValueError: it is none that FSDP2 asks for.
    """
    if op == dist.ReduceOp.SUM:
        return 1, 1
    if op == dist.ReduceOp.AVG:
        # NCCL multiplies floats before it sums (ncclAvg is a PreMulSum); gloo divides the sum.
        is_nccl = dist.get_backend(group) == dist.Backend.NCCL
        return (1 / group.size(), 1) if is_nccl else (1, group.size())
    if op == dist.ReduceOp.PREMUL_SUM:
        return op.factor, 1  # not documented
    raise ValueError(f"reduce operation {op}; allowed: SUM, AVG, PREMUL_SUM")


def rows_by_rank(tensor: DTensor) -> dict[int, range]:
    """Which rows (dimension 0) lie on which global ranks, this one among them.

    Only ranks that hold the same part of the other dimensions, and are of the same replica. Each
    holds consecutive rows, be it by expert parallelism, by FSDP, or by one within the other.
    `DTensor` tells a rank its own part alone.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    mine = mesh.get_coordinate()
    assert mine is not None, "this rank holds no part of the tensor"
    split = [
        dim for dim, placement in enumerate(placements) if getattr(placement, "dim", None) == 0
    ]
    rows = {}
    for coordinate in itertools.product(*(range(mesh.size(dim)) for dim in split)):
        there = list(mine)
        for dim, index in zip(split, coordinate, strict=True):
            there[dim] = index
        shape, offset = _compute_local_shape_and_global_offset(
            tensor.shape, mesh.shape, there, placements
        )
        rows[int(mesh.mesh[tuple(there)])] = range(offset[0], offset[0] + shape[0])
    held = sorted((r for r in rows.values() if len(r)), key=lambda r: r.start)
    covered = [row for part in held for row in part]
    assert covered == list(range(tensor.shape[0])), f"rows of {placements} are not consecutive"
    return rows


class WorkThatFinishes(dist._Work):
    """A pending collective whose ``wait`` also runs ``finish``, once. FSDP2 waits in copy-out."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True


def start_all_to_all(
    rows: Tensor,
    received: list[int],
    sent: list[int],
    group: dist.ProcessGroup,
    on_sent: Callable[[], None],
) -> Tensor:
    """Starts an all-to-all of rows: `sent[r]` consecutive ones go to rank r of the group.

    The operator under `torch.distributed._functional_collectives`, whose wrapper waits at the first
    use of what it returns, a use that autograd's functions do not see. torchtitan's selective
    activation checkpointing knows it by name, and gives what it has kept in the place of another.

    Args:
        on_sent: is called if something was sent.

    Returns:
        What arrives, not to be read before `finish_all_to_all`.
    """
    pending = pending_collectives()
    arriving = torch.ops._c10d_functional.all_to_all_single(
        rows.contiguous(), received, sent, group.group_name
    )
    if pending_collectives() > pending:
        on_sent()
    return arriving


def pending_collectives() -> int:
    """How many functional collectives were started and not waited for."""
    return _get_work_registry_size()


def finish_all_to_all(pending: Tensor) -> Tensor:
    """Waits for what `start_all_to_all` started."""
    return torch.ops._c10d_functional.wait_tensor(pending)


def world_size_of(group: Any) -> int:
    """Ranks of what a collective takes as its group."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return dist.get_world_size(group)
    name = functional_collectives._resolve_group_name(group)
    return _resolve_process_group(name).size()


def parameter_group(sender: FSDPParamGroup) -> ParamGroup:
    """Of FSDP2's own object: who it is, without what it holds."""
    return ParamGroup("", (), sender)
