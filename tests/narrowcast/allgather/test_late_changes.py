"""What FSDP2 lets a user change until a model is first used is followed, or refused by name."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from narrowcast import SettingsError, narrow_all_gather, narrow_reduce_scatter
from narrowcast.fsdp2 import param_groups
from tests.narrowcast.test_all_gather import COMPRESSIONS
from tests.narrowcast.training import local, same_bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# What the model is made of, what its mixed precision gathers, and what it is cast to.
CASTS = {
    "fp32 to bf16": (FP32, None, BF16),
    "bf16 to fp32": (BF16, None, FP32),
    "fp32 to fp16": (FP32, None, FP16),
    "fp32 to bf16, gathered in bf16": (FP32, BF16, BF16),
    "a mixed group to fp32": ("mixed", None, FP32),
    "a mixed group to bf16": ("mixed", None, BF16),
}


def _mesh() -> object:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _poison() -> None:
    """Memory that is freed now, and handed out next, does not hold zeros."""
    for num_bytes in range(1, 4096, 7):
        torch.full((num_bytes,), 0x77, dtype=torch.uint8)


def _gathered(model: nn.Module) -> list[Tensor]:
    _poison()
    model.unshard()
    values = [parameter.detach().clone() for parameter in model.parameters()]
    model.reshard()
    return values


def _gathers_what_is_there(made_of: object, gathered: object, cast_to: object, arguments: dict):
    torch.manual_seed(0)
    norm = nn.LayerNorm(48, dtype=BF16) if made_of == "mixed" else nn.LayerNorm(48)
    model = nn.Sequential(nn.Linear(33, 48), norm)
    if made_of != "mixed":
        model.to(made_of)
    policy = MixedPrecisionPolicy(param_dtype=gathered)
    fully_shard(model, mesh=_mesh(), mp_policy=policy)
    handle = narrow_all_gather(model, **arguments)
    model.to(cast_to)
    whole = [parameter.full_tensor() for parameter in model.parameters()]
    right = [tensor.to(gathered or tensor.dtype) for tensor in whole]
    # Twice: once with nothing cached, once with what the first has left.
    found = [same_bits(_gathered(model), right) for _ in range(2)]
    handle.remove()
    return found


@pytest.mark.parametrize("compression", ["delta", "blocks-hash"])
@pytest.mark.parametrize("cast", CASTS)
def test_a_model_that_is_cast_after_narrowing_is_gathered_as_it_is(
    ranks, cast, compression
) -> None:
    case = (*CASTS[cast], COMPRESSIONS[compression])
    for world_size in (2, 4):
        assert ranks(world_size).run(_gathers_what_is_there, *case) == [[True] * 2] * world_size


@pytest.mark.wide
@pytest.mark.parametrize("compression", [name for name in COMPRESSIONS if name != "some"])
@pytest.mark.parametrize("cast", CASTS)
def test_every_cast_under_every_compression(ranks, cast: str, compression: str) -> None:
    case = (*CASTS[cast], COMPRESSIONS[compression])
    assert ranks(4).run(_gathers_what_is_there, *case) == [[True] * 2] * 4


def _casts_on_one_rank() -> None:
    model = nn.Sequential(nn.Linear(33, 48), nn.LayerNorm(48).bfloat16()).requires_grad_(False)
    fully_shard(model, mesh=_mesh())
    handle = narrow_all_gather(model, compression="delta")
    if dist.get_rank() == 1:
        model.to(FP32)
    try:
        _gathered(model)
    finally:
        handle.remove()


def test_shards_that_differ_in_size_are_not_reported_as_a_damaged_payload(ranks) -> None:
    outcomes = ranks(2).outcomes(_casts_on_one_rank, timeout_s=30)
    assert {outcome.type for outcome in outcomes} == {"SettingsError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "different settings" in outcomes[0].message


def _materialised(compression: str) -> bool:
    def trained(narrows: bool) -> list[Tensor]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(33, 48), nn.Linear(48, 5))
        for layer in (*model, model):
            fully_shard(layer, mesh=_mesh(), mp_policy=MixedPrecisionPolicy(BF16, FP32))
        handles = []
        optimizer = torch.optim.AdamW(model.parameters())
        if narrows:
            arguments = {"warmup_steps": 3} if compression == "auto" else {}
            handles.append(
                narrow_all_gather(model, optimizer, compression=compression, **arguments)
            )
        model.to_empty(device="cpu")
        for seed, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * dist.get_rank() + seed)
            local(parameter.data).normal_(generator=generator)
        for _ in range(5):
            model(torch.ones(2, 33)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for handle in handles:
            handle.remove()
        return [local(parameter.detach()).clone() for parameter in model.parameters()]

    return same_bits(trained(True), trained(False))


@pytest.mark.parametrize("compression", ["delta", "auto"])
def test_a_model_on_the_meta_device_is_narrowed_and_trains_once_it_is_there(
    ranks, compression: str
) -> None:
    assert ranks(2).run(_materialised, compression) == [True] * 2


def _swaps_a_parameter() -> bool:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(33, 48), mesh=_mesh())
    handle = narrow_all_gather(model, compression="delta")
    model.weight = nn.Parameter(model.weight.detach() + 1)
    right = [parameter.full_tensor() for parameter in model.parameters()]
    equal = same_bits(_gathered(model), right)
    handle.remove()
    return equal


def test_a_parameter_that_is_replaced_before_the_first_use_is_gathered(ranks) -> None:
    assert ranks(2).run(_swaps_a_parameter) == [True] * 2


def _shards_later(narrow: Callable) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0], mesh=_mesh())
    handle = narrow(model)
    fully_shard(model, mesh=_mesh())
    try:
        model(torch.ones(2, 8)).sum().backward()
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "narrow",
    [
        partial(narrow_all_gather, compression="delta"),
        partial(narrow_reduce_scatter, compression="entropy"),
    ],
)
def test_fully_shard_after_narrowing_is_refused_by_name(ranks, narrow: Callable) -> None:
    for outcome in ranks(2).outcomes(_shards_later, narrow):
        assert outcome.type == "SettingsError"
        assert "fully_shard was applied to (root) after narrow_" in outcome.message


def _gathers_bytes_that_nothing_covers() -> str:
    """As if FSDP2 gathered other memory than its parameters say."""
    model = fully_shard(nn.Linear(33, 48), mesh=_mesh())
    handle = narrow_all_gather(model, compression="delta")
    (group,) = param_groups(model)
    short = torch.zeros(7)
    try:
        with pytest.raises(SettingsError) as error:
            group.all_gather(torch.empty(7 * dist.get_world_size()), short, group.process_group)
    finally:
        handle.remove()
    return str(error.value)


def test_no_gather_returns_bytes_that_no_payload_covers(ranks) -> None:
    for message in ranks(2).run(_gathers_bytes_that_nothing_covers):
        assert "FSDP2 gathers 28 bytes a rank, but its parameters have" in message
