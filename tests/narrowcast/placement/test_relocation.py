"""Moving experts is indexing the whole tensors by slot, bitwise, and sends only what moves."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from narrowcast.placement.relocation import ExpertLayer, PlacedExperts, move_rows

COLUMNS = 4


def experts_now(placed: PlacedExperts) -> Tensor:
    """(L, E) the expert in each slot."""
    return torch.stack([layer.experts_E.clone() for layer in placed.layers])


@dataclass(frozen=True)
class Layout:
    """Experts over (replicas, FSDP, EP) ranks, and the dimension that FSDP shards."""

    mesh: tuple[int, int, int]
    num_experts: int
    fsdp_dim: int = 0


LAYOUTS = {
    "EP": Layout((1, 1, 4), 8),
    "FSDP of rows": Layout((1, 2, 2), 8),
    "FSDP of uneven rows": Layout((1, 2, 2), 6),
    "FSDP of columns": Layout((1, 2, 2), 4, fsdp_dim=1),
    "replicas": Layout((2, 1, 2), 4),
}
UNEVEN = LAYOUTS["FSDP of uneven rows"]


class Experts(nn.Module):
    """Any bit pattern in fp32 and bf16; and in int64 a number for each row and column."""

    def __init__(self, num_experts: int, seed: int) -> None:
        super().__init__()
        self.w_ECD = nn.Parameter(any_bits((num_experts, COLUMNS, 3), torch.float32, seed))
        self.b_EC = nn.Parameter(any_bits((num_experts, COLUMNS), torch.bfloat16, seed))
        numbers_EC = torch.arange(num_experts * COLUMNS).view(num_experts, COLUMNS)
        self.numbers_EC = nn.Parameter(numbers_EC, requires_grad=False)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    values = torch.randint(256, size, dtype=torch.uint8, generator=generator).view(dtype)
    # NaN with a payload, minus zero, the smallest subnormal.
    bits = [0x7FA5, 0x8000, 0x0001] if dtype.itemsize == 2 else [0x7FA12345, 0x80000000, 1]
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    special = torch.tensor(bits).to(integer).view(dtype)
    values.view(-1)[:3] = special
    values.view(-1)[-3:] = special
    return values


def sharded(layout: Layout, seed: int = 0) -> Experts:
    """Experts laid out as torchtitan's distributed/fsdp.py does it."""
    mesh = init_device_mesh("cpu", layout.mesh, mesh_dim_names=("replicate", "efsdp", "ep"))
    experts = Experts(layout.num_experts, seed)
    for name, parameter in list(experts.named_parameters()):
        local = distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)])
        setattr(experts, name, nn.Parameter(local, requires_grad=parameter.requires_grad))
    fsdp: DeviceMesh = mesh["replicate", "efsdp"] if layout.mesh[0] > 1 else mesh["efsdp"]
    placement = ShardPlacementResult(Shard(layout.fsdp_dim), _get_mesh_info(fsdp, None))
    fully_shard(experts, mesh=fsdp, shard_placement_fn=lambda _: placement)
    return experts


