"""When a reduction fails anywhere, every rank raises the same error, which names it, and soon."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from narrowcast import NarrowcastError, narrow_all_gather, narrow_reduce_scatter
from narrowcast.fsdp2 import is_default, param_groups
from narrowcast.reducescatter import codec, comm
from narrowcast.wire.coders import Zstd
from narrowcast.wire.packet import header_size
from tests.narrowcast.allgather.test_errors import SOON_S, _assert_same_error, _is_culprit
from tests.narrowcast.reducescatter.test_reduce_scatter import CODED
from tests.narrowcast.training import (
    DIM,
    Setup,
    build,
    build_two_layers,
    narrowed,
    same_bits,
    state_of,
    train,
)
from tests.wide import wide_but

SENDER, RECEIVER = 1, 2
SHORT = Setup(gradients=CODED, steps=1)


def _tampered(
    change: Callable[[Tensor], Tensor], routes: tuple[tuple[int, int], ...] = ((SENDER, RECEIVER),)
) -> AbstractContextManager:
    """Changes what is sent on some routes; what other owners receive stays sound."""

    def exchange(payload_for: Callable[[int], Tensor], group: dist.ProcessGroup) -> Any:
        def tampered(receiver: int) -> Tensor:
            payload = payload_for(receiver)
            return change(payload) if (group.rank(), receiver) in routes else payload

        return sound_exchange(tampered, group)

    sound_exchange = comm.exchange
    return patch.object(comm, "exchange", exchange)


def _flip(position: int) -> Callable[[Tensor], Tensor]:
    def flip(payload: Tensor) -> Tensor:
        payload[position] ^= 1
        return payload

    return flip


def _flip_magic(model: nn.Module) -> AbstractContextManager:
    return _tampered(_flip(0))


def _flip_number_of_chunks(model: nn.Module) -> AbstractContextManager:
    return _tampered(_flip(8))


def _flip_header(model: nn.Module) -> AbstractContextManager:
    return _tampered(_flip(header_size(1) // 2))


def _flip_body(model: nn.Module) -> AbstractContextManager:
    return _tampered(_flip(header_size(1) + 5))


def _flip_last_byte(model: nn.Module) -> AbstractContextManager:
    return _tampered(_flip(-1))


def _cut(model: nn.Module) -> AbstractContextManager:
    return _tampered(lambda payload: payload[:-1])


def _cut_within_the_header(model: nn.Module) -> AbstractContextManager:
    return _tampered(lambda payload: payload[:10])


def _send_nothing(model: nn.Module) -> AbstractContextManager:
    return _tampered(lambda payload: payload[:0])


def _flip_on_many_routes(model: nn.Module) -> AbstractContextManager:
    routes = tuple((sender, receiver) for sender in range(4) for receiver in (2, 3))
    return _tampered(_flip(-1), routes)


def _fail_to_encode(model: nn.Module) -> AbstractContextManager:
    if not _is_culprit():
        return ExitStack()
    return patch.object(codec, "encode", side_effect=MemoryError("no memory for the coder"))


def _fail_to_decode(model: nn.Module) -> AbstractContextManager:
    if not _is_culprit():
        return ExitStack()
    return patch.object(codec, "decode_into", side_effect=MemoryError("no memory to decode"))


def _set_on_culprit(model: nn.Module, name: str, value: Any) -> AbstractContextManager:
    """Changes an attribute of every reduce-scatter of one rank."""
    stack = ExitStack()
    for group in param_groups(model) if _is_culprit() else ():
        stack.enter_context(patch.object(group.reduce_scatter, name, value))
    return stack


def _other_coder(model: nn.Module) -> AbstractContextManager:
    return _set_on_culprit(model, "coder", Zstd(wire_version=2))


def _other_stream(model: nn.Module) -> AbstractContextManager:
    """A stream that is no zstd frame, within a payload that is sound otherwise."""

    class NotZstd(Zstd):
        def encode(self, data: Tensor) -> Tensor:
            return torch.full((9,), 7, dtype=torch.uint8)

    return _set_on_culprit(model, "coder", NotZstd())


def _other_compression(model: nn.Module) -> AbstractContextManager:
    return _set_on_culprit(model, "compression", "none")


_ROUTE = f"the payload from rank {SENDER} to rank {RECEIVER}"
FAULTS = {
    _flip_magic: ("PayloadError", _ROUTE),
    _flip_number_of_chunks: ("PayloadError", _ROUTE),
    _flip_header: ("PayloadError", _ROUTE),
    _flip_body: ("PayloadError", _ROUTE),
    _flip_last_byte: ("PayloadError", _ROUTE),
    _cut: ("PayloadError", _ROUTE),
    _cut_within_the_header: ("PayloadError", _ROUTE),
    _send_nothing: ("PayloadError", _ROUTE),
    _flip_on_many_routes: ("PayloadError", "to rank 2"),
    _fail_to_encode: ("SenderError", "no memory for the coder"),
    _fail_to_decode: ("NarrowcastError", "to rank 1: MemoryError: no memory to decode"),
    _other_coder: ("SettingsError", "coder"),
    _other_stream: ("PayloadError", "does not decode"),
    _other_compression: ("SettingsError", "compression"),
}


def _train_with_fault(fault: Callable) -> None:
    model, optimizer = build(SHORT)
    with narrowed(SHORT, model, optimizer), fault(model):
        train(SHORT, model, optimizer)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_every_rank_raises_the_same_error(ranks, fault: Callable) -> None:
    name, part = FAULTS[fault]
    outcomes = ranks(4).outcomes(_train_with_fault, fault, timeout_s=SOON_S)
    _assert_same_error(outcomes, name, part)


def _train_with_a_byte_damaged_between_nodes(position: int) -> None:
    """From rank 1 to the other rank in its place, of two nodes of two ranks."""
    setup = replace(SHORT, gradients={**CODED, "ranks_per_node": 2})
    model, optimizer = build(setup)
    routes = ((0, 1),) if dist.get_rank() == SENDER else ()
    with narrowed(setup, model, optimizer), _tampered(_flip(position), routes):
        train(setup, model, optimizer)


@pytest.mark.parametrize("position", wide_but([0, -1], -1))
def test_every_rank_of_every_node_raises_the_same_error(ranks, position: int) -> None:
    outcomes = ranks(4).outcomes(
        _train_with_a_byte_damaged_between_nodes, position, timeout_s=SOON_S
    )
    _assert_same_error(outcomes, "PayloadError", "from rank 1 to rank 3")


def _train_with_a_layer_unused_on_one_rank(ranks_per_node: int) -> None:
    model, optimizer = build_two_layers()
    setup = replace(SHORT, gradients={**CODED, "ranks_per_node": ranks_per_node})
    with narrowed(setup, model, optimizer):
        model(torch.ones(3, DIM), uses_second=not _is_culprit()).sum().backward()


def _train_with_a_group_unused_on_one_rank(ranks_per_node: int) -> None:
    model, optimizer = build(SHORT)
    setup = replace(SHORT, gradients={**CODED, "ranks_per_node": ranks_per_node})
    if _is_culprit():
        model[0].register_forward_hook(lambda module, args, output: output.detach())
    with narrowed(setup, model, optimizer):
        train(setup, model, optimizer)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize(
    "unused", [_train_with_a_layer_unused_on_one_rank, _train_with_a_group_unused_on_one_rank]
)
def test_a_parameter_without_gradients_on_one_rank_is_an_error_on_all(
    ranks, unused: Callable, ranks_per_node: int
) -> None:
    outcomes = ranks(4).outcomes(unused, ranks_per_node, timeout_s=SOON_S)
    _assert_same_error(outcomes, "SettingsError", "the same parameters have gradients")


def _plain_after_an_error() -> bool:
    model, optimizer = build(SHORT)
    with narrowed(SHORT, model, optimizer), _flip_body(model), pytest.raises(NarrowcastError):
        train(SHORT, model, optimizer)
    return all(type(group.reduce_scatter) is DefaultReduceScatter for group in param_groups(model))


def test_a_model_is_plain_again_after_an_error_and_remove(ranks) -> None:
    assert ranks(4).run(_plain_after_an_error) == [True] * 4


def _trains_on_after_an_error() -> bool:
    def trained() -> list[Tensor]:
        model, optimizer = build(SHORT)
        with narrowed(SHORT, model, optimizer):
            train(SHORT, model, optimizer)
        return state_of(model, optimizer)

    before = trained()
    for fault in (_flip_body, _fail_to_encode, _cut):
        with pytest.raises(NarrowcastError):
            _train_with_fault(fault)
    return same_bits(trained(), before)


def test_an_error_leaves_nothing_behind_between_the_ranks(ranks) -> None:
    """Built anew from a checkpoint, say, a model trains on over the same process groups."""
    assert ranks(4).run(_trains_on_after_an_error) == [True] * 4


def _narrow_by_rank(on_culprit: dict[str, Any]) -> None:
    model, optimizer = build(SHORT)
    try:
        narrow_reduce_scatter(model, optimizer, **(on_culprit if _is_culprit() else {}))
    finally:
        assert all(is_default(group.reduce_scatter) for group in param_groups(model))


def test_settings_that_differ_by_rank_are_an_error_at_once(ranks) -> None:
    outcomes = ranks(4).outcomes(_narrow_by_rank, {"compression": "none"}, timeout_s=SOON_S)
    _assert_same_error(outcomes, "SettingsError", "of 'compression': {0: 'auto', 1: 'none'")


def test_a_wrong_argument_on_one_rank_is_an_error_on_all(ranks) -> None:
    outcomes = ranks(4).outcomes(_narrow_by_rank, {"entropy_coder": "ans"}, timeout_s=SOON_S)
    for outcome in outcomes:
        assert outcome.type == "ValueError"
        assert "entropy_coder = 'ans'" in outcome.message


WRONG_ARGUMENTS = {
    "compression": ("delta", '"auto" or "entropy" or "none"'),
    "force": ("no", "true or false"),
    "entropy_coder": ("ans", '"auto" or "zstd"'),
    "volume": ("no", "True, False"),
    "optimizer": ("adam", "torch.optim.Optimizer"),
}


def _wrong_argument(name: str, value: object) -> str:
    plain = dist.all_reduce, dist.all_gather_single
    model, optimizer = build(Setup())
    with pytest.raises(ValueError, match=name) as error:
        narrow_reduce_scatter(model, **{"optimizer": optimizer, name: value})
    groups = param_groups(model)
    assert all(is_default(g.reduce_scatter) and is_default(g.all_gather) for g in groups)
    assert plain == (dist.all_reduce, dist.all_gather_single)
    narrow_reduce_scatter(model, optimizer, compression="entropy").remove()
    return str(error.value)


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named_with_what_is_allowed_and_changes_nothing(ranks, name) -> None:
    value, allowed = WRONG_ARGUMENTS[name]
    for message in ranks(2).run(_wrong_argument, name, value):
        assert repr(value) in message
        assert allowed in message


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="fully_shard"):
        narrow_reduce_scatter(nn.Linear(2, 2))


@pytest.mark.parametrize("model", ["a", ["a"], None])
def test_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(ValueError, match=r"allowed: a torch.nn.Module, or several"):
        narrow_reduce_scatter(model)


def _narrow_twice() -> None:
    model, optimizer = build(SHORT)
    with narrowed(SHORT, model, optimizer):
        narrow_reduce_scatter(model, optimizer)


def test_narrowing_twice_is_refused(ranks) -> None:
    for outcome in ranks(2).outcomes(_narrow_twice):
        assert outcome.type == "ValueError"
        assert "remove()" in outcome.message


class OtherReduceScatter(DefaultReduceScatter):
    pass


def _narrow_a_model_with_a_custom_reduce_scatter() -> None:
    model, optimizer = build(SHORT)
    model[1].set_custom_reduce_scatter(OtherReduceScatter())
    narrow_reduce_scatter(model, optimizer)


def test_another_custom_reduce_scatter_is_not_replaced(ranks) -> None:
    for outcome in ranks(2).outcomes(_narrow_a_model_with_a_custom_reduce_scatter):
        assert outcome.type == "ValueError"
        assert "1 has a OtherReduceScatter" in outcome.message
        assert "set_custom_reduce_scatter" in outcome.message


def _count_one_of_two(first: Callable, second: Callable, first_counts: bool) -> str:
    model, optimizer = build(SHORT)
    handle = first(model, optimizer, volume=first_counts)
    with pytest.raises(ValueError, match="give both calls the same volume") as error:
        second(model, optimizer, volume=not first_counts)
    assert (handle.ledger is None) == (not first_counts)
    second(model, optimizer, volume=first_counts).remove()
    handle.remove()
    return str(error.value)


@pytest.mark.parametrize("first_counts", [True, False])
@pytest.mark.parametrize("gather_first", [True, False])
def test_only_both_or_none_are_counted(ranks, gather_first: bool, first_counts: bool) -> None:
    calls = narrow_all_gather, narrow_reduce_scatter
    first, second = calls if gather_first else calls[::-1]
    for message in ranks(2).run(_count_one_of_two, first, second, first_counts):
        assert f"volume = {not first_counts}" in message
