"""All that narrowcast touches of torch beyond its public API, in one place (seen in torch 2.13.0).

FSDP2 has a public setter for a custom all-gather, ``FSDPModule.set_custom_all_gather``, but it
refuses modules of several parameter groups (as torchtitan makes them with expert parallelism), does
not recurse, and offers no way back or to know which parameter lies where in the gathered buffer.
Hence ``_get_fsdp_state()``, ``FSDPParamGroup`` and ``FSDPParam``.

Collectives that nobody else counts are counted by replacing functions of ``torch.distributed`` for
as long as a ledger runs (``collectives``): there is no public hook that sees them.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
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
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
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
    "close_connections",
    "default_store",
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
    """One parameter of a group as it is gathered.

    Attributes:
        name: in the model.
        numel: elements of the padded shard.
        dtype: that of mixed precision where there is one.
    """

    name: str
    numel: int
    dtype: torch.dtype


@dataclass(eq=False)
class ParamGroup:
    """One FSDP2 parameter group: the parameters that are gathered by one all-gather.

    FSDP2 lets a model be cast, moved and materialised after it was sharded, until it is first used.
    So all but the names is read when it is asked for.

    Attributes:
        name: of the module it belongs to.
        names: of the parameters, in the order in which they lie in the gathered buffer.
    """

    name: str
    names: tuple[str, ...]
    _group: FSDPParamGroup

    def is_same_as(self, other: "ParamGroup") -> bool:
        """Whether both are of one group of FSDP2's."""
        return self._group is other._group

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks over which the parameters are sharded."""
        return self._group.mesh_info.shard_process_group

    @property
    def device(self) -> torch.device:
        return self._group.device

    @property
    def in_backward(self) -> bool:
        """Whether parameters are gathered for a backward."""
        return self._group._training_state == TrainingState.PRE_BACKWARD

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
        comm = self._group._reduce_scatter_comm
        return comm.inner if isinstance(comm, ObservedReduceScatter) else comm

    @reduce_scatter.setter
    def reduce_scatter(self, comm: ReduceScatter) -> None:
        current = self._group._reduce_scatter_comm
        if isinstance(current, ObservedReduceScatter):
            current.inner = comm
        else:
            self._group._reduce_scatter_comm = comm

    def observe_reductions(self, observer: "ReductionObserver") -> Callable[[], None]:
        """Calls ``observer`` before each reduction of the group's gradients, whichever
        reduce-scatter the group has by then.

        Returns:
            Ends the observation. After the last one FSDP2 calls the group's reduce-scatter itself.
        """
        group = self._group
        if not isinstance(group._reduce_scatter_comm, ObservedReduceScatter):
            group._reduce_scatter_comm = ObservedReduceScatter(group._reduce_scatter_comm)
        observed = group._reduce_scatter_comm
        observed.observers.append(observer)

        def end() -> None:
            if observer in observed.observers:
                observed.observers.remove(observer)
            if not observed.observers and group._reduce_scatter_comm is observed:
                group._reduce_scatter_comm = observed.inner

        return end

    def guard_reduction(self, guard: Callable[[], AbstractContextManager[None]]) -> bool:
        """Runs all that FSDP2 does with the group's gradients within ``guard()``, its all-reduce
        over replicas too, until ``unguard_reduction``; ``False`` if it does so already."""
        group = self._group
        if "post_backward" in vars(group):
            return False

        def post_backward(*args: Any) -> None:
            with guard():
                type(group).post_backward(group, *args)

        group.post_backward = post_backward
        return True

    def unguard_reduction(self) -> None:
        del self._group.post_backward

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [param.sharded_param for param in self._group.fsdp_params]

    @property
    def params(self) -> tuple[ShardedParam, ...]:
        """The parameters in the order in which they lie in the gathered buffer."""
        return tuple(
            ShardedParam(name, param.padded_sharded_param_size.numel(), _gathered_dtype(param))
            for name, param in zip(self.names, self._group.fsdp_params, strict=True)
        )

    @property
    def resharded_params(self) -> tuple[ShardedParam, ...]:
        """The same after a forward, over the smaller groups of an int ``reshard_after_forward``."""
        return tuple(
            replace(info, numel=param._sharded_post_forward_param_data.numel())
            for info, param in zip(self.params, self._group.fsdp_params, strict=True)
        )

    @property
    def numels(self) -> list[int]:
        """Elements of each parameter's padded shard, in the order of ``params``."""
        return [param.numel for param in self.params]

    @property
    def shard_bytes(self) -> int:
        """Of the padded shards of all parameters, as they are gathered."""
        return sum(param.numel * param.dtype.itemsize for param in self.params)

    @torch.no_grad()
    def piece(self, index: int, start: int, stop: int) -> Tensor:
        """Values ``start`` to ``stop`` of the padded shard of parameter ``index``, as they will be
        gathered: a fresh copy."""
        param = self._group.fsdp_params[index]
        data = param._sharded_param_data[start:stop]
        return data.to(device=self.device, dtype=_gathered_dtype(param), copy=True)

    @torch.no_grad()
    def shard(self) -> Tensor:
        """This rank's padded shards as they will be gathered: cast, flat, uint8, a fresh copy."""
        pieces = [
            param._sharded_param_data.to(self.device).to(_gathered_dtype(param)).view(torch.uint8)
            for param in self._group.fsdp_params
        ]
        return torch.cat(pieces)


