"""When something is wrong, every rank raises the same error, which names it, and soon."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from narrowcast import NarrowedModel, narrow_all_gather
from narrowcast.allgather.comm import NarrowAllGather
from narrowcast.fsdp2 import is_default, param_groups
from narrowcast.wire.coders import CODERS, Zstd
from tests.narrowcast.test_all_gather import COMPRESSIONS
from tests.narrowcast.training import Setup, build, narrow, train
from tests.ranks import Raised
from tests.wide import wide_but

SOON_S = 60  # far below the process group's timeout: nobody waits for a rank that has raised


def _is_culprit() -> bool:
    return dist.get_rank() == 1


def _tamper(handle: NarrowedModel, change: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """On one rank, changes every prepared payload, given with the size of its header."""
    for comm in handle._comms:
        for state in comm.states.values():
            prepared = state.prepared
            if _is_culprit() and prepared is not None:
                payload = change(prepared.payload.clone(), state.codec.header_size)
                state.prepared = replace(prepared, payload=payload)


def _flip_first_byte(payload: torch.Tensor, header_size: int) -> torch.Tensor:
    payload[0] ^= 1
    return payload


def _flip_header_byte(payload: torch.Tensor, header_size: int) -> torch.Tensor:
    payload[header_size // 2] ^= 1
    return payload


def _flip_body_byte(payload: torch.Tensor, header_size: int) -> torch.Tensor:
    payload[header_size + 5] ^= 1
    return payload


def _drop_cache(handle: NarrowedModel) -> None:
    if _is_culprit():
        handle.reset()


def _damage_cache(handle: NarrowedModel) -> None:
    """Flips a bit of what rank 1 caches of rank 0's shard."""
    if _is_culprit():
        for comm in handle._comms:
            for state in comm.states.values():
                state.codec.cache[0][0][0] ^= 1


def _encode_with(coder: Zstd, handle: NarrowedModel) -> None:
    """On one rank, encodes everything from now on with another coder."""
    if _is_culprit():
        for comm in handle._comms:
            for state in comm.states.values():
                state.codec.coder, state.prepared = coder, None


def _fail_to_encode(handle: NarrowedModel) -> None:
    class Broken(Zstd):
        def encode(self, data: torch.Tensor) -> torch.Tensor:
            raise MemoryError("no memory for the coder")

    _encode_with(Broken(), handle)


def _other_coder(handle: NarrowedModel) -> None:
    _encode_with(Zstd(wire_version=2), handle)


def _other_stream(handle: NarrowedModel) -> None:
    """A stream that is no zstd frame, within a payload that is sound otherwise."""

    class NotZstd(Zstd):
        def encode(self, data: torch.Tensor) -> torch.Tensor:
            return torch.full((9,), 7, dtype=torch.uint8)

    _encode_with(NotZstd(), handle)


def _flip_magic(handle: NarrowedModel) -> None:
    _tamper(handle, _flip_first_byte)


def _flip_header(handle: NarrowedModel) -> None:
    _tamper(handle, _flip_header_byte)


def _flip_body(handle: NarrowedModel) -> None:
    _tamper(handle, _flip_body_byte)


FAULTS = {
    _flip_magic: ("PayloadError", "rank 1"),
    _flip_header: ("PayloadError", "rank 1"),
    _flip_body: ("PayloadError", "rank 1"),
    _drop_cache: ("OutOfStepError", "reset()"),
    _fail_to_encode: ("SenderError", "no memory for the coder"),
    _other_coder: ("SettingsError", "coder"),
    _other_stream: ("PayloadError", "rank 1"),
}


def _train_with_fault(fault: Callable, compression: dict) -> None:
    setup = Setup(narrow=compression, steps=3)
    model, optimizer = build(setup)
    handle, _ = narrow(setup, model, optimizer)
    train(setup, model, optimizer)
    fault(handle)
    try:
        train(setup, model, optimizer)
    finally:
        handle.remove()


def _assert_same_error(outcomes: list, name: str, part: str) -> None:
    assert all(isinstance(outcome, Raised) for outcome in outcomes), outcomes
    assert {outcome.type for outcome in outcomes} == {name}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert part in outcomes[0].message


_FAULTY = [(fault, "delta") for fault in FAULTS]
_FAULTY += [(_drop_cache, "blocks-hash"), (_other_stream, "blocks-hash"), (_flip_body, "exponent")]
_OTHERS = [
    pytest.param(fault, compression, marks=pytest.mark.wide)
    for compression in ("exponent", "blocks-hash")
    for fault in FAULTS
    if (fault, compression) not in _FAULTY
]


