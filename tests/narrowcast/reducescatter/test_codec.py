"""The gradient codec, in one process: bitwise identical, in as few bits as a contribution has."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from narrowcast.reducescatter import codec
from narrowcast.wire.coders import Zstd
from narrowcast.wire.packet import Encoded, Form

CODER = Zstd()
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 2, 3, 7, 8, 9, 511, 1000, 4097, 131_072, 131_073, 300_001]
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def gaussian(size: int, seed: int = 0) -> Tensor:
    """A gradient as backward makes it: bf16, of a scale that differs from chunk to chunk."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(-(-size // 256), generator=generator).mul_(1.5).exp2_()
    values = torch.randn(size, generator=generator) * scale.repeat_interleave(256)[:size]
    return values.mul_(1e-4).bfloat16()


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All values of a 16-bit format, NaN payloads and subnormals among them, in random order."""
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))
    return (order - (1 << 15)).to(torch.int16).view(dtype)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def cross(values: Tensor, compression: codec.Compression = "entropy") -> Encoded:
    """Encodes and decodes; fails unless all bits come back, at no more than their own size."""
    before = bits(values).clone()
    encoded = codec.encode(values, compression, CODER)
    assert torch.equal(bits(values), before)
    assert all(s.dtype == torch.uint8 and s.dim() == 1 for s in encoded.sections)
    assert encoded.size <= bits(values).numel()
    around = values.new_ones(values.numel() + 5)
    codec.decode_into(around[3:-2], encoded, CODER)
    assert torch.equal(bits(around[3:-2]), before)
    assert torch.equal(around[:3], torch.ones_like(around[:3]))
    assert torch.equal(around[-2:], torch.ones_like(around[-2:]))
    return encoded


def bits_per_value(encoded: Encoded, num_values: int) -> float:
    return 8 * encoded.size / num_values


@each_float
@pytest.mark.parametrize("compression", ["entropy", "none"])
def test_a_gradient_of_any_size_comes_back(compression, dtype):
    for size in SIZES:
        encoded = cross(gaussian(size).to(dtype), compression)
        if compression == "none" or size < 4:
            assert encoded.form == Form.RAW  # no form is smaller
        elif size > 1000:
            assert encoded.form == Form.PLANES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_pattern_comes_back(dtype):
    cross(every_pattern(dtype))
    cross(every_pattern(dtype)[:-1])


def test_every_bf16_pattern_comes_back_as_fp32():
    values = (every_pattern(torch.bfloat16).view(torch.int16).to(torch.int32) << 16).view(
        torch.float32
    )
    assert cross(values).form == Form.PLANES


@pytest.mark.parametrize("position", [0, 500, 1000])
def test_any_one_bit_of_the_lower_half_comes_back(position):
    for bit in range(16):
        values = gaussian(1001).float()
        values.view(torch.int32)[position] |= 1 << bit
        assert cross(values).form == Form.HALVES


def test_fp32_of_any_bits_come_back():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-(1 << 31), 1 << 31, (70_001,), generator=generator)
    cross(noise.to(torch.int32).view(torch.float32))
    specials = [0x00000001, 0x7F800001, 0x7FC12345, 0x7FFFFFFF, 0x7F800000, 0x00400001, 0x7FFF]
    specials += [value - (1 << 31) for value in specials] + [-(1 << 31)]
    values = torch.randn(5000, generator=generator)
    values.view(torch.int32)[::100] = torch.tensor(specials, dtype=torch.int32).repeat(4)[:50]
    assert cross(values).form == Form.HALVES


@each_float
def test_zeros_are_sent_as_nothing_and_minus_zeros_are_no_zeros(dtype):
    for size in SIZES:
        encoded = cross(torch.zeros(size, dtype=dtype))
        assert (encoded.form, encoded.sections) == (Form.ZEROS, ())
        cross(torch.full((size,), -0.0, dtype=dtype))
        for value in (1.0, -0.0, torch.nan, torch.finfo(dtype).smallest_normal / 2):
            one = torch.zeros(size, dtype=dtype)
            one[size // 2] = value
            assert cross(one).form != Form.ZEROS


@each_float
def test_zeros_fill_what_held_something_else(dtype):
    values = torch.full((100,), torch.nan, dtype=dtype)
    codec.decode_into(values, Encoded(Form.ZEROS, ()), CODER)
    assert not bits(values).any()


@each_float
@pytest.mark.parametrize("compression", ["entropy", "none"])
def test_no_values_are_no_bytes(compression, dtype):
    assert cross(torch.empty(0, dtype=dtype), compression).size == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.int32, torch.uint8], ids=str)
def test_other_dtypes_are_sent_as_they_are(dtype):
    values = torch.arange(1000).to(dtype)
    assert cross(values).form == Form.RAW
    assert cross(values.zero_()).form == Form.RAW


def test_bf16_gradients_cast_to_fp32_take_at_most_11_and_a_half_bits():
    for seed in range(3):
        values = gaussian(100_000, seed).float()
        encoded = cross(values)
        assert encoded.form == Form.PLANES
        assert bits_per_value(encoded, values.numel()) <= 11.5


def test_a_gradient_takes_as_many_bytes_in_fp32_as_in_bf16():
    values = gaussian(20_000)
    assert cross(values.float()).size == cross(values).size


@each_float
def test_rows_of_zeros_cost_next_to_nothing(dtype):
    rows = gaussian(512 * 256).view(512, 256).clone()
    rows[torch.arange(512) % 20 != 7] = 0  # 95 % of an embedding's
    values = rows.view(-1).to(dtype)
    assert bits_per_value(cross(values), values.numel()) < 1


@pytest.mark.parametrize("microbatches", [2, 3, 4])
def test_lower_halves_of_sums_of_a_few_bf16_gradients_are_coded(microbatches):
    size = 50_000
    scale = torch.randn(size, generator=torch.Generator().manual_seed(9)).mul_(0.3).exp2_()
    values = torch.zeros(size)
    for seed in range(microbatches):
        draw = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        values += (draw * scale).bfloat16().float()
    encoded = cross(values)
    assert encoded.form == Form.HALVES
    assert encoded.sections[2].numel() < 2 * size
    assert bits_per_value(encoded, size) < 8 + 3.5 + 16


def test_lower_halves_of_noise_are_sent_as_they_are():
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    encoded = cross(values)
    assert encoded.form == Form.HALVES
    assert encoded.sections[2].numel() == 2 * values.numel()


def test_sign_and_mantissa_are_given_to_the_coder_only_where_there_are_zeros():
    dense, sparse = gaussian(10_000), gaussian(10_000)
    sparse[: 10_000 // 50] = 0
    for values, num_planes in ((dense, 1), (sparse, 2)):
        with patch.object(Zstd, "encode", autospec=True, side_effect=Zstd.encode) as encode:
            codec.encode(values, "entropy", CODER)
        assert encode.call_count == num_planes


def lower_halves() -> Tensor:
    values = gaussian(1000).float()
    values.view(torch.int32)[::3] |= 1
    return values


def sparse(dtype: torch.dtype) -> Tensor:
    values = gaussian(1000).to(dtype)
    values[::2] = 0
    return values


DAMAGEABLE = {
    "none": lambda: gaussian(1),
    "fp32 planes": lambda: gaussian(1000).float(),
    "bf16 planes": lambda: gaussian(1000),
    "fp16 planes": lambda: gaussian(1000).half(),
    "sparse fp32": lambda: sparse(torch.float32),
    "sparse fp16": lambda: sparse(torch.float16),
    "coded halves": lower_halves,
    "raw halves": lambda: torch.randn(1000, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("name", DAMAGEABLE)
def test_a_section_of_another_length_is_a_value_error(name):
    values = DAMAGEABLE[name]()
    encoded = codec.encode(values, "entropy", CODER)
    for index, section in enumerate(encoded.sections):
        longer, shorter = torch.cat([section, section[:1]]), section[:-1]
        for wrong in (longer, shorter, section[: len(section) // 2], section[:0]):
            sections = (*encoded.sections[:index], wrong, *encoded.sections[index + 1 :])
            with pytest.raises(ValueError, match="bytes"):
                codec.decode_into(values.clone(), Encoded(encoded.form, sections), CODER)


@pytest.mark.parametrize("name", DAMAGEABLE)
def test_sections_of_a_chunk_of_another_size_are_a_value_error(name):
    values = DAMAGEABLE[name]()
    encoded = codec.encode(values, "entropy", CODER)
    for other in (values.new_empty(len(values) + 1), values.new_empty(len(values) - 1)):
        with pytest.raises(ValueError, match="bytes"):
            codec.decode_into(other, encoded, CODER)


def test_a_form_of_another_dtype_or_of_a_gather_is_a_value_error():
    planes = codec.encode(gaussian(1000).float(), "entropy", CODER)
    halves = codec.encode(lower_halves(), "entropy", CODER)
    for dtype, wrong in (
        (torch.bfloat16, halves),
        (torch.float16, halves),
        (torch.float64, halves),
        (torch.int64, planes),
        (torch.float32, Encoded(Form.ENTROPY, planes.sections)),
        (torch.bfloat16, Encoded(Form.DELTA, planes.sections[:1])),
        (torch.float32, Encoded(Form.EXPONENT_BLOCKS, halves.sections)),
    ):
        with pytest.raises(ValueError, match="due"):
            codec.decode_into(torch.empty(1000, dtype=dtype), wrong, CODER)
