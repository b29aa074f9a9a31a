"""Moves experts between ranks, in place: weights, gradients and optimizer state.

    slot:             0  1 | 2  3        EP rank 0 holds slots 0 and 1, rank 1 slots 2 and 3
    contiguous:       0  1 | 2  3
    a placement:      0  3 | 2  1        experts 1 and 3 swapped ranks: two rows are sent

The rows of a tensor are experts (dimension 0). Each rank computes on its own, from the layout of
the DTensor, which rows it sends to which rank and which it receives. Nothing is gathered: rows are
sent from rank to rank, one tensor at a time. FSDP may shard the experts too, along dimension 0 or
along another one.

The state of the router does not change: its weight, the expert bias and the token counters are on
every rank in the order of the model, and so are the experts that it selects. They are renumbered
only where tokens are sent, by ``ExpertLayer.slots_E``.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from narrowcast.fsdp2 import local_shape_and_offset


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one MoE layer, and the maps that renumber them.

    Attributes:
        name: name of the MoE module.
        parameters: every parameter of its experts, (E, ...) each, by name.
        slots_E: (E,) int64, the slot of each expert, on the device of the parameters. It is updated
            in place.
        experts_E: (E,) int64, the expert in each slot. It is updated in place.
    """

    name: str
    parameters: dict[str, nn.Parameter]
    slots_E: Tensor
    experts_E: Tensor

    @classmethod
    def of(cls, name: str, parameters: dict[str, nn.Parameter]) -> "ExpertLayer":
        """Return a layer whose experts are in their own order."""
        first = next(iter(parameters.values()))
        contiguous_E = torch.arange(first.shape[0], device=first.device)
        return cls(name, parameters, contiguous_E, contiguous_E.clone())