@pytest.mark.parametrize(("fault", "compression"), [*_FAULTY, *_OTHERS])
def test_every_rank_raises_the_same_error(ranks, fault: Callable, compression: str) -> None:
    name, part = FAULTS[fault]
    outcomes = ranks(4).outcomes(
        _train_with_fault, fault, COMPRESSIONS[compression], timeout_s=SOON_S
    )
    _assert_same_error(outcomes, name, part)


@pytest.mark.parametrize("fault", wide_but(FAULTS, _flip_body, _drop_cache, _fail_to_encode))
def test_every_rank_of_every_node_raises_the_same_error(ranks, fault: Callable) -> None:
    """Of two nodes of two ranks only those in the culprit's place receive what is wrong."""
    name, part = FAULTS[fault]
    settings = {**COMPRESSIONS["delta"], "ranks_per_node": 2}
    outcomes = ranks(4).outcomes(_train_with_fault, fault, settings, timeout_s=SOON_S)
    _assert_same_error(outcomes, name, part)


def test_verification_finds_a_damaged_cache(ranks) -> None:
    compression = {**COMPRESSIONS["delta"], "verify_interval": 1}
    outcomes = ranks(4).outcomes(_train_with_fault, _damage_cache, compression, timeout_s=SOON_S)
    _assert_same_error(outcomes, "VerificationError", "rank 0")


def _train_with_settings_by_rank() -> None:
    setup = Setup()
    model, optimizer = build(setup)
    compression = "exponent" if _is_culprit() else "delta"
    handle = narrow_all_gather(model, optimizer, compression=compression)
    try:
        train(setup, model, optimizer)
    finally:
        handle.remove()


def test_settings_that_differ_by_rank_are_an_error(ranks) -> None:
    outcomes = ranks(4).outcomes(_train_with_settings_by_rank, timeout_s=SOON_S)
    _assert_same_error(outcomes, "SettingsError", "of 'compression': {0: 'delta', 1: 'exponent'")


def _narrow_with_an_optimizer_on_one_rank() -> None:
    model, optimizer = build(Setup())
    narrow_all_gather(model, optimizer if _is_culprit() else None, compression="delta")


def test_an_optimizer_on_one_rank_alone_is_an_error_on_all(ranks) -> None:
    outcomes = ranks(4).outcomes(_narrow_with_an_optimizer_on_one_rank, timeout_s=SOON_S)
    _assert_same_error(outcomes, "SettingsError", "of 'optimizer': {0: 'none', 1: 'given'")


def _narrow_with_a_wrong_argument_on_one_rank() -> None:
    model, optimizer = build(Setup())
    narrow_all_gather(model, optimizer, compression="delta", block_size=0 if _is_culprit() else 512)


def test_a_wrong_argument_on_one_rank_is_an_error_on_all(ranks) -> None:
    outcomes = ranks(4).outcomes(_narrow_with_a_wrong_argument_on_one_rank, timeout_s=SOON_S)
    for outcome in outcomes:
        assert outcome.type == "ValueError"
        assert "block_size = 0" in outcome.message


def _reset_after_dropped_cache() -> bool:
    setup = Setup(narrow=COMPRESSIONS["delta"], steps=3)
    model, optimizer = build(setup)
    plain_losses = train(setup, model, optimizer) + train(setup, model, optimizer, first_step=3)
    model, optimizer = build(setup)
    handle, _ = narrow(setup, model, optimizer)
    losses = train(setup, model, optimizer)
    _drop_cache(handle)
    handle.reset()
    losses += train(setup, model, optimizer, first_step=3)
    handle.remove()
    return losses == plain_losses


def test_reset_on_every_rank_mends_a_dropped_cache(ranks) -> None:
    assert ranks(4).run(_reset_after_dropped_cache) == [True] * 4


