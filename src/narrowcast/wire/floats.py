"""Bit layouts of bf16, fp16 and fp32, and the integer views that the codecs work on.

A float tensor is reinterpreted, never converted: ``bits`` is the same memory as a tensor of signed
integers, so NaN payloads, -0, infinities and subnormals pass through every function unchanged.

    bf16   s eeeeeeee mmmmmmm                       exponent plane: 1 byte a value
    fp16   s eeeee mmmmmmmmmm                       sign-and-mantissa plane: 8, 11 and 24 bits
    fp32   s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm       a value, packed without padding
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class FloatLayout:
    """How one float format divides its bits; ``bits`` is the signed integer of the same width."""

    dtype: torch.dtype
    bits: torch.dtype
    width: int
    exponent_bits: int

    @property
    def itemsize(self) -> int:
        """Bytes a value."""
        return self.width // 8

    @property
    def mantissa_bits(self) -> int:
        return self.width - 1 - self.exponent_bits

    @property
    def max_int(self) -> int:
        """All bits but the sign."""
        return (1 << (self.width - 1)) - 1


LAYOUTS: dict[torch.dtype, FloatLayout] = {
    torch.bfloat16: FloatLayout(torch.bfloat16, torch.int16, 16, 8),
    torch.float16: FloatLayout(torch.float16, torch.int16, 16, 5),
    torch.float32: FloatLayout(torch.float32, torch.int32, 32, 8),
}


def exponents(bits_N: Tensor, layout: FloatLayout) -> Tensor:
    """The exponent field of each value, as uint8 of shape (N,)."""
    mask = (1 << layout.exponent_bits) - 1
    return (bits_N >> layout.mantissa_bits).bitwise_and_(mask).to(torch.uint8)


def sign_mantissa_bytes(num_values: int, layout: FloatLayout) -> int:
    """Size in bytes of the packed sign-and-mantissa plane of ``num_values`` values."""
    if layout.dtype == torch.float16:
        return num_values + 3 * ((num_values + 7) // 8)
    return num_values * (1 + layout.mantissa_bits) // 8


def sign_mantissa(bits_N: Tensor, layout: FloatLayout) -> Tensor:
    """The sign and mantissa of each value, packed: uint8 of ``sign_mantissa_bytes(N)``.

    fp32 keeps 3 bytes a value; fp16 keeps the low 8 of its 11 bits as a byte a value, followed by
    the upper 3 bits of eight values in every 3 bytes.
    """
    sign = (bits_N >> layout.exponent_bits).bitwise_and_(1 << layout.mantissa_bits)
    field = sign.bitwise_or_(bits_N & ((1 << layout.mantissa_bits) - 1))
    if layout.dtype == torch.bfloat16:
        return field.to(torch.uint8)
    if layout.dtype == torch.float32:
        return field.view(torch.uint8).view(-1, 4)[:, :3].reshape(-1)
    low = (field & 0xFF).to(torch.uint8)
    return torch.cat([low, _pack_3_bits((field >> 8).to(torch.int32))])


def merge(exponents_N: Tensor, sign_mantissa_plane: Tensor, layout: FloatLayout) -> Tensor:
    """Inverse of ``exponents`` and ``sign_mantissa``: the bits of shape (N,)."""
    num_values = exponents_N.numel()
    if layout.dtype == torch.bfloat16:
        field = sign_mantissa_plane.to(layout.bits)
    elif layout.dtype == torch.float32:
        field = pad(sign_mantissa_plane.view(-1, 3), (0, 1)).view(torch.int32).view(-1)
    else:
        high = _unpack_3_bits(sign_mantissa_plane[num_values:], num_values)
        field = sign_mantissa_plane[:num_values].to(layout.bits) | (high.to(layout.bits) << 8)
    sign = (field >> layout.mantissa_bits) << (layout.width - 1)
    bits = exponents_N.to(layout.bits) << layout.mantissa_bits
    return bits.bitwise_or_(field & ((1 << layout.mantissa_bits) - 1)).bitwise_or_(sign)


def _pack_3_bits(values_N: Tensor) -> Tensor:
    """Eight int32 values below 8 into every three bytes, zero-padded at the end."""
    values = pad(values_N, (0, -values_N.numel() % 8)).view(-1, 8)
    shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=values.device)
    words = (values << shifts).sum(dim=1, dtype=torch.int32)
    return words.view(torch.uint8).view(-1, 4)[:, :3].reshape(-1)


def _unpack_3_bits(packed: Tensor, num_values: int) -> Tensor:
    words = pad(packed.view(-1, 3), (0, 1)).contiguous().view(torch.int32)
    shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=packed.device)
    return ((words.view(-1, 1) >> shifts) & 7).view(-1)[:num_values]


def ordered(bits_N: Tensor, layout: FloatLayout) -> Tensor:
    """Sign-magnitude bits as two's complement integers in the order of the floats.

    Neighbouring floats become neighbouring integers, across zero too. Its own inverse.
    """
    flipped = (bits_N >> (layout.width - 1)).bitwise_and_(layout.max_int)
    return flipped.bitwise_xor_(bits_N)


def zigzag_difference(new_N: Tensor, old_N: Tensor, layout: FloatLayout) -> Tensor:
    """``new - old`` on ordered integers modulo 2**width, small magnitudes to small codes."""
    difference = ordered(new_N, layout).sub_(ordered(old_N, layout))
    return (difference << 1).bitwise_xor_(difference >> (layout.width - 1))


def apply_zigzag_planes(planes: Tensor, old_N: Tensor, layout: FloatLayout) -> Tensor:
    """Inverse of ``zigzag_difference``, from its ``byte_planes``: the new bits of shape (N,).

    The lowest bit, which is the sign, is taken off before bytes become integers: bytes are faster.
    """
    lowest, *others = planes.view(layout.itemsize, planes.numel() // layout.itemsize)
    difference = (lowest >> 1).to(layout.bits)
    for significance, plane_N in enumerate(others, start=1):
        difference |= plane_N.to(layout.bits).bitwise_left_shift_(8 * significance - 1)
    difference ^= (lowest & 1).neg_().view(torch.int8).to(layout.bits)
    return ordered(difference.add_(ordered(old_N, layout)), layout)


def byte_planes(integers_N: Tensor) -> Tensor:
    """All lowest bytes, then all next bytes, and so on: uint8 of N * itemsize."""
    planes = integers_N.new_empty(
        (integers_N.element_size(), integers_N.numel()), dtype=torch.uint8
    )
    for significance, plane_N in enumerate(planes):
        plane_N.copy_(integers_N >> 8 * significance)
    return planes.view(-1)


def from_byte_planes(planes: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of ``byte_planes``."""
    plane_per_byte = planes.view(dtype.itemsize, planes.numel() // dtype.itemsize)
    integers_N = plane_per_byte[0].to(dtype)
    for significance, plane_N in enumerate(plane_per_byte[1:], start=1):
        integers_N |= plane_N.to(dtype) << 8 * significance
    return integers_N
