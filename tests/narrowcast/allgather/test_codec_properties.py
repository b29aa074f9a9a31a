"""Any shard, given any that was sent before: what is decoded is what was encoded, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from narrowcast.allgather.chunks import Chunk, make_chunks, rechunk
from narrowcast.allgather.codec import Scheme, decode, encode, receiver_cache, sender_cache
from narrowcast.wire.coders import Zstd
from narrowcast.wire.floats import FloatLayout
from tests.strategies import SIZES, bits, later_bits, layouts, settings

CODER = Zstd()

blocks = st.builds(
    Scheme,
    compression=st.just("exponent"),
    exponent_coding=st.just("blocks"),
    block_size=st.sampled_from([1, 7, 100, 512]),
    block_check=st.sampled_from(["compare", "hash"]),
)
SCHEMES = {
    "none": st.just(Scheme("none")),
    "entropy": st.just(Scheme("entropy")),
    "delta": st.just(Scheme("delta")),
    "exponent": st.just(Scheme("exponent")),
    "blocks": blocks,
}
schemes = st.one_of(*SCHEMES.values())


@pytest.mark.parametrize("name", SCHEMES)
@settings(max_examples=25)
@given(data=st.data())
def test_any_shard_is_decoded_bit_for_bit_whatever_was_sent_before(
    name: str, data: st.DataObject
) -> None:
    """Three gathers, the first of which finds nothing cached; each rank keeps its own caches."""
    layout, scheme = data.draw(layouts), data.draw(SCHEMES[name])
    bits_N = data.draw(bits(layout, data.draw(st.sampled_from(SIZES))))
    sent = received = None
    for _ in range(3):
        encoded = encode(bits_N, sent, scheme, layout, CODER)
        decoded_N = decode(encoded, received, bits_N.numel(), scheme, layout, CODER)
        assert decoded_N.dtype == layout.bits
        assert torch.equal(decoded_N, bits_N)
        assert encoded.size <= bits_N.numel() * layout.itemsize
        sent = sender_cache(bits_N, scheme, layout)
        received = receiver_cache(decoded_N, scheme, layout)
        bits_N = data.draw(later_bits(bits_N, layout))


def _due(
    chunk: Chunk, shard_bytes: Tensor, old_schemes: dict[str, Scheme], was_cut_so: bool
) -> Tensor | None:
    """What a receiver of the chunk would have cached, if it can be made of what it has cached."""
    enough = {"delta": ("delta",), "exponent": ("delta", "exponent")}.get(
        chunk.scheme.compression, ()
    )
    of_old = [old_schemes[name] for name, _ in chunk.params]
    derivable = chunk.scheme.compression in ("delta", "exponent") and all(
        old.compression in enough for old in of_old
    )
    if not derivable:
        return None
    if not was_cut_so and (chunk.scheme.caches_hashes or any(old.caches_hashes for old in of_old)):
        return None
    return receiver_cache(chunk.bits(shard_bytes), chunk.scheme, chunk.layout)


@st.composite
def parameters(draw: st.DrawFn) -> list[tuple[str, int, FloatLayout]]:
    """Names, sizes and layouts; the wider floats first, so that every one is aligned."""
    drawn = draw(st.lists(st.tuples(st.sampled_from([0, 1, 9, 513]), layouts), max_size=5))
    drawn.sort(key=lambda one: -one[1].itemsize)
    return [(f"p{i}", size, layout) for i, (size, layout) in enumerate(drawn)]


@settings(max_examples=40)
@given(data=st.data())
def test_what_is_cached_survives_any_change_of_compression_that_can_use_it(
    data: st.DataObject,
) -> None:
    params = data.draw(parameters())
    shapes = [(name, size, layout.dtype) for name, size, layout in params]
    old_schemes, new_schemes = ({name: data.draw(schemes) for name, *_ in params} for _ in range(2))
    if data.draw(st.booleans()):
        new_schemes = old_schemes | dict(list(new_schemes.items())[:1])
    drawn = [data.draw(bits(layout, size)).view(torch.uint8) for _, size, layout in params]
    shard_bytes = torch.cat([torch.empty(0, dtype=torch.uint8), *drawn])
    old_chunks, chunks = make_chunks(shapes, old_schemes), make_chunks(shapes, new_schemes)
    cached = [
        receiver_cache(chunk.bits(shard_bytes), chunk.scheme, chunk.layout) for chunk in old_chunks
    ]
    for chunk, found in zip(chunks, rechunk(old_chunks, cached, chunks), strict=True):
        due = _due(chunk, shard_bytes, old_schemes, was_cut_so=chunk in old_chunks)
        assert (found is None) == (due is None)
        if due is not None:
            assert found.dtype == due.dtype
            assert torch.equal(found, due)
