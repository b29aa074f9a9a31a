"""Every private name of torch that narrowcast uses, with the reason.

All were seen in torch 2.13.0, 2.14.0 and 2.15.0.

``_get_fsdp_state``, ``FSDPParamGroup``, ``FSDPParam``: FSDP2 has public setters for custom
collectives (``FSDPModule.set_custom_all_gather``, ``set_custom_reduce_scatter``), but they refuse
modules of several parameter groups, which torchtitan makes for expert parallelism; they do not
recurse, cannot be undone, and do not report which parameter lies where in the gathered buffer.

``_functional_collectives``: ``torch.distributed`` has no hook that sees every collective. To count
them, functions are replaced while a ledger runs (``telemetry.collectives``), DTensor's among them.

``distributed_c10d``: the store and the process groups of the job have no public getters, and
several collectives start as one only by ``_coalescing_manager``.

``local_shape_and_offset``: ``DTensor`` has no public method that reports other ranks' parts.

What a parameter group gathers and what it reduces are laid out differently. The gathered buffer
holds all parameters in the order of ``fsdp_params``, as bytes where their dtypes differ, which
``MixedPrecisionPolicy.param_dtype_override_fn`` (2.15) makes common. The reduced buffer leaves out
parameters without gradients and is sorted by the dtype of the gradients (2.15), which follows
``grad_dtype`` where the policy has no ``reduce_dtype`` (2.15; the gathered dtype before). Hence no
code looks for a parameter in a reduced buffer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
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
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset as local_shape_and_offset,
)

__all__ = [
    "SENDING_METHODS",
    "AllGather",
    "DefaultAllocMixin",
    "ParamGroup",
    "ReduceScatter",
    "WorkThatFinishes",
    "close_connections",
    "coalesced",
    "default_store",
    "functional_collectives",
    "functional_operators",
    "is_default",
    "local_shape_and_offset",
    "param_groups",
    "process_group_of",
    "set_timeout",
    "shard_world_sizes",
    "world_size_of",
]

functional_operators = torch.ops._c10d_functional

# The public ``torch.distributed.set_timeout`` came with torch 2.14.
set_timeout: Callable[..., None] = (
    dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout
)

# The methods of a parameter group, their first argument, in which FSDP2 starts its collectives.
SENDING_METHODS = ((FSDPParamGroup, "unshard"), (FSDPParamGroup, "post_backward"))

_WRAPPER_NAMES = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class ShardedParam:
    """One parameter of a group as it is gathered.

    Attributes:
        name: The parameter's name in the model.
        numel: Number of elements of the padded shard.
        dtype: The dtype in which it is gathered, after mixed precision.
    """

    name: str
    numel: int
    dtype: torch.dtype


@dataclass(eq=False)
class ParamGroup:
    """One FSDP2 parameter group: the parameters that are gathered by one all-gather.

    FSDP2 lets a model be cast, moved and materialised after it was sharded, until its first use.
    Hence everything but the names is read from FSDP2's object each time.

    Attributes:
        name: The name of the module that the group belongs to.
        names: The names of the parameters, in the order in which the gathered buffer holds them.
    """

    name: str
    names: tuple[str, ...]
    _group: FSDPParamGroup

    def is_same_as(self, other: "ParamGroup") -> bool:
        """Whether both stand for the same group of FSDP2."""
        return self._group is other._group

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks over which the parameters are sharded."""
        return self._group.mesh_info.shard_process_group

    @property
    def replicas(self) -> int:
        """How many times the parameters are there, each time sharded over a process group."""
        mesh_info = self._group.mesh_info
        return mesh_info.replicate_mesh_size if isinstance(mesh_info, HSDPMeshInfo) else 1

    @property
    def process_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """``process_group``, and the smaller one over which the parameters are gathered again with
        ``reshard_after_forward`` an integer."""
        after = self._group.post_forward_mesh_info
        smaller = after.shard_process_group if isinstance(after, FSDPMeshInfo) else None
        if smaller is None or smaller.group_name == self.process_group.group_name:
            return (self.process_group,)
        return self.process_group, smaller

    @property
    def device(self) -> torch.device:
        """The device on which the parameters are gathered."""
        return self._group.device

    @property
    def in_backward(self) -> bool:
        """Whether the parameters are being gathered for backward."""
        return self._group._training_state == TrainingState.PRE_BACKWARD

    @property
    def root(self) -> object:
        """An object that all parameter groups of a model share from its first forward on."""
        return self._group.comm_ctx

    @property
    def all_gather(self) -> AllGather:
        """The object by which FSDP2 gathers the group's parameters, without its watch."""
        comm = self._group._all_gather_comm
        return comm.inner if isinstance(comm, WatchedAllGather) else comm

    @all_gather.setter
    def all_gather(self, comm: AllGather) -> None:
        current = self._group._all_gather_comm
        if isinstance(current, WatchedAllGather):
            current.inner = comm
        else:
            self._group._all_gather_comm = comm

    def watch_gathers(self, wait: Callable[[dist.Work], object]) -> Callable[[], None]:
        """Lets ``wait`` wait for the gathers that FSDP2's own all-gather makes of the group.

        Returns:
            Ends that, and gives the group the all-gather back that it has by then.
        """
        group = self._group
        assert not isinstance(group._all_gather_comm, WatchedAllGather)
        watched = group._all_gather_comm = WatchedAllGather(group._all_gather_comm, wait)

        def end() -> None:
            if group._all_gather_comm is watched:
                group._all_gather_comm = watched.inner

        return end

    @property
    def reduce_scatter(self) -> ReduceScatter:
        """The object by which FSDP2 reduces the group's gradients, without its observers."""
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
        """Runs FSDP2's reduction of the group's gradients within ``guard()`` until
        ``unguard_reduction``: the reduce-scatter and the all-reduce over replicas.

        Returns:
            Whether it was unguarded before; a guard that is there stays.
        """
        group = self._group
        if "post_backward" in vars(group):
            return False

        def post_backward(*args: Any) -> None:
            with guard():
                type(group).post_backward(group, *args)

        group.post_backward = post_backward
        return True

    def unguard_reduction(self) -> None:
        """Ends what ``guard_reduction`` began."""
        del self._group.post_backward

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters, in the order of ``names``."""
        return [param.sharded_param for param in self._group.fsdp_params]

    @property
    def params(self) -> tuple[ShardedParam, ...]:
        """The parameters in the order of ``names``."""
        return tuple(
            ShardedParam(name, param.padded_sharded_param_size.numel(), _gathered_dtype(param))
            for name, param in zip(self.names, self._group.fsdp_params, strict=True)
        )

    @property
    def resharded_params(self) -> tuple[ShardedParam, ...]:
        """The parameters as they are gathered again over the smaller process group that an integer
        ``reshard_after_forward`` makes; valid between forward and backward."""
        return tuple(
            replace(info, numel=param._sharded_post_forward_param_data.numel())
            for info, param in zip(self.params, self._group.fsdp_params, strict=True)
        )

    @property
    def numels(self) -> list[int]:
        """Number of elements of each parameter's padded shard, in the order of ``names``."""
        return [param.numel for param in self.params]

    @property
    def shard_bytes(self) -> int:
        """Bytes of the padded shards of all parameters, as they are gathered."""
        return sum(param.numel * param.dtype.itemsize for param in self.params)

    def num_values(self, shard: Tensor) -> int:
        """Number of elements of the parameters in a flat shard, whole or resharded, as typed values
        or as bytes, as which FSDP2 gathers shards of several dtypes."""
        return sum(self.numels) * shard.nbytes // max(self.shard_bytes, 1)

    @torch.no_grad()
    def piece(self, index: int, start: int, stop: int) -> Tensor:
        """A copy of the values ``start`` to ``stop`` of the padded shard of parameter ``index``, on
        the device and in the dtype in which they are gathered."""
        param = self._group.fsdp_params[index]
        data = param._sharded_param_data[start:stop]
        return data.to(device=self.device, dtype=_gathered_dtype(param), copy=True)

    @torch.no_grad()
    def shard(self) -> Tensor:
        """A copy of this rank's padded shards as they are gathered: cast, flat, as uint8."""
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


