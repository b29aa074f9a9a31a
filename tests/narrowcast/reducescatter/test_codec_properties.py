"""Any contribution to a gradient: what is decoded is what was encoded, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from narrowcast.reducescatter import codec
from narrowcast.wire.coders import Zstd
from narrowcast.wire.floats import FloatLayout
from tests.strategies import SIZES, bits, layouts, settings

CODER = Zstd()


@st.composite
def contributions(draw: st.DrawFn, layout: FloatLayout) -> Tensor:
    """Values of which some may be zeros and, of fp32, all may have the bits of bf16 alone."""
    bits_N = draw(bits(layout, draw(st.sampled_from(SIZES))))
    if layout.dtype == torch.float32 and draw(st.booleans()):
        bits_N = bits_N & -(1 << 16)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    is_zero = torch.rand(bits_N.numel(), generator=generator) < draw(st.sampled_from([0, 0.5, 1]))
    return bits_N.masked_fill(is_zero, 0).view(layout.dtype)


@pytest.mark.parametrize("compression", ["entropy", "none"])
@settings(max_examples=40)
@given(data=st.data())
def test_any_contribution_is_decoded_bit_for_bit(compression: str, data: st.DataObject) -> None:
    layout = data.draw(layouts)
    values_N = data.draw(contributions(layout))
    encoded = codec.encode(values_N.clone(), compression, CODER)
    decoded_N = torch.full_like(values_N, torch.nan)
    codec.decode_into(decoded_N, encoded, CODER)
    assert torch.equal(decoded_N.view(layout.bits), values_N.view(layout.bits))
    assert encoded.size <= values_N.numel() * layout.itemsize
