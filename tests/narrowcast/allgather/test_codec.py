"""A chunk is decoded bitwise identical, never takes more than its bits, and only what is due."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowcast.allgather import codec
from narrowcast.allgather.codec import Scheme
from narrowcast.wire import floats
from narrowcast.wire.coders import Zstd
from narrowcast.wire.floats import LAYOUTS, FloatLayout
from narrowcast.wire.packet import SECTIONS, Encoded, Form

CODER = Zstd()
DTYPES = list(LAYOUTS)
SIZES = [0, 1, 7, 8, 9, 511, 512, 513, 3001]
BLOCKS = Scheme("exponent", "blocks")
SCHEMES = {
    "none": Scheme("none"),
    "entropy": Scheme("entropy"),
    "delta": Scheme("delta"),
    "exponent_delta": Scheme("exponent"),
    "blocks": BLOCKS,
    "blocks-hash": replace(BLOCKS, block_check="hash"),
    "blocks of 7": replace(BLOCKS, block_size=7),
    "blocks of 100-hash": replace(BLOCKS, block_size=100, block_check="hash"),
    "blocks of 1-hash": replace(BLOCKS, block_size=1, block_check="hash"),
    "blocks of 5000": replace(BLOCKS, block_size=5000),
}
WINNING_FORM = {
    "none": Form.RAW,
    "entropy": Form.ENTROPY,
    "delta": Form.DELTA,
    "exponent_delta": Form.EXPONENT_DELTA,
}

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())


@pytest.fixture(autouse=True)
def _same_numbers_each_time():
    torch.manual_seed(0)


def weights(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Bits of Gaussian weights, with a -0, an infinity, a NaN and a subnormal here and there."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator).mul_(0.02).to(dtype)
    for i, special in enumerate((-0.0, torch.inf, -torch.nan, torch.finfo(dtype).tiny / 4)):
        values[2 + 97 * i :: 1001] = special
    return values.view(LAYOUTS[dtype].bits)


def every_pattern() -> Tensor:
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16)


def send(
    new: Tensor, old: Tensor | None, scheme: Scheme, dtype: torch.dtype
) -> tuple[Encoded, Tensor]:
    """What is sent, and what is decoded from it, where ``old`` was sent before."""
    layout = LAYOUTS[dtype]
    at_sender = None if old is None else codec.sender_cache(old, scheme, layout)
    at_receiver = None if old is None else codec.receiver_cache(old, scheme, layout)
    encoded = codec.encode(new, at_sender, scheme, layout, CODER)
    decoded = codec.decode(encoded, at_receiver, new.numel(), scheme, layout, CODER)
    return encoded, decoded


def assert_arrives(new: Tensor, old: Tensor | None, scheme: Scheme, dtype: torch.dtype) -> Encoded:
    encoded, decoded = send(new, old, scheme, dtype)
    assert decoded.dtype == new.dtype
    assert torch.equal(decoded, new)
    assert encoded.size <= new.numel() * dtype.itemsize
    assert len(encoded.sections) == SECTIONS[encoded.form]
    assert all(s.dtype == torch.uint8 and s.dim() == 1 for s in encoded.sections)
    return encoded


def with_exponents_changed(bits: Tensor, positions: list[int], layout: FloatLayout) -> Tensor:
    changed = bits.clone()
    changed[positions] ^= 1 << layout.mantissa_bits
    return changed


def mantissas_and_signs_changed(bits: Tensor, layout: FloatLayout) -> Tensor:
    return bits ^ -(1 << (layout.width - 1)) ^ 1


@each_dtype
@each_scheme
def test_chunks_of_any_size_and_change_arrive_bitwise_identical_and_no_larger(dtype, scheme):
    layout = LAYOUTS[dtype]
    for size in SIZES:
        old = weights(size, dtype)
        few = weights(size, dtype, seed=1)
        few[torch.arange(size) % 61 != 0] = old[torch.arange(size) % 61 != 0]
        one = with_exponents_changed(old, [size // 2] if size else [], layout)
        noise = torch.randint(0, 1 << 32, (size,)).to(layout.bits)
        for new in (old, one, few, weights(size, dtype, seed=2), noise):
            assert_arrives(new, old, scheme, dtype)
        for new in (old, noise, torch.zeros_like(old)):
            assert_arrives(new, None, scheme, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_scheme
def test_every_pattern_arrives_in_the_form_of_its_compression(dtype, scheme):
    old = every_pattern()
    names = {scheme: name for name, scheme in SCHEMES.items()}
    form = WINNING_FORM.get(names[scheme], Form.EXPONENT_BLOCKS)
    few_exponents = with_exponents_changed(old, list(range(0, old.numel(), 9973)), LAYOUTS[dtype])
    # Differences of one, between neighbouring NaNs, infinities and both zeros; mirrored signs; all
    # patterns at once as difference and as value.
    for new in (old ^ 1, old + 1, few_exponents):
        assert assert_arrives(new, old, scheme, dtype).form == form
    for new in (old.flip(0), old ^ (1 << 14), old.roll(4097), torch.zeros_like(old)):
        assert_arrives(new, old, scheme, dtype)
        assert_arrives(old, new, scheme, dtype)
    cold_form = Form.RAW if form == Form.RAW else Form.ENTROPY
    assert assert_arrives(old, None, scheme, dtype).form == cold_form


@each_dtype
@each_scheme
def test_caches_of_sender_and_receiver_stay_equal_over_many_steps(dtype, scheme):
    layout = LAYOUTS[dtype]
    at_sender = at_receiver = None
    bits = weights(1500, dtype)
    for step in range(6):
        if step != 3:
            bits = bits + torch.randint(-2, 3, bits.shape).to(bits.dtype)
        if step == 4:
            bits = weights(1500, dtype, seed=step)
        encoded = codec.encode(bits, at_sender, scheme, layout, CODER)
        decoded = codec.decode(encoded, at_receiver, bits.numel(), scheme, layout, CODER)
        assert torch.equal(decoded, bits)
        at_sender = codec.sender_cache(bits, scheme, layout)
        at_receiver = codec.receiver_cache(decoded, scheme, layout)


@each_dtype
def test_an_unchanged_shard_sends_only_what_the_receiver_has_not_cached(dtype):
    bits = weights(3001, dtype)
    plane = floats.sign_mantissa_bytes(3001, LAYOUTS[dtype])
    assert assert_arrives(bits, bits, SCHEMES["delta"], dtype).size == 0
    assert assert_arrives(bits, bits, SCHEMES["exponent_delta"], dtype).size == plane
    for block_check in ("compare", "hash"):
        scheme = replace(BLOCKS, block_check=block_check)
        assert assert_arrives(bits, bits, scheme, dtype).size == plane + 1  # 6 blocks, 6 bits


@each_dtype
def test_what_is_cached_takes_the_stated_memory(dtype):
    bits, layout = weights(1025, dtype), LAYOUTS[dtype]
    cache_bytes = {
        name: [
            0 if cached is None else cached.numel() * cached.itemsize
            for cached in (
                codec.receiver_cache(bits, scheme, layout),
                codec.sender_cache(bits, scheme, layout),
            )
        ]
        for name, scheme in SCHEMES.items()
    }
    assert cache_bytes["none"] == cache_bytes["entropy"] == [0, 0]
    assert cache_bytes["delta"] == [1025 * dtype.itemsize] * 2
    assert cache_bytes["exponent_delta"] == cache_bytes["blocks"] == [1025, 1025]
    assert cache_bytes["blocks-hash"] == [1025, 3 * 16]


@each_dtype
def test_each_compression_that_caches_more_sends_less(dtype):
    old = weights(50_000, dtype)
    new = old + torch.randint(-1, 2, old.shape).to(old.dtype)
    sizes = [
        assert_arrives(new, old, SCHEMES[name], dtype).size
        for name in ("delta", "exponent_delta", "entropy", "none")
    ]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 4


@each_dtype
@pytest.mark.parametrize("block_check", ["compare", "hash"])
@pytest.mark.parametrize("block_size", [7, 100, 512])
def test_exactly_the_blocks_whose_exponents_changed_are_sent(dtype, block_check, block_size):
    layout = LAYOUTS[dtype]
    scheme = Scheme("exponent", "blocks", block_size, block_check)
    size = 4801
    num_blocks = -(-size // block_size)
    old = weights(size, dtype)
    for positions in ([0, size - 1], [1, 2, 703, 2500], [], list(range(size))):
        new = mantissas_and_signs_changed(old, layout)
        new = with_exponents_changed(new, positions, layout)
        encoded = assert_arrives(new, old, scheme, dtype)
        assert encoded.form == Form.EXPONENT_BLOCKS
        plane, bitmap, section = encoded.sections
        assert torch.equal(plane, floats.sign_mantissa(new, layout))
        assert bitmap.numel() == -(-num_blocks // 8)
        blocks = sorted({position // block_size for position in positions})
        assert np.flatnonzero(np.unpackbits(bitmap.numpy(), bitorder="little")).tolist() == blocks
        if not blocks:
            assert section.numel() == 0
            continue
        padded = floats.exponents(new, layout).tolist() + [0] * (-size % block_size)
        due = [e for b in blocks for e in padded[b * block_size : (b + 1) * block_size]]
        assert CODER.decode(section, len(due)).tolist() == due


def test_hashes_and_comparison_find_the_same_blocks():
    for seed, block_size in enumerate((1, 3, 8, 64, 100, 512, 1000)):
        generator = torch.Generator().manual_seed(seed)
        old = torch.randint(0, 256, (9001,), generator=generator).to(torch.uint8)
        new = old.clone()
        positions = torch.randint(0, 9001, (40,), generator=generator)
        new[positions] += torch.randint(1, 256, (40,), generator=generator).to(torch.uint8)
        by_hash = (codec.block_hashes(new, block_size) != codec.block_hashes(old, block_size)).any(
            dim=1
        )
        assert torch.equal(by_hash, codec.changed_blocks(new, old, block_size))
        changed = set((positions // block_size).tolist())
        assert set(by_hash.nonzero().view(-1).tolist()) == changed


def splitmix64(state: int) -> int:
    """The next output of SplitMix64 (Steele, Lea and Flood, 2014)."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def test_hashes_are_splitmix64_chained_over_the_words_of_a_block():
    assert splitmix64(1234567) == 6457827717110365317  # its published first output
    for size, block_size in ((24, 8), (1, 1), (50, 7), (50, 9), (1300, 512)):
        exponents = torch.randint(0, 256, (size,)).to(torch.uint8)
        hashes = codec.block_hashes(exponents, block_size)
        assert hashes.dtype == torch.int64
        assert hashes.shape == (-(-size // block_size), 2)
        data = bytes(exponents.numpy())
        for b, halves in enumerate(hashes.tolist()):
            block = data[b * block_size : (b + 1) * block_size]
            block += bytes(-(-block_size // 8) * 8 - len(block))
            for seed, half in zip(codec._SEEDS, halves, strict=True):
                state = seed
                for start in range(0, len(block), 8):
                    state = splitmix64(state ^ int.from_bytes(block[start : start + 8], "little"))
                assert half % 2**64 == state


@pytest.mark.parametrize("block_size", [8, 13, 512])
def test_either_half_of_a_hash_changes_with_one_byte_and_with_the_order(block_size):
    block = torch.randint(0, 256, (block_size,)).to(torch.uint8)
    variants = block.repeat(3 * block_size + 1, 1)
    i = torch.arange(block_size)
    variants[i, i] += 1
    variants[block_size + i, i] ^= 0x80
    variants[2 * block_size + i, i] += torch.randint(1, 256, (block_size,)).to(torch.uint8)
    halves = codec.block_hashes(variants.view(-1), block_size)
    assert (halves[:-1] != halves[-1]).all()
    assert (halves[:, 0] != halves[:, 1]).all()

    block = torch.arange(block_size).to(torch.uint8)  # all neighbours differ
    swapped = block.repeat(block_size, 1)
    i = i[:-1]
    swapped[i, i], swapped[i, i + 1] = block[i + 1], block[i]
    halves = codec.block_hashes(swapped.view(-1), block_size)
    assert (halves[:-1] != halves[-1]).all()
    words = torch.arange(64, dtype=torch.uint8).view(8, 8)
    orders = torch.stack([words, words.roll(1, dims=0), words.flip(0)])
    assert len(set(codec.block_hashes(orders.view(-1), 64).view(-1).tolist())) == 6


@each_dtype
@each_scheme
def test_nothing_is_written_to_arguments_nor_need_they_be_aligned(dtype, scheme):
    layout = LAYOUTS[dtype]
    old, new = weights(1604, dtype)[3:], weights(1604, dtype, seed=1)[3:]
    new[100:] = old[100:] + 1
    at_sender = codec.sender_cache(old, scheme, layout)
    at_receiver = codec.receiver_cache(old, scheme, layout)
    new_before, old_before = new.clone(), old.clone()
    for cached in ((at_sender, at_receiver), (None, None)):
        encoded = codec.encode(new, cached[0], scheme, layout, CODER)
        # As they arrive: somewhere within a longer buffer, which is written to afterwards.
        buffer = torch.cat([torch.zeros(1, dtype=torch.uint8), *encoded.sections])
        sections = buffer[1:].split([section.numel() for section in encoded.sections])
        decoded = codec.decode(
            Encoded(encoded.form, sections), cached[1], new.numel(), scheme, layout, CODER
        )
        buffer.fill_(0xA5)
        assert torch.equal(decoded, new_before)
        decoded.fill_(0)
    assert torch.equal(new, new_before)
    assert torch.equal(old, old_before)
    if at_receiver is not None:
        assert torch.equal(at_receiver, codec.receiver_cache(old_before, scheme, layout))


@each_dtype
@each_scheme
def test_a_section_of_another_size_is_an_error(dtype, scheme):
    layout = LAYOUTS[dtype]
    old = weights(1601, dtype)
    new = with_exponents_changed(old, [5, 700, 1400], layout)
    says_unchanged = (Form.DELTA, 0), (Form.EXPONENT_DELTA, 1)
    for bits, before in ((new, old), (old ^ 1, old), (new, None)):
        encoded = assert_arrives(bits, before, scheme, dtype)
        cached = None if before is None else codec.receiver_cache(before, scheme, layout)
        for i, section in enumerate(encoded.sections):
            for size in {0, section.numel() - 1, section.numel() + 1} - {section.numel(), -1}:
                if size == 0 and (encoded.form, i) in says_unchanged:
                    continue
                resized = torch.cat([section, section.new_zeros(1)])[:size]
                sections = (*encoded.sections[:i], resized, *encoded.sections[i + 1 :])
                with pytest.raises(ValueError, match=r"bytes|zstd"):
                    codec.decode(
                        Encoded(encoded.form, sections), cached, 1601, scheme, layout, CODER
                    )


def test_a_bitmap_that_does_not_fit_its_exponents_is_an_error():
    layout = LAYOUTS[torch.bfloat16]
    scheme = replace(BLOCKS, block_size=100)
    old = weights(1601, torch.bfloat16)
    cached = codec.receiver_cache(old, scheme, layout)
    for positions in ([5, 700], []):
        new = with_exponents_changed(old, positions, layout)
        encoded = assert_arrives(new, old, scheme, torch.bfloat16)
        plane, bitmap, section = encoded.sections
        for block in range(17):
            flipped = bitmap.clone()
            flipped[block // 8] ^= 1 << block % 8
            damaged = Encoded(encoded.form, (plane, flipped, section))
            with pytest.raises(ValueError, match=r"bytes|zstd"):
                codec.decode(damaged, cached, 1601, scheme, layout, CODER)


@each_dtype
@pytest.mark.parametrize("name", ["delta", "exponent_delta", "blocks"])
def test_a_difference_that_arrives_where_nothing_is_cached_is_an_error(dtype, name):
    bits, layout = weights(600, dtype), LAYOUTS[dtype]
    for new in (bits, with_exponents_changed(bits, [5], layout)):
        encoded = assert_arrives(new, bits, SCHEMES[name], dtype)
        assert encoded.form not in (Form.RAW, Form.ENTROPY)
        with pytest.raises(ValueError, match="nothing is cached"):
            codec.decode(encoded, None, 600, SCHEMES[name], layout, CODER)
