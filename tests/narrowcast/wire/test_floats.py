"""Bit layouts: over every 16-bit pattern, and against references that take a value at a time."""

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowcast.wire import floats
from narrowcast.wire.floats import LAYOUTS, FloatLayout

DTYPES = list(LAYOUTS)
SIZES = [0, 1, 7, 8, 9, 511, 512, 513, 3001]


def patterns(layout: FloatLayout, seed: int = 0) -> Tensor:
    """All bit patterns of a 16-bit format, shuffled; of fp32 every exponent and sign with mantissas
    at both ends (zeros, subnormals, infinities and NaNs among them), and random bits."""
    generator = torch.Generator().manual_seed(seed)
    if layout.width == 16:
        return (torch.randperm(1 << 16, generator=generator) - (1 << 15)).to(torch.int16)
    upper = torch.arange(512, dtype=torch.int64).view(-1, 1) << 23
    special = (upper + torch.tensor([0, 1, 0x3FFFFF, 0x400000, 0x7FFFFF])).view(-1)
    random = torch.randint(0, 1 << 32, (8192,), generator=generator)
    return torch.cat([special, random]).to(torch.int32)


def fields(bits_N: Tensor, layout: FloatLayout) -> list[tuple[int, int, int]]:
    """Sign, exponent and mantissa of each value, by arithmetic on unsigned integers."""
    sign, exponent = 1 << (layout.width - 1), 1 << layout.mantissa_bits
    unsigned = [bits % (2 * sign) for bits in bits_N.tolist()]
    return [(u // sign, u % sign // exponent, u % exponent) for u in unsigned]


def packed_one_at_a_time(bits_N: Tensor, layout: FloatLayout) -> bytes:
    values = [sign << layout.mantissa_bits | m for sign, _, m in fields(bits_N, layout)]
    if layout.dtype != torch.float16:
        return b"".join(v.to_bytes((1 + layout.mantissa_bits) // 8, "little") for v in values)
    plane = bytes(v % 256 for v in values)
    for start in range(0, len(values), 8):
        eight = values[start : start + 8]
        plane += sum((v >> 8) << 3 * i for i, v in enumerate(eight)).to_bytes(3, "little")
    return plane


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_planes_are_the_fields_of_every_pattern(dtype):
    layout = LAYOUTS[dtype]
    bits = patterns(layout)
    assert floats.exponents(bits, layout).tolist() == [e for _, e, _ in fields(bits, layout)]
    plane = floats.sign_mantissa(bits, layout)
    assert plane.dtype == torch.uint8
    assert bytes(plane.numpy()) == packed_one_at_a_time(bits, layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_gives_back_every_pattern(dtype):
    layout = LAYOUTS[dtype]
    bits = patterns(layout)
    exponents, plane = floats.exponents(bits, layout), floats.sign_mantissa(bits, layout)
    merged = floats.merge(exponents, plane, layout)
    assert merged.dtype == layout.bits
    assert torch.equal(merged, bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_planes_of_any_length_merge_and_have_the_stated_size(dtype):
    layout = LAYOUTS[dtype]
    for size in SIZES:
        bits = patterns(layout, seed=size)[:size]
        exponents, plane = floats.exponents(bits, layout), floats.sign_mantissa(bits, layout)
        assert exponents.shape == (size,)
        assert plane.shape == (floats.sign_mantissa_bytes(size, layout),)
        assert bytes(plane.numpy()) == packed_one_at_a_time(bits, layout)
        assert torch.equal(floats.merge(exponents, plane, layout), bits)


@pytest.mark.parametrize(
    ("dtype", "bits_a_value"), [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)]
)
def test_sign_and_mantissa_take_their_bits_and_no_more(dtype, bits_a_value):
    for size in SIZES:
        in_eights = -(-size // 8) * 8 if dtype == torch.float16 else size
        least = size * bits_a_value / 8
        nbytes = floats.sign_mantissa_bytes(size, LAYOUTS[dtype])
        assert least <= nbytes <= in_eights * bits_a_value / 8
    assert floats.sign_mantissa_bytes(4096, LAYOUTS[dtype]) == 512 * bits_a_value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_agrees_with_torch(dtype):
    layout = LAYOUTS[dtype]
    info = torch.finfo(dtype)
    assert layout.itemsize == dtype.itemsize == layout.bits.itemsize
    assert layout.mantissa_bits == -int(np.log2(info.eps))
    infinity = torch.tensor([torch.inf], dtype=dtype).view(layout.bits)
    assert floats.exponents(infinity, layout).item() == (1 << layout.exponent_bits) - 1
    assert floats.exponents(torch.zeros(1, dtype=layout.bits), layout).item() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ordered_integers_have_the_order_of_the_floats_and_no_gap(dtype):
    layout = LAYOUTS[dtype]
    bits = patterns(layout)
    ordered = floats.ordered(bits, layout)
    assert torch.equal(floats.ordered(ordered, layout), bits)
    finite = torch.isfinite(bits.view(dtype))
    by_integer = bits[finite][ordered[finite].argsort()].view(dtype).double()
    assert (by_integer.diff() >= 0).all()
    neighbours = torch.tensor([-2, -1, 0, 1], dtype=layout.bits)
    around_zero = floats.ordered(neighbours, layout).view(dtype)
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert around_zero.tolist() == [-tiny, 0.0, 0.0, tiny]
    assert around_zero.signbit().tolist() == [True, True, False, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zigzag_difference_is_that_of_python_integers_and_inverts(dtype):
    layout = LAYOUTS[dtype]
    modulus, half = 1 << layout.width, 1 << (layout.width - 1)
    new = patterns(layout, seed=1)
    for old in (patterns(layout, seed=2), new, new.flip(0), new + 1, torch.zeros_like(new)):
        code = floats.zigzag_difference(new, old, layout)
        assert code.dtype == layout.bits
        planes = floats.byte_planes(code)
        assert torch.equal(floats.apply_zigzag_planes(planes, old, layout), new)
        ordered = [floats.ordered(bits, layout)[:5000].tolist() for bits in (new, old)]
        differences = [(a - b + half) % modulus - half for a, b in zip(*ordered, strict=True)]
        expected = [2 * d if d >= 0 else -2 * d - 1 for d in differences]
        assert [c % modulus for c in code[:5000].tolist()] == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbouring_floats_have_the_smallest_codes(dtype):
    layout = LAYOUTS[dtype]
    values = torch.linspace(-3, 3, 301, dtype=torch.float64).to(dtype)
    values = values[values != 0]
    up = torch.nextafter(values, torch.full_like(values, torch.inf))
    bits, bits_up = values.view(layout.bits), up.view(layout.bits)
    assert set(floats.zigzag_difference(bits_up, bits, layout).tolist()) == {2}
    assert set(floats.zigzag_difference(bits, bits_up, layout).tolist()) == {1}
    assert not floats.zigzag_difference(bits, bits, layout).any()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_byte_planes_are_the_bytes_by_significance_and_invert(dtype):
    bits = patterns(LAYOUTS[torch.float32 if dtype == torch.int32 else torch.float16])
    for size in [*SIZES, bits.numel()]:
        planes = floats.byte_planes(bits[:size])
        by_value = bits[:size].numpy().view(np.uint8).reshape(size, dtype.itemsize)
        assert bytes(planes.numpy()) == by_value.T.tobytes()
        assert torch.equal(floats.from_byte_planes(planes, dtype), bits[:size])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_writes_to_what_it_is_given_wherever_it_lies_in_memory(dtype):
    layout = LAYOUTS[dtype]
    new, old = patterns(layout, seed=1)[3:516], patterns(layout, seed=2)[5:518]
    plane, exponents = floats.sign_mantissa(new, layout), floats.exponents(new, layout)
    code, planes = floats.zigzag_difference(new, old, layout), floats.byte_planes(new)
    code_planes = floats.byte_planes(code)
    given = (new, old, plane, exponents, code, planes, code_planes)
    before = [tensor.clone() for tensor in given]
    assert torch.equal(floats.merge(exponents, plane, layout), new)
    assert torch.equal(floats.apply_zigzag_planes(code_planes, old, layout), new)
    assert torch.equal(floats.from_byte_planes(planes, layout.bits), new)
    assert torch.equal(floats.ordered(floats.ordered(new, layout), layout), new)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