ReductionObserver = Callable[[Tensor], None]
"""Is given this rank's contributions to the gradients of a group, (W, n), and only reads them."""


class ObservedReduceScatter(ReduceScatter):
    """A parameter group's reduce-scatter with observers of its contributions.

    Attributes:
        inner: the reduce-scatter itself, which ``ParamGroup.reduce_scatter`` reads and replaces.
        observers: are called in turn before each reduction.
    """

    def __init__(self, inner: ReduceScatter) -> None:
        self.inner = inner
        self.observers: list[ReductionObserver] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        for observer in self.observers:
            observer(input_tensor.view(group.size(), -1))
        return self.inner(output_tensor, input_tensor, group, op, async_op)


def _gathered_dtype(param: FSDPParam) -> torch.dtype:
    """As FSDP2 will set it before the first use, from what the parameter is by then."""
    dtype, wanted = param.sharded_param.dtype, param.mp_policy.param_dtype
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def default_store() -> dist.Store:
    """The store by which the ranks of this job have found each other."""
    return dist.distributed_c10d._get_default_store()


def close_connections() -> None:
    """Closes this rank's gloo connections to all others, so that whoever waits for it, in whatever
    collective of whatever process group, gets an error at once. No group works afterwards.

    gloo has no call for that (torch 2.13: ``abort()`` and ``shutdown()`` release nobody); but a
    receive that times out closes all connections of its group. One from a rank whose connection is
    closed already fails at once.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.size() == 1 or dist.Backend.GLOO not in dist.get_backend_config(group):
            continue
        backend = group._get_backend(torch.device("cpu"))
        nothing = [torch.empty(1, dtype=torch.uint8, device="cpu")]
        for distance in range(1, group.size()):
            with suppress(RuntimeError):
                peer = (group.rank() + distance) % group.size()
                backend.recv(nothing, peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


_UNUSED_TAG = 0x6E617263  # nobody sends with it


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
                held = tuple(_name_of(param, names) for param in group.fsdp_params)
                groups[id(group)] = ParamGroup(names[id(module)] or "(root)", held, group)
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


def _name_of(param: FSDPParam, names: dict[int, str]) -> str:
    module = names[id(param._module_info.module)]
    name = f"{module}.{param._module_info.param_name}" if module else param._module_info.param_name
    if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
        raise ValueError(
            f"parameter {name} is a {type(param._sharded_local_tensor).__name__}, which brings an "
            "all-gather extension (fsdp_pre_all_gather) of its own. Turn off that extension, for "
            "instance the float8 all-gather, or do not narrow this model"
        )
    return name


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
