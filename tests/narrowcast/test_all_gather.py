"""Narrowed training is bitwise that of FSDP2: losses, parameters, optimizer states."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from narrowcast.allgather import chunks
from narrowcast.allgather.codec import Scheme
from tests.narrowcast.training import Setup, build, narrow, same_bits, state_of, train
from tests.ranks import Ranks
from tests.wide import wide_but

VALUE = {"compression": "delta"}
BLOCKS = {"compression": "exponent", "exponent_coding": "blocks", "block_size": 64}
COMPRESSIONS = {
    "delta": VALUE,
    "exponent": {"compression": "exponent"},
    "blocks": BLOCKS,
    "blocks-hash": {**BLOCKS, "block_check": "hash"},
    "entropy": {"compression": "entropy"},
    "none": {"compression": "none"},
    "some": {"compression": "delta", "parameters": ["*experts*", "*.router.*"]},
    "verified": {"compression": "delta", "verify_interval": 1},
}
MIXED_DTYPES = {
    "frozen": (torch.int64, torch.float16, torch.uint8, torch.float32),
    "gathered": None,
    "dtype": torch.bfloat16,
}
MODES = {
    "mixed fp16": {"gathered": torch.float16},
    "mixed fp32": {"gathered": torch.float32},
    "no mixed precision": {"gathered": None},
    "bf16 masters": {"gathered": None, "dtype": torch.bfloat16},
    "adam": {"optimizer": "Adam"},
    "adafactor": {"optimizer": "Adafactor"},
    "one expert": {"num_experts": 1},
    "shard dim 1": {"expert_shard_dim": 1},
    "cached after forward": {"reshard": False},
    "resharded to pairs": {"reshard": 2},
    "accumulated": {"microbatches": 3},
    "offloaded": {"offload": True},
    "prefetched": {"prefetch": True},
    "async": {"async_unshard": True, "prefetch": True},
    "recomputed": {"checkpointing": True},
    "compiled": {"backend": "aot_eager"},
    "hsdp": {"replicas": 2},
    "mixed dtypes": MIXED_DTYPES,
    "many at once": {
        **MIXED_DTYPES,
        "replicas": 2,
        "microbatches": 2,
        "synced": False,
        "expert_shard_dim": 1,
        "checkpointing": True,
        "async_unshard": True,
        "prefetch": True,
    },
}


# Each with what the others have not.
ALWAYS = ("mixed fp32", "resharded to pairs", "accumulated", "async", "recomputed", "hsdp")
ALWAYS += ("shard dim 1", "mixed dtypes", "cached after forward", "offloaded")


def _differing(setup: Setup, compressions: dict[str, dict]) -> list[str]:
    """Trains once plain, then once with each compression: those that ended otherwise, and how."""
    model, optimizer = build(setup)
    plain_losses = train(setup, model, optimizer)
    plain_state = state_of(model, optimizer)
    assert len(plain_losses) == setup.steps * setup.microbatches
    differing = []
    for name, compression in compressions.items():
        model, optimizer = build(setup)
        handle, _ = narrow(replace(setup, narrow=compression), model, optimizer)
        if train(setup, model, optimizer) != plain_losses:
            differing.append(f"{name}: losses")
        if not same_bits(state_of(model, optimizer), plain_state):
            differing.append(f"{name}: parameters or optimizer states")
        handle.remove()
    return differing


def _assert_trains_as_plain(ranks: Ranks, setup: Setup, *compressions: str) -> None:
    chosen = {name: COMPRESSIONS[name] for name in compressions}
    differing = ranks.run(_differing, setup, chosen)
    assert differing == [[]] * len(differing)


# Modes of FSDP2 and compressions do not know of each other: each compression runs in one mode, on
# as many ranks as divide nothing; each mode with one compression; and one case mixes many.
JOBS = {
    "3 ranks": (3, torch.bfloat16),
    "2 ranks": (2, torch.bfloat16),
    "4 ranks": (4, torch.bfloat16),
    "3 ranks, fp16": (3, torch.float16),
    "3 ranks, fp32": (3, torch.float32),
}


@pytest.mark.parametrize("job", wide_but(JOBS, "3 ranks"))
def test_every_compression_trains_as_plain(ranks, job: str) -> None:
    world_size, gathered = JOBS[job]
    _assert_trains_as_plain(ranks(world_size), Setup(gathered=gathered), *COMPRESSIONS)


def _in_mode(ranks: Callable[[int], Ranks], mode: str, *compressions: str) -> None:
    setup = replace(Setup(), **MODES[mode])
    world_size = 4 if setup.reshard == 2 or setup.replicas == 2 else 2
    _assert_trains_as_plain(ranks(world_size), setup, *compressions)


@pytest.mark.parametrize("mode", wide_but(MODES, *ALWAYS))
def test_every_mode_of_fsdp_trains_as_plain(ranks, mode: str) -> None:
    _in_mode(ranks, mode, "delta")


@pytest.mark.parametrize("mode", wide_but(MODES, "many at once"))
def test_caches_of_exponents_train_as_plain_in_every_mode_of_fsdp(ranks, mode: str) -> None:
    _in_mode(ranks, mode, "exponent", "blocks-hash")


@pytest.mark.parametrize("backend", wide_but(["aot_eager", "inductor"], "aot_eager"))
def test_compiled_blocks_train_as_plain(ranks, backend: str) -> None:
    _assert_trains_as_plain(ranks(2), Setup(backend=backend, steps=3), "delta")


def _differing_in_short_runs(setup: Setup, compressions: dict[str, dict]) -> list[str]:
    with patch.object(chunks, "MAX_CHUNK_VALUES", 500):
        return _differing(setup, compressions)


def test_shards_cut_into_many_runs_train_as_plain(ranks) -> None:
    chosen = {name: COMPRESSIONS[name] for name in ("delta", "exponent", "blocks-hash", "some")}
    assert ranks(3).run(_differing_in_short_runs, Setup(), chosen) == [[]] * 3


def test_runs_cover_a_shard_and_hold_whole_blocks() -> None:
    scheme, raw = Scheme("exponent", "blocks", block_size=3000), Scheme("none")
    params = [("a", 600_001, torch.bfloat16), ("b", 0, torch.bfloat16), ("c", 7, torch.bfloat16)]
    params += [("d", 9, torch.int64), ("e", 5, torch.float32)]
    cut = chunks.make_chunks(params, {"a": scheme, "b": scheme, "c": scheme, "d": raw, "e": scheme})
    assert [chunk.start for chunk in cut[1:]] == [chunk.stop for chunk in cut[:-1]]
    assert cut[-1].stop == sum(numel * dtype.itemsize for _, numel, dtype in params)
    assert [chunk.num_values for chunk in cut] == [261_000, 261_000, 78_008, 72, 5]
    values = Counter()
    for chunk in cut:
        assert sum(size for _, size in chunk.params) == chunk.num_values
        values.update(dict(chunk.params))
    assert values == {"a": 600_001, "c": 7, "d": 72, "e": 5}
