"""What is cached of a shard when its compressions change: all that the new ones can use, bitwise
identical."""

import random
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from narrowcast.allgather import chunks, codec
from narrowcast.allgather.chunks import Chunk, make_chunks, rechunk
from narrowcast.allgather.codec import Scheme
from narrowcast.wire import floats

HASHES = Scheme("exponent", "blocks", block_size=8, block_check="hash")
SCHEMES = {
    **{name: Scheme(name, block_size=8) for name in ("delta", "exponent", "entropy", "none")},
    "blocks": Scheme("exponent", "blocks", block_size=8),
    "hashes": HASHES,
}
USABLE = {
    **{("delta", to): True for to in ("delta", "exponent", "blocks")},
    **{(of, to): True for of in ("exponent", "blocks") for to in ("exponent", "blocks")},
}
SIZES = {"a": 301, "b": 0, "c": 7, "d": 64, "e": 130}


def cut(
    compressions: dict[str, str], dtypes: dict[str, torch.dtype], longest: int
) -> tuple[Chunk, ...]:
    params = [(name, SIZES[name], dtypes[name]) for name in SIZES]
    with patch.object(chunks, "MAX_CHUNK_VALUES", longest):
        return make_chunks(params, {name: SCHEMES[of] for name, of in compressions.items()})


def cached_of(cut_chunks: tuple[Chunk, ...], shard_bytes: Tensor, own: bool) -> list[Tensor | None]:
    """What a sender caches of its own shard, or a receiver of it."""
    cache_of = codec.sender_cache if own else codec.receiver_cache
    return [cache_of(chunk.bits(shard_bytes), chunk.scheme, chunk.layout) for chunk in cut_chunks]


def random_shard(dtypes: dict[str, torch.dtype]) -> Tensor:
    """Any bits, with NaN of all payloads among them: uint8."""
    nbytes = sum(size * dtypes[name].itemsize for name, size in SIZES.items())
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (nbytes,), generator=generator, dtype=torch.uint8)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("dtype", floats.LAYOUTS)
@pytest.mark.parametrize("own", [True, False])
def test_a_new_compression_finds_what_it_would_have_cached(dtype: torch.dtype, own: bool) -> None:
    dtypes = dict.fromkeys(SIZES, dtype)
    shard_bytes = random_shard(dtypes)
    for before in SCHEMES:
        for after in SCHEMES:
            old = cut(dict.fromkeys(SIZES, before), dtypes, longest=40)
            new = cut(dict.fromkeys(SIZES, after), dtypes, longest=104)
            assert len(old) > len(new) > 1  # shards are longer than a chunk
            found = rechunk(old, cached_of(old, shard_bytes, own), new)
            expected = cached_of(new, shard_bytes, own)
            if not USABLE.get((before, after)):
                expected = [None] * len(new)
            assert all(map(same, found, expected)), (before, after)
            assert len(found) == len(new)


def test_every_shard_of_a_group_caches_what_it_can_through_many_changes() -> None:
    rng = random.Random(0)
    dtypes = {
        **{"a": torch.bfloat16, "b": torch.float16, "c": torch.bfloat16},
        **{"d": torch.int64, "e": torch.float32},
    }
    shard_bytes = random_shard(dtypes)
    kinds = set()
    for _ in range(100):
        two = rng.sample(list(SCHEMES), 2)
        before, after = ({name: rng.choice(two) for name in SIZES} for _ in range(2))
        old, new = cut(before, dtypes, longest=40), cut(after, dtypes, longest=200)
        found = rechunk(old, cached_of(old, shard_bytes, own=True), new)
        for chunk, one, full in zip(new, found, cached_of(new, shard_bytes, own=True), strict=True):
            usable = chunk in old or all(
                dtypes[name] != torch.int64 and USABLE.get((before[name], after[name]))
                for name, _ in chunk.params
            )
            assert same(one, full if usable else None), (before, after, chunk)
            kinds.add((chunk.scheme.compression, usable, len(chunk.params) > 1))
    # Chunks of several parameters were among them, with all of them known and not.
    assert {("delta", True, True), ("exponent", True, True), ("delta", False, True)} <= kinds


def test_a_chunk_with_a_part_that_is_not_known_is_cold() -> None:
    dtypes = dict.fromkeys(SIZES, torch.bfloat16)
    shard_bytes = random_shard(dtypes)
    old = cut(dict.fromkeys(SIZES, "delta"), dtypes, longest=104)
    cached = cached_of(old, shard_bytes, own=False)
    cached[1] = None  # a part of ``a``
    new = cut({**dict.fromkeys(SIZES, "delta"), "c": "exponent"}, dtypes, longest=1000)
    assert [[name for name, _ in chunk.params] for chunk in new] == [["a"], ["c"], ["d", "e"]]
    expected = [None, *cached_of(new, shard_bytes, own=False)[1:]]
    assert all(map(same, rechunk(old, cached, new), expected))


def test_hashes_stay_cached_as_long_as_their_chunk_stays_as_it_is() -> None:
    dtypes = dict.fromkeys(SIZES, torch.bfloat16)
    shard_bytes = random_shard(dtypes)
    compressions = {**dict.fromkeys(SIZES, "hashes"), "e": "delta"}
    old = cut(compressions, dtypes, longest=1000)
    new = cut({**compressions, "e": "entropy"}, dtypes, longest=1000)
    for own in (True, False):
        cached = cached_of(old, shard_bytes, own)
        found = rechunk(old, cached, new)
        assert same(found[0], cached[0])
        assert found[0] is not None
        assert found[-1] is None


def test_what_was_not_cached_yet_stays_cold() -> None:
    dtypes = dict.fromkeys(SIZES, torch.bfloat16)
    old = cut(dict.fromkeys(SIZES, "delta"), dtypes, longest=40)
    new = cut(dict.fromkeys(SIZES, "exponent"), dtypes, longest=104)
    assert rechunk(old, [None] * len(old), new) == [None] * len(new)
