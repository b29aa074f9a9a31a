"""How much of a shard changed since it was last sent, and of what kind the shard is."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.telemetry.over_ranks import summed
from narrowcast.util import Summable
from narrowcast.wire import floats
from narrowcast.wire.floats import FloatLayout

SHARD_TYPES = ("expert_ffn", "router", "attention", "norm", "embedding", "other")
_SHARD_TYPE_PATTERNS = (
    ("norm", r"norm"),
    ("router", r"router|\bgate\b"),
    ("expert_ffn", r"expert"),
    ("attention", r"attn|attention|\bw[qkvo]\b|\b[qkvo]_proj\b"),
    ("embedding", r"embed|lm_head|\boutput\b|\bwte\b"),
)


def shard_type(parameter_name: str) -> str:
    """The kind of shard (one of ``SHARD_TYPES``) that a parameter's name refers to."""
    for kind, pattern in _SHARD_TYPE_PATTERNS:
        if re.search(pattern, parameter_name, re.IGNORECASE):
            return kind
    return "other"


@dataclass(frozen=True)
class Changes(Summable):
    """How much of a shard changed since it was last sent, in values and in blocks.

    ``compared_values`` is 0 where only exponents are cached, so that values cannot be compared.
    """

    values: int = summed()
    compared_values: int = summed()
    changed_values: int = summed()
    changed_exponents: int = summed()
    blocks: int = summed()
    changed_blocks: int = summed()

    def rates(self) -> dict[str, float]:
        """Shares of what was compared."""
        rates = {
            "changed_exponents": self.changed_exponents / self.values,
            "changed_blocks": self.changed_blocks / self.blocks,
        }
        if self.compared_values:
            rates["changed_values"] = self.changed_values / self.compared_values
        return rates


def count_changes(
    bits_N: Tensor, cached_N: Tensor, layout: FloatLayout, block_size: int
) -> Changes:
    """Compares a shard, as integers of ``layout.bits``, with what is cached of the one before: the
    same integers, or exponents (uint8)."""
    caches_values = cached_N.dtype == layout.bits
    if caches_values:
        difference_N = bits_N ^ cached_N
        changed_values = int(difference_N.count_nonzero())
        exponent_mask = layout.max_int & ~((1 << layout.mantissa_bits) - 1)
        difference_N &= exponent_mask
    else:
        changed_values = 0
        difference_N = floats.exponents(bits_N, layout).bitwise_xor_(cached_N)
    blocks_BS = pad(difference_N, (0, -bits_N.numel() % block_size)).view(-1, block_size)
    return Changes(
        values=bits_N.numel(),
        compared_values=bits_N.numel() if caches_values else 0,
        changed_values=changed_values,
        changed_exponents=int(difference_N.count_nonzero()),
        blocks=len(blocks_BS),
        changed_blocks=int(_any_nonzero(blocks_BS).count_nonzero()),
    )


def _any_nonzero(blocks_BS: Tensor) -> Tensor:
    """Which rows hold a value that is not zero, compared eight bytes at a time where they fit."""
    if blocks_BS.shape[1] * blocks_BS.element_size() % 8 == 0:
        blocks_BS = blocks_BS.contiguous().view(torch.int64)
    return blocks_BS.ne(0).any(dim=1)