def trained(layout: Layout, num_layers: int = 2) -> tuple[PlacedExperts, torch.optim.Optimizer]:
    """Experts after a step of AdamW, with gradients of the next one."""
    modules = [sharded(layout, seed) for seed in range(num_layers)]
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    torch.manual_seed(dist.get_rank() % (4 // layout.mesh[0]))  # alike on replicas
    for step in range(2):
        if step:
            optimizer.step()
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.to_local().normal_()
    layers = [
        ExpertLayer.of(f"layers.{index}.moe", dict(module.named_parameters()))
        for index, module in enumerate(modules)
    ]
    return PlacedExperts(layers, [optimizer]), optimizer


def everything(placed: PlacedExperts, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """Of each layer, every whole tensor of experts: weights, gradients, optimizer state."""
    found: list[dict[str, Tensor]] = []
    for layer in placed.layers:
        tensors = {}
        for name, parameter in layer.parameters.items():
            tensors[name] = parameter.detach()
            if parameter.grad is not None:
                tensors[f"{name} grad"] = parameter.grad
            tensors |= {f"{name} {k}": v for k, v in optimizer.state.get(parameter, {}).items()}
        found.append({name: whole(tensor) for name, tensor in tensors.items()})
    return found


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are bitwise identical."""
    a, b = (t.reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def not_at(
    experts_LE: Tensor, before: list[dict[str, Tensor]], after: list[dict[str, Tensor]]
) -> list[str]:
    """Names of the tensors that are not those of ``before`` (in model order) in this placement."""
    return [
        f"layer {layer} {name}"
        for layer, experts_E in enumerate(experts_LE)
        for name, tensor in before[layer].items()
        if not same(after[layer][name], tensor[experts_E] if tensor.ndim else tensor)
    ]


def permutations(num_experts: int, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(count)])


def places_by_rank(numbers_EC: DTensor) -> list[list[int]]:
    """Each rank's places in the whole tensor: before any move, the numbers that it holds."""
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, numbers_EC.to_local().reshape(-1).tolist())
    return places


def values_that_leave(places: list[list[int]], source_E: Tensor, replicas: int) -> int:
    """How many of the values on this rank belong on others of its replica after a move."""
    per_replica, me = len(places) // replicas, dist.get_rank()
    others = [r for r in range(len(places)) if r != me and r // per_replica == me // per_replica]
    wanted = [
        int(source_E[place // COLUMNS]) * COLUMNS + place % COLUMNS
        for other in others
        for place in places[other]
    ]
    return sum(place in places[me] for place in wanted)


def on_the_wire(action: Callable[[], Any]) -> tuple[Any, int]:
    """What the action returns, and the bytes of the sends that it starts."""
    sent = []
    start = dist.batch_isend_irecv

    def counted(operations: list[dist.P2POp]) -> list[dist.Work]:
        sent.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return start(operations)

    with patch.object(dist, "batch_isend_irecv", counted):
        result = action()
    return result, sum(sent)


def _wrong_rows(layout: Layout) -> list[str]:
    wrong = []
    experts = sharded(layout)
    places = places_by_rank(experts.numbers_EC)
    unchanged_E = torch.arange(layout.num_experts)
    for name, expected in Experts(layout.num_experts, seed=0).named_parameters():
        tensor = experts.get_parameter(name).detach()
        size = expected[:1].nbytes // COLUMNS
        for source_E in [*permutations(layout.num_experts, 2), unchanged_E, unchanged_E.flip(0)]:
            expected = expected.detach()[source_E]
            leave = values_that_leave(places, source_E, layout.mesh[0]) * size
            returned, sent = on_the_wire(lambda: move_rows(tensor, source_E))  # noqa: B023
            if not same(whole(tensor), expected):
                wrong.append(f"{name}: {source_E.tolist()}")
            if not returned == sent == leave:
                wrong.append(f"{name}: {returned} returned, {sent} sent, {leave} leave")
    return wrong


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moved_rows_are_those_of_the_whole_tensor_and_only_they_are_sent(ranks, layout) -> None:
    assert ranks(4).run(_wrong_rows, LAYOUTS[layout]) == [[]] * 4


def _what_does_not_follow(layout: Layout) -> list[str]:
    placed, optimizer = trained(layout)
    before = everything(placed, optimizer)
    places = places_by_rank(placed.layers[0].parameters["numbers_EC"])
    reported: list[int] = []
    placed.on_sent = reported.append
    maps = [(layer.slots_E, layer.experts_E) for layer in placed.layers]
    wrong = []
    first_E, second_E, third_E = permutations(layout.num_experts, 3, seed=1)
    now_LE = torch.arange(layout.num_experts).repeat(2, 1)
    moves = [(now_LE[0], first_E), (second_E, third_E), (second_E, third_E)]
    for experts_LE in map(torch.stack, moves):
        returned, sent = on_the_wire(lambda: placed.move_to(experts_LE))  # noqa: B023
        wrong += not_at(experts_LE, before, everything(placed, optimizer))
        leave = 0
        for tensors, now_E, experts_E in zip(before, now_LE, experts_LE, strict=True):
            source_E = now_E.argsort()[experts_E]
            size = sum(tensor[:1].nbytes // COLUMNS for tensor in tensors.values() if tensor.ndim)
            leave += values_that_leave(places, source_E, layout.mesh[0]) * size
        if not returned == sent == reported[-1] == leave:
            wrong.append(
                f"{returned} returned, {sent} sent, {reported[-1]} reported, {leave} leave"
            )
        for (slots_E, held_E), experts_E in zip(maps, experts_LE, strict=True):
            if not (same(held_E, experts_E) and same(slots_E, experts_E.argsort())):
                wrong.append("the maps were not updated in place")
        now_LE = experts_now(placed)
    return wrong


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_that_belongs_to_an_expert_follows_it_and_nothing_else_is_sent(ranks, layout) -> None:
    assert ranks(4).run(_what_does_not_follow, LAYOUTS[layout]) == [[]] * 4


def test_every_tensor_of_an_expert_is_checked() -> None:
    placed, optimizer = in_one_process()
    moments = [
        f"{name} {of}"
        for name in ("w_ECD", "b_EC")
        for of in ("grad", "step", "exp_avg", "exp_avg_sq")
    ]
    assert set(everything(placed, optimizer)[0]) == {"w_ECD", "b_EC", "numbers_EC", *moments}


def in_one_process() -> tuple[PlacedExperts, torch.optim.Optimizer]:
    experts = Experts(6, seed=0)
    parameters = [experts.w_ECD, experts.b_EC]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = any_bits(parameter.shape, parameter.dtype, seed=1)
    optimizer.step()
    return PlacedExperts([ExpertLayer.of("moe", dict(experts.named_parameters()))], [optimizer]), (
        optimizer
    )


def test_experts_of_one_process_move_without_a_process_group() -> None:
    placed, optimizer = in_one_process()
    before = everything(placed, optimizer)
    for experts_LE in permutations(6, 2).unsqueeze(1):
        assert placed.move_to(experts_LE) == 0
        assert not_at(experts_LE, before, everything(placed, optimizer)) == []


def test_state_that_is_not_divided_by_expert_is_refused_in_one_process_too() -> None:
    placed, optimizer = in_one_process()
    parameter = placed.layers[0].parameters["b_EC"]
    optimizer.state[parameter]["three"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"keeps 'three' of shape \(3,\) for moe\.b_EC of shape"):
        placed.move_to(permutations(6, 1))


def _wrong_within_and_after_model_order(layout: Layout) -> list[str]:
    placed, optimizer = trained(layout)
    before = everything(placed, optimizer)
    experts_LE = permutations(layout.num_experts, 2)
    placed.move_to(experts_LE)
    with contextlib.suppress(OSError), placed.in_model_order():
        within_LE, within = experts_now(placed), everything(placed, optimizer)
        raise OSError("disk full")
    assert torch.equal(within_LE, torch.arange(layout.num_experts).repeat(2, 1))
    assert torch.equal(experts_now(placed), experts_LE)
    wrong = not_at(within_LE, before, within)
    return wrong + not_at(experts_LE, before, everything(placed, optimizer))


def test_experts_lie_in_model_order_within_and_as_before_after_an_error(ranks) -> None:
    assert ranks(4).run(_wrong_within_and_after_model_order, UNEVEN) == [[]] * 4


def _error_and_changes(layout: Layout) -> tuple[str, list[str]]:
    placed, optimizer = trained(layout)
    before = everything(placed, optimizer)
    state = optimizer.state[placed.layers[-1].parameters["b_EC"]]
    state["three"] = torch.zeros(3)
    reported: list[int] = []
    placed.on_sent = reported.append
    model_LE = experts_now(placed)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        placed.move_to(permutations(layout.num_experts, 2))
    assert torch.equal(experts_now(placed), model_LE)
    assert reported == []
    del state["three"]
    return str(caught.value), not_at(model_LE, before, everything(placed, optimizer))


def test_state_that_cannot_move_raises_the_same_on_every_rank_before_anything_moved(ranks) -> None:
    outcomes = ranks(4).run(_error_and_changes, UNEVEN)
    message, changes = outcomes[0]
    assert message.startswith(
        "the optimizer keeps 'three' of shape (3,) for layers.1.moe.b_EC of shape (6, 4)"
    )
    assert "AdamW" in message
    assert changes == []
    assert outcomes == [outcomes[0]] * 4


def _wrong_states(layout: Layout) -> list[str]:
    """Of an optimizer that keeps a row of each expert, and of one that works on local shards."""
    experts = sharded(layout)
    w_ECD = experts.w_ECD
    rows = sorted({place // COLUMNS for place in experts.numbers_EC.to_local().view(-1).tolist()})
    factors_E1D = any_bits((layout.num_experts, 1, 3), torch.float32, seed=3)
    factored = DTensor.from_local(
        factors_E1D[rows],
        w_ECD.device_mesh,
        [Replicate() if placement == Shard(1) else placement for placement in w_ECD.placements],
        shape=factors_E1D.shape,
        stride=factors_E1D.stride(),
    )
    shard = w_ECD.to_local().detach().clone()
    optimizer = torch.optim.SGD([w_ECD])
    optimizer.state[w_ECD] = {"factored": factored, "shard": shard}
    layer = ExpertLayer.of("moe", dict(experts.named_parameters()))
    experts_LE = permutations(layout.num_experts, 1)
    PlacedExperts([layer], [optimizer]).move_to(experts_LE)
    moved = {
        "weights": same(whole(w_ECD), Experts(layout.num_experts, 0).w_ECD[experts_LE[0]].detach()),
        "factored": same(whole(factored), factors_E1D[experts_LE[0]]),
        "shard": same(shard, w_ECD.to_local().detach()),
    }
    return [name for name, right in moved.items() if not right]


@pytest.mark.parametrize("layout", ["FSDP of uneven rows", "FSDP of columns"])
def test_factored_state_and_plain_shards_follow_their_experts(ranks, layout) -> None:
    assert ranks(4).run(_wrong_states, LAYOUTS[layout]) == [[]] * 4