WRONG_ARGUMENTS = {
    "compression": (
        "values",
        '"auto" or "observe" or "delta" or "exponent" or "entropy" or "none"',
    ),
    "exponent_coding": ("block", '"delta" or "blocks"'),
    "block_check": ("sha", '"compare" or "hash"'),
    "block_size": (0, "an integer from 1 to 262144"),
    "block_size ": (10**12, "an integer from 1 to 262144"),
    "verify_interval": (-1, "an integer of at least 0"),
    "entropy_coder": ("ans", '"auto" or "zstd"'),
    "volume": ("no", "True, False"),
    "optimizer": ("adam", "torch.optim.Optimizer"),
    "process_group": ("all", "a torch.distributed.ProcessGroup, or None"),
    "cache_budget_gib": (-0.5, "a number of at least 0"),
    "cache_device": ("gpu", '"device" or "cpu"'),
    "selection": ("greedy", '"exact" or "ratio"'),
    "warmup_steps": (2, "an integer of at least 3"),
    "reselect_interval": (-1, "an integer of at least 0"),
    "report": (5, "a path, or None"),
    "parameters": (["*.no_such.*"], "none of the model's parameters"),
    "parameter": (["*"], 'did you mean "parameters"?'),
    "enable": (True, "unknown key"),
    # What earlier releases had: the message has the new name.
    "treatment": ("value", 'it is called "compression" now'),
    "coder": ("zstd", 'it is called "entropy_coder" now'),
    "compression ": ("value", '"value" is called "delta" now'),
    "exponent_coding ": ("difference", '"difference" is called "delta" now'),
}


def _wrong_argument(name: str, value: object) -> str:
    model, optimizer = build(Setup())
    with pytest.raises(ValueError, match=name) as error:
        narrow_all_gather(model, **{"optimizer": optimizer, name: value})
    narrow_all_gather(model, optimizer, compression="delta").remove()  # nothing was left half done
    return str(error.value)


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named_with_what_is_allowed(ranks, name: str) -> None:
    value, allowed = WRONG_ARGUMENTS[name]
    for message in ranks(2).run(_wrong_argument, name.strip(), value):
        assert repr(value) in message
        assert allowed in message


def _budget_of_a_fixed_compression() -> str:
    model, optimizer = build(Setup())
    with pytest.raises(ValueError, match="cache_budget_gib") as error:
        narrow_all_gather(model, optimizer, compression="delta", cache_budget_gib=0.5)
    return str(error.value)


def test_what_only_auto_uses_is_refused_with_a_fixed_compression(ranks) -> None:
    for message in ranks(2).run(_budget_of_a_fixed_compression):
        assert 'not "delta"' in message


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="fully_shard"):
        narrow_all_gather(nn.Linear(2, 2))


@pytest.mark.parametrize("model", ["a", ["a"], None])
def test_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(ValueError, match=r"allowed: a torch.nn.Module, or several"):
        narrow_all_gather(model)


def _narrow_twice() -> None:
    model, optimizer = build(Setup())
    handle = narrow_all_gather(model, optimizer, compression="delta")
    try:
        narrow_all_gather(model, optimizer, compression="delta")
    finally:
        handle.remove()


def test_narrowing_twice_is_refused(ranks) -> None:
    for outcome in ranks(2).outcomes(_narrow_twice):
        assert outcome.type == "ValueError"
        assert "remove()" in outcome.message


def _removed_twice() -> tuple[bool, int]:
    model, optimizer = build(Setup())
    old = narrow_all_gather(model, optimizer, compression="delta")
    old.remove()
    new = narrow_all_gather(model, optimizer, compression="delta")
    old.remove()
    old.refresh()
    narrowed = all(type(group.all_gather) is NarrowAllGather for group in param_groups(model))
    train(Setup(), model, optimizer)
    sent = new.ledger.last.sent["all_gather"]
    new.remove()
    plain = all(is_default(group.all_gather) for group in param_groups(model))
    return narrowed and plain, sent


def test_a_removed_handle_leaves_a_newer_one_alone(ranks) -> None:
    for right, sent in ranks(2).run(_removed_twice):
        assert right
        assert sent > 0


def _groups_narrowed(parameters: list[str], compression: str) -> list[bool]:
    model, optimizer = build(Setup())
    handle = narrow_all_gather(model, optimizer, compression=compression, parameters=parameters)
    narrowed = [type(group.all_gather) is NarrowAllGather for group in param_groups(model)]
    handle.remove()
    return narrowed


def test_groups_with_nothing_to_compress_are_left_to_fsdp(ranks) -> None:
    assert ranks(2).run(_groups_narrowed, ["0.*"], "delta") == [[False, True, False]] * 2
    assert ranks(2).run(_groups_narrowed, ["*"], "none") == [[True] * 3] * 2


def test_coders_are_registered_under_their_own_wire_ids() -> None:
    assert len({(coder.wire_id, coder.wire_version) for coder in CODERS.values()}) == len(CODERS)