class WatchedAllGather(AllGather):
    """A parameter group's all-gather, and what waits for it where that is FSDP2's own, counted or
    not. Any other all-gather waits by itself.

    Attributes:
        inner: The all-gather itself, which ``ParamGroup.all_gather`` reads and replaces.
    """

    def __init__(self, inner: AllGather, wait: Callable[[dist.Work], object]) -> None:
        self.inner = inner
        self._wait = wait

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        innermost = getattr(self.inner, "inner", self.inner)
        if not is_default(innermost):
            return self.inner(output_tensor, input_tensor, group, async_op)
        work = self.inner(output_tensor, input_tensor, group, async_op=True)
        if async_op:
            return WorkThatFinishes(lambda: self._wait(work))
        self._wait(work)
        return None


def _gathered_dtype(param: FSDPParam) -> torch.dtype:
    """The dtype that FSDP2 sets before the first use, which may follow a cast of the model. The
    policy is the group's up to torch 2.14, and the parameter's own since 2.15."""
    dtype, wanted = param.sharded_param.dtype, param.mp_policy.param_dtype
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def default_store() -> dist.Store:
    """The store through which the ranks of this job found each other."""
    return dist.distributed_c10d._get_default_store()


def close_connections() -> None:
    """Closes this rank's gloo connections to all other ranks, so that any rank that waits for it in
    any collective of any process group fails at once. No process group works afterwards.

    gloo has no call for that: ``abort()`` and ``shutdown()`` release nobody. But a receive that
    times out closes all connections of its process group, and one from a rank whose connection is
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


def coalesced(group: dist.ProcessGroup, device: torch.device) -> AbstractContextManager[object]:
    """Starts the collectives within it together, where the backend can: NCCL alone. On gloo they
    fail, and run one after the other instead."""
    if dist.get_backend(group) != dist.Backend.NCCL:
        return nullcontext()
    return dist.distributed_c10d._coalescing_manager(group, device=device)


def is_default(comm: AllGather | ReduceScatter) -> bool:
    """Whether a collective is the one that FSDP2 gives every parameter group."""
    return type(comm) in (DefaultAllGather, DefaultReduceScatter)


def param_groups(*models: nn.Module) -> list[ParamGroup]:
    """Every FSDP2 parameter group of the models that is sharded over more than one rank, once.

    Raises:
        ValueError: A parameter has an all-gather extension of its own.
    """
    groups: dict[int, ParamGroup] = {}
    for model in models:
        names = {id(module): _unwrapped_name(name) for name, module in model.named_modules()}
        for module, group in _groups_of(model):
            if id(group) not in groups and _shard_world_size(group) not in (None, 1):
                params = tuple(_name_of(param, names) for param in group.fsdp_params)
                groups[id(group)] = ParamGroup(names[id(module)] or "(root)", params, group)
    return list(groups.values())


def shard_world_sizes(*models: nn.Module) -> list[int | None]:
    """Over how many ranks each FSDP2 parameter group of the models is sharded; ``None`` where its
    parameters are replicated instead."""
    return [_shard_world_size(group) for model in models for _, group in _groups_of(model)]


def _groups_of(model: nn.Module) -> Iterator[tuple[FSDPModule, FSDPParamGroup]]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield module, group


def _shard_world_size(group: FSDPParamGroup) -> int | None:
    mesh_info = group.mesh_info
    return mesh_info.shard_mesh_size if isinstance(mesh_info, FSDPMeshInfo) else None


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


def _unwrapped_name(name: str) -> str:
    for wrapper in _WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name


class WorkThatFinishes(dist._Work):
    """A pending collective whose first ``wait`` runs ``finish``. FSDP2 waits before it copies the
    gathered parameters out."""

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
    """Starts an all-to-all of rows: ``sent[r]`` consecutive ones go to rank r of the group.

    It calls the operator below ``torch.distributed._functional_collectives``, whose wrapper waits
    at the first use of its result, and autograd's functions do not see such a use. torchtitan's
    selective activation checkpointing knows the operator by name, and may return a saved result
    instead of sending anything.

    Args:
        rows: The rows to send, ordered by receiver.
        received: Number of rows from each rank of the group.
        sent: Number of rows to each rank of the group.
        group: The ranks that take part.
        on_sent: Is called if rows were sent.

    Returns:
        The received rows, which must not be read before ``finish_all_to_all``.
    """
    pending = pending_collectives()
    arriving = functional_operators.all_to_all_single(
        rows.contiguous(), received, sent, group.group_name
    )
    if pending_collectives() > pending:
        on_sent()
    return arriving


def pending_collectives() -> int:
    """Number of functional collectives that were started and not waited for."""
    return _get_work_registry_size()


def finish_all_to_all(pending: Tensor) -> Tensor:
    """Waits for an all-to-all that ``start_all_to_all`` started, and returns the received rows."""
    return functional_operators.wait_tensor(pending)


def process_group_of(group: Any) -> dist.ProcessGroup:
    """The process group that a functional collective is given, by name, ranks, mesh or itself."""
    if isinstance(group, dist.ProcessGroup):
        return group
    return _resolve_process_group(functional_collectives._resolve_group_name(group))


def world_size_of(group: Any) -> int:
    """Number of ranks of what a collective is given as its group, where ``None`` is all ranks."""
    return dist.get_world_size(group if group is None else process_group_of(group))


def parameter_group(sender: FSDPParamGroup) -> ParamGroup:
    """The parameter group for FSDP2's own object, without names."""
    return ParamGroup("", (), sender)
