"""What property tests draw: floats of any bit pattern, and what a receiver may hold of them."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from narrowcast.wire.floats import LAYOUTS, FloatLayout

# The same examples in every run, however slow the machine is.
settings.register_profile("narrowcast", derandomize=True, deadline=None, database=None)
settings.load_profile("narrowcast")

SIZES = (0, 1, 2, 7, 8, 9, 63, 65, 511, 512, 513, 1025, 3001)  # values; blocks hold up to 512

layouts = st.sampled_from(list(LAYOUTS.values()))


def special_patterns(layout: FloatLayout) -> list[int]:
    """Zeros, subnormals, the smallest and the largest normal values, infinities, and NaNs, quiet
    and signaling; of both signs, as signed integers."""
    mantissa, exponent = layout.mantissa_bits, (1 << layout.exponent_bits) - 1
    magnitudes = [0, 1, (1 << mantissa) - 1, 1 << mantissa, (exponent << mantissa) - 1]
    magnitudes += [exponent << mantissa, (exponent << mantissa) + 1, layout.max_int]
    return [sign + magnitude for magnitude in magnitudes for sign in (0, -layout.max_int - 1)]


@st.composite
def bits(draw: st.DrawFn, layout: FloatLayout, size: int) -> Tensor:
    """Any ``size`` patterns of ``layout``, as integers: a few that are drawn, in turn, and noise in
    a share of the places."""
    pattern = st.one_of(
        st.sampled_from(special_patterns(layout)), st.integers(-layout.max_int - 1, layout.max_int)
    )
    drawn = torch.tensor(draw(st.lists(pattern, min_size=1, max_size=9)), dtype=torch.int64)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    noise = torch.randint(-layout.max_int - 1, layout.max_int + 1, (size,), generator=generator)
    is_noise = torch.rand(size, generator=generator) < draw(st.sampled_from([0, 0.02, 0.5, 1]))
    repeated = drawn.repeat(-(-size // len(drawn)))[:size]
    return torch.where(is_noise, noise, repeated).to(layout.bits)


@st.composite
def later_bits(draw: st.DrawFn, earlier_N: Tensor, layout: FloatLayout) -> Tensor:
    """The same patterns, some of them, or others."""
    other_N = draw(bits(layout, earlier_N.numel()))
    share = draw(st.sampled_from([0, 0.02, 1]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    changes = torch.rand(earlier_N.numel(), generator=generator) < share
    return torch.where(changes, other_N, earlier_N)