class PlacedExperts:
    """The experts of a model, which can be moved between ranks.

    Attributes:
        layers: MoE layers in the order of the model.
        on_sent: is called after a move with the bytes that this rank sent.
    """

    def __init__(
        self, layers: Sequence[ExpertLayer], optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> None:
        self.layers = tuple(layers)
        self.on_sent: Callable[[int], None] = lambda sent_bytes: None
        self._optimizers = tuple(optimizers)

    def move_to(self, experts_LE: Tensor | Sequence[Tensor]) -> int:
        """Move every expert to its slot. Every rank must call it with the same argument.

        Args:
            experts_LE: (L, E) the expert in each slot, as in ``Placement.experts_LE``.

        Returns:
            Bytes that this rank sent.

        Raises:
            ValueError: an optimizer has state of experts that cannot be moved.
        """
        moves = [
            (tensor, source_E)
            for layer, experts_E in zip(self.layers, experts_LE, strict=True)
            if (source_E := self._sources(layer, experts_E)) is not None
            for tensor in self._tensors(layer)
        ]
        sent = sum(move_rows(tensor, source_E) for tensor, source_E in moves)
        for layer, experts_E in zip(self.layers, experts_LE, strict=True):
            layer.experts_E.copy_(experts_E)
            layer.slots_E.copy_(experts_E.argsort())
        self.on_sent(sent)
        return sent

    def check(self) -> None:
        """Raise the ``ValueError`` of ``move_to`` now, if it would raise one."""
        for layer in self.layers:
            list(self._tensors(layer))

    @contextlib.contextmanager
    def in_model_order(self) -> Iterator[None]:
        """Within this context every expert is in the slot of its own index.

        Code that reads or writes parameters and optimizer state by name needs it: checkpoints,
        exports.
        """
        experts_by_layer = [layer.experts_E.to("cpu", copy=True) for layer in self.layers]
        self.move_to([torch.arange(len(experts_E)) for experts_E in experts_by_layer])
        try:
            yield
        finally:
            self.move_to(experts_by_layer)

    @staticmethod
    def _sources(layer: ExpertLayer, experts_E: Tensor) -> Tensor | None:
        """Return (E,) the slot from which each slot gets its expert; None if nothing changes."""
        experts_E = experts_E.cpu()
        source_E = layer.slots_E.cpu()[experts_E]
        return None if torch.equal(source_E, torch.arange(len(source_E))) else source_E

    def _tensors(self, layer: ExpertLayer) -> Iterator[Tensor]:
        """Yield the parameters of the experts, their gradients and their optimizer state."""
        for name, parameter in layer.parameters.items():
            yield parameter.detach()
            if parameter.grad is not None:
                yield parameter.grad
            for optimizer in self._optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if torch.is_tensor(value) and value.ndim:
                        yield _movable(f"{layer.name}.{name}", parameter, key, value)


def _movable(name: str, parameter: nn.Parameter, key: str, state: Tensor) -> Tensor:
    """Return optimizer state whose rows are experts, as a DTensor if the parameter is one."""
    if isinstance(state, DTensor) == isinstance(parameter, DTensor):
        if state.shape[0] == parameter.shape[0]:
            return state
    elif isinstance(parameter, DTensor) and state.shape == parameter.to_local().shape:
        return DTensor.from_local(
            state,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            # Explicit, because shards may differ in size.
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    raise ValueError(
        f"the optimizer keeps '{key}' of shape {tuple(state.shape)} for {name} of shape "
        f"{tuple(parameter.shape)}: it is not divided by expert, so that experts cannot be "
        "moved. Use an optimizer that keeps its state by element or by expert, such as AdamW"
    )


@torch.no_grad()
def move_rows(tensor: Tensor, source_E: Tensor) -> int:
    """Permute the rows of a tensor across the ranks that hold them: row s becomes row
    ``source_E[s]``.

    Every rank that holds a part of the tensor must call it with the same permutation.

    Args:
        tensor: (E, ...), changed in place. A DTensor may be sharded in any way.
        source_E: (E,) int64, a permutation, on the CPU.

    Returns:
        Bytes that this rank sent.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    rows = _rows_by_rank(tensor) if isinstance(tensor, DTensor) else {}
    if len(rows) < 2:
        local.copy_(local[source_E.to(local.device)])
        return 0
    me = dist.get_rank()
    sources = {rank: source_E[held.start : held.stop] for rank, held in rows.items()}

    def wanted(by: int, from_: int) -> Tensor:
        """Return the local rows of rank ``from_`` that rank ``by`` needs, in order of its slots."""
        held, needed = rows[from_], sources[by]
        return needed[(needed >= held.start) & (needed < held.stop)] - held.start

    outgoing = {peer: local[wanted(peer, me).to(local.device)] for peer in rows}
    incoming = {
        peer: local.new_empty((len(wanted(me, peer)), *local.shape[1:]))
        for peer in rows
        if peer != me
    }
    operations = [
        dist.P2POp(operation, _bytes(buffers[peer]), peer)
        # All ranks post in the same order of pairs, sends before receives.
        for operation, buffers in ((dist.isend, outgoing), (dist.irecv, incoming))
        for peer in rows
        if peer != me and buffers[peer].numel()
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for peer, held in rows.items():
        is_from_peer_M = (sources[me] >= held.start) & (sources[me] < held.stop)
        local[is_from_peer_M.to(local.device)] = outgoing[me] if peer == me else incoming[peer]
    return sum(_bytes(sent).numel() for peer, sent in outgoing.items() if peer != me)


def _rows_by_rank(tensor: DTensor) -> dict[int, range]:
    """Return the rows (dimension 0) of a tensor that each global rank holds, this rank included.

    Only ranks that hold the same part of the other dimensions and belong to the same replica are
    listed. Each holds consecutive rows, whether expert parallelism, FSDP or both shard them.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    local = mesh.get_coordinate()
    assert local is not None, "this rank holds no part of the tensor"
    split = [
        dim for dim, placement in enumerate(placements) if getattr(placement, "dim", None) == 0
    ]
    rows = {}
    for coordinate in itertools.product(*(range(mesh.size(dim)) for dim in split)):
        remote = list(local)
        for dim, index in zip(split, coordinate, strict=True):
            remote[dim] = index
        shape, offset = local_shape_and_offset(tensor.shape, mesh.shape, remote, placements)
        rows[int(mesh.mesh[tuple(remote)])] = range(offset[0], offset[0] + shape[0])
    parts = sorted((part for part in rows.values() if len(part)), key=lambda part: part.start)
    covered = [row for part in parts for row in part]
    assert covered == list(range(tensor.shape[0])), f"rows of {placements} are not consecutive"
    return rows


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(-1).view(torch.uint8)
