"""Encodes a chunk of one rank's contribution to a gradient, and decodes it bitwise identical.

Nothing is cached from step to step, since gradients of two steps have little in common. What can be
left out is what a contribution does not contain. A bf16 gradient is cast to fp32 before it is
reduced, so 16 of its 32 bits are zeros; its exponents take about 3 bits; and a parameter that no
token used (of an expert, of an embedding) has a gradient of zeros.

    form    values                                        sent
    ZEROS   all bits are 0                                nothing
    PLANES  of 16 bits, or fp32 that are bf16-valued      sign-and-mantissa plane (entropy-coded if
                                                          there are zeros in it), coded exponents
    HALVES  fp32 (accumulated, or of fp32 training)       PLANES of the upper halves as bf16; byte
                                                          planes of the lower ones, coded or not
    RAW     no form is smaller, or other dtypes           the bits

Whether fp32 values are bf16-valued is read from their bits, chunk by chunk.
"""

from typing import Literal

import torch
from torch import Tensor

from narrowcast.wire import floats
from narrowcast.wire.coders import Coder
from narrowcast.wire.floats import LAYOUTS
from narrowcast.wire.packet import Encoded, Form, encode_raw

Compression = Literal["entropy", "none"]

_BF16 = LAYOUTS[torch.bfloat16]
_FP32 = LAYOUTS[torch.float32]
# Of sign and mantissa only zero values are compressible; below this share of them, entropy coding
# is not worth its time.
_LEAST_ZEROS = 1 / 64


def encode(values_N: Tensor, compression: Compression, coder: Coder) -> Encoded:
    """Encodes a chunk of a contribution, of any dtype; only floats of ``LAYOUTS`` get smaller."""
    layout = LAYOUTS.get(values_N.dtype)
    if compression == "none" or layout is None or values_N.numel() == 0:
        return encode_raw(values_N)
    bits_N = values_N.view(layout.bits)
    upper_N, upper_layout = bits_N, layout
    if layout is _FP32:
        upper_N, upper_layout = (bits_N >> 16).to(_BF16.bits), _BF16
    exponents_N = floats.exponents(upper_N, upper_layout)
    num_nonzero = int(exponents_N.count_nonzero())
    if num_nonzero == 0 and bits_N.count_nonzero() == 0:
        return Encoded(Form.ZEROS, ())
    plane = floats.sign_mantissa(upper_N, upper_layout)
    if num_nonzero <= (1 - _LEAST_ZEROS) * bits_N.numel():
        plane = _smaller(plane, coder)
    encoded = Encoded(Form.PLANES, (plane, coder.encode(exponents_N)))
    if layout is _FP32 and (bits_N & 0xFFFF).count_nonzero():
        lower = floats.byte_planes(bits_N.to(torch.int16))
        encoded = Encoded(Form.HALVES, (*encoded.sections, _smaller(lower, coder)))
    raw_size = values_N.numel() * values_N.element_size()
    return encoded if encoded.size < raw_size else encode_raw(values_N)


def decode_into(values_N: Tensor, encoded: Encoded, coder: Coder) -> None:
    """Decodes what ``encode`` was given, into ``values_N``.

    Raises:
        ValueError: the sections do not fit the form (``CoderError`` where the coder finds it), or
            the form does not fit the dtype.
    """
    num_values, layout = values_N.numel(), LAYOUTS.get(values_N.dtype)
    match encoded.form:
        case Form.RAW:
            (section,) = encoded.sections
            raw = values_N.view(torch.uint8)
            if section.numel() != raw.numel():
                raise ValueError(f"raw section of {section.numel()} bytes, {raw.numel()} were due")
            raw.copy_(section)
        case Form.ZEROS:
            values_N.zero_()
        case Form.PLANES if layout is not None and layout is not _FP32:
            values_N.view(layout.bits).copy_(_decode_planes(encoded, num_values, layout, coder))
        case Form.PLANES | Form.HALVES if layout is _FP32:
            bits_N = values_N.view(torch.int32)
            bits_N.copy_(_decode_planes(encoded, num_values, _BF16, coder))
            bits_N <<= 16
            if encoded.form == Form.HALVES:
                planes = _decode_smaller(encoded.sections[2], 2 * num_values, coder)
                bits_N |= floats.from_byte_planes(planes, torch.int16).to(torch.int32) & 0xFFFF
        case _:
            raise ValueError(f"{encoded.form.name} arrived where {values_N.dtype} was due")


def _decode_planes(
    encoded: Encoded, num_values: int, layout: floats.FloatLayout, coder: Coder
) -> Tensor:
    size = floats.sign_mantissa_bytes(num_values, layout)
    plane = _decode_smaller(encoded.sections[0], size, coder)
    return floats.merge(coder.decode(encoded.sections[1], num_values), plane, layout)


def _smaller(plane: Tensor, coder: Coder) -> Tensor:
    coded = coder.encode(plane)
    return coded if coded.numel() < plane.numel() else plane


def _decode_smaller(section: Tensor, size: int, coder: Coder) -> Tensor:
    """Inverse of ``_smaller``: a section as large as the plane is the plane."""
    return section if section.numel() == size else coder.decode(section, size)
