"""Encodes a chunk given what its receivers have cached, and decodes it bitwise identical.

Pure functions on tensors. A chunk is given as ``bits_N``, the integer view of its floats. What a
receiver caches of a chunk, ``cached_N``, is what the sender sent last: the values (the same
integers), the exponents (uint8), or nothing. The sender knows it, and sends only what is missing:

    compression  cached     sent
    none         nothing    the bits
    entropy      nothing    sign-and-mantissa plane, entropy-coded exponents
    exponent     exponents  sign-and-mantissa plane, and of the exponents, by ``exponent_coding``,
                              blocks:  a bitmap and the entropy-coded exponents of changed blocks
                                       (CIERA, section 3.1 and algorithm 1), or
                              delta:   the entropy-coded difference to the cached exponents
    delta        values     the entropy-coded difference of the bit patterns, on integers in the
                            order of the floats, one byte plane after the other

What does not change is not sent: an ``exponent`` chunk without new exponents has no exponent
section, and the section of an unchanged ``delta`` chunk is empty. The first time, and where the
compression would save nothing, a simpler form is used: no chunk is ever sent larger than its bits.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.wire import floats
from narrowcast.wire.coders import Coder
from narrowcast.wire.floats import FloatLayout
from narrowcast.wire.packet import Encoded, Form, encode_raw

Compression = Literal["delta", "exponent", "entropy", "none"]
ExponentCoding = Literal["delta", "blocks"]
BlockCheck = Literal["compare", "hash"]


@dataclass(frozen=True)
class Scheme:
    """How a shard is compressed; the same on every rank of its group.

    Attributes:
        compression: what receivers cache, and so what need not be sent.
        exponent_coding: for ``exponent`` only: how changed exponents are sent.
        block_size: values a block, for ``exponent_coding = "blocks"``.
        block_check: how a sender finds the changed blocks: it caches the exponents that it sent
            last and compares, which is exact and faster, or it caches a 128-bit hash of each block.
            (Hashing takes some thousand small tensor operations, however small the chunk is.)
    """

    compression: Compression
    exponent_coding: ExponentCoding = "delta"
    block_size: int = 512
    block_check: BlockCheck = "compare"

    @property
    def forms(self) -> set[Form]:
        """The forms in which a chunk may arrive."""
        if self.compression == "none":
            return {Form.RAW}
        if self.compression == "entropy":
            return {Form.RAW, Form.ENTROPY}
        if self.compression == "delta":
            return {Form.RAW, Form.ENTROPY, Form.DELTA}
        if self.exponent_coding == "blocks":
            return {Form.RAW, Form.ENTROPY, Form.EXPONENT_BLOCKS}
        return {Form.RAW, Form.ENTROPY, Form.EXPONENT_DELTA}

    @property
    def caches_hashes(self) -> bool:
        """Whether the sender caches hashes where its receivers cache exponents."""
        uses_blocks = self.compression == "exponent" and self.exponent_coding == "blocks"
        return uses_blocks and self.block_check == "hash"


def receiver_cache(bits_N: Tensor, scheme: Scheme, layout: FloatLayout) -> Tensor | None:
    """What is cached of a chunk that was just received."""
    if scheme.compression == "delta":
        return bits_N
    return floats.exponents(bits_N, layout) if scheme.compression == "exponent" else None


def sender_cache(bits_N: Tensor, scheme: Scheme, layout: FloatLayout) -> Tensor | None:
    """What is cached of a chunk that was just sent, to encode the next one with."""
    if scheme.caches_hashes:
        return block_hashes(floats.exponents(bits_N, layout), scheme.block_size)
    return receiver_cache(bits_N, scheme, layout)


def encode(
    bits_N: Tensor, cached: Tensor | None, scheme: Scheme, layout: FloatLayout, coder: Coder
) -> Encoded:
    """Encodes a chunk.

    Args:
        bits_N: the chunk as integers of ``layout.bits``.
        cached: ``sender_cache`` of the chunk that was sent before; ``None`` if none was.
    """
    if scheme.compression == "none" or bits_N.numel() == 0:
        return encode_raw(bits_N)
    if scheme.compression == "entropy" or cached is None:
        return encode_entropy(bits_N, layout, coder)
    if scheme.compression == "delta":
        return encode_delta(bits_N, cached, layout, coder)
    if scheme.exponent_coding == "delta":
        return encode_exponent_delta(bits_N, cached, layout, coder)
    exponents_N = floats.exponents(bits_N, layout)
    if scheme.caches_hashes:
        changed_B = (block_hashes(exponents_N, scheme.block_size) != cached).any(dim=1)
    else:
        changed_B = changed_blocks(exponents_N, cached, scheme.block_size)
    return encode_exponent_blocks(bits_N, changed_B, scheme.block_size, layout, coder)


def decode(
    encoded: Encoded,
    cached_N: Tensor | None,
    num_values: int,
    scheme: Scheme,
    layout: FloatLayout,
    coder: Coder,
) -> Tensor:
    """The bits of shape (N,) that ``encode`` was given.

    Args:
        cached_N: ``receiver_cache`` of the chunk that was received before; ``None`` if none was.

    Raises:
        ValueError: the sections do not fit the form (``CoderError`` where the coder finds it).
    """
    if encoded.form not in scheme.forms:
        raise ValueError(f"{encoded.form.name} arrived under compression {scheme.compression}")
    match encoded.form:
        case Form.RAW:
            (section,) = encoded.sections
            _expect_size(section, num_values * layout.itemsize, "none")
            return section.clone().view(layout.bits)
        case Form.ENTROPY:
            plane, section = encoded.sections
            exponents_N = _decode_exponents(section, num_values, coder)
        case _ if cached_N is None:
            raise ValueError(f"{encoded.form.name} arrived where nothing is cached")
        case Form.DELTA:
            (section,) = encoded.sections
            if section.numel() == 0:
                return cached_N
            planes = coder.decode(section, num_values * layout.itemsize)
            return floats.apply_zigzag_planes(planes, cached_N, layout)
        case Form.EXPONENT_DELTA:
            plane, section = encoded.sections
            exponents_N = cached_N
            if section.numel():
                exponents_N = _decode_exponents(section, num_values, coder).add_(cached_N)
        case Form.EXPONENT_BLOCKS:
            plane, bitmap, section = encoded.sections
            exponents_N = _replace_blocks(cached_N, bitmap, section, scheme.block_size, coder)
    _expect_size(plane, floats.sign_mantissa_bytes(num_values, layout), "sign and mantissa")
    return floats.merge(exponents_N, plane, layout)


def encode_entropy(bits_N: Tensor, layout: FloatLayout, coder: Coder) -> Encoded:
    plane = floats.sign_mantissa(bits_N, layout)
    return _no_larger_than_bits(
        Encoded(Form.ENTROPY, (plane, _entropy_coded(floats.exponents(bits_N, layout), coder))),
        bits_N,
    )


def encode_delta(bits_N: Tensor, cached_N: Tensor, layout: FloatLayout, coder: Coder) -> Encoded:
    if torch.equal(bits_N, cached_N):
        return Encoded(Form.DELTA, (bits_N.new_empty(0, dtype=torch.uint8),))
    planes = floats.byte_planes(floats.zigzag_difference(bits_N, cached_N, layout))
    return _no_larger_than_bits(Encoded(Form.DELTA, (_entropy_coded(planes, coder),)), bits_N)


def encode_exponent_delta(
    bits_N: Tensor, cached_N: Tensor, layout: FloatLayout, coder: Coder
) -> Encoded:
    plane = floats.sign_mantissa(bits_N, layout)
    difference = floats.exponents(bits_N, layout).sub_(cached_N)
    section = _entropy_coded(difference, coder) if difference.any() else difference[:0]
    return _no_larger_than_bits(Encoded(Form.EXPONENT_DELTA, (plane, section)), bits_N)


def encode_exponent_blocks(
    bits_N: Tensor, changed_B: Tensor, block_size: int, layout: FloatLayout, coder: Coder
) -> Encoded:
    """Algorithm 1 of CIERA, sender. ``changed_B`` has one bool a block of ``block_size`` values,
    from ``changed_blocks`` or from comparing ``block_hashes``."""
    plane = floats.sign_mantissa(bits_N, layout)
    exponents_BS = _to_blocks(floats.exponents(bits_N, layout), block_size)
    changed = exponents_BS[changed_B].view(-1)
    sections = (plane, _pack_bits(changed_B), _entropy_coded(changed, coder))
    return _no_larger_than_bits(Encoded(Form.EXPONENT_BLOCKS, sections), bits_N)


def changed_blocks(exponents_N: Tensor, cached_N: Tensor, block_size: int) -> Tensor:
    """Which blocks hold a changed exponent, by direct comparison: bool of shape (B,).

    Exact, and faster than hashing, for a sender that caches the exponents that it sent last.
    """
    return (_to_blocks(exponents_N, block_size) != _to_blocks(cached_N, block_size)).any(dim=1)


def block_hashes(exponents_N: Tensor, block_size: int) -> Tensor:
    """A 128-bit hash of each block of exponents: int64 of shape (B, 2).

    Two independent SplitMix64 hashes (CIERA, section 3.1), for a sender that caches no exponents:
    16 bytes a block in the place of one a value. A block counts as unchanged if its hash is; a
    collision has probability 2**-128.
    """
    blocks = _to_blocks(exponents_N, block_size)
    words_BW = pad(blocks, (0, -block_size % 8)).contiguous().view(torch.int64)
    return torch.stack([_splitmix64(words_BW, seed) for seed in _SEEDS], dim=1)


_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)  # the first digits of pi
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)


def _splitmix64(words_BW: Tensor, seed: int) -> Tensor:
    """Chains SplitMix64's mixer (Steele, Lea and Flood, 2014) over the words of every block."""
    state_B = words_BW.new_full((words_BW.shape[0],), seed)
    for word_B in words_BW.t().contiguous():
        state_B = (state_B ^ word_B).add_(_GAMMA)
        state_B = (state_B ^ _shift_right(state_B, 30)).mul_(0xBF58476D1CE4E5B9 - (1 << 64))
        state_B = (state_B ^ _shift_right(state_B, 27)).mul_(0x94D049BB133111EB - (1 << 64))
        state_B = state_B ^ _shift_right(state_B, 31)
    return state_B


def _shift_right(word: Tensor, shift: int) -> Tensor:
    """Logical shift; torch's own is arithmetic on int64."""
    return (word >> shift) & ((1 << (64 - shift)) - 1)


def _decode_exponents(section: Tensor, num_values: int, coder: Coder) -> Tensor:
    return coder.decode(section, num_values) if num_values else section


def _replace_blocks(
    cached_N: Tensor, bitmap: Tensor, section: Tensor, block_size: int, coder: Coder
) -> Tensor:
    """Algorithm 1 of CIERA, receiver: the cached exponents with changed blocks replaced."""
    num_blocks = -(-cached_N.numel() // block_size)
    _expect_size(bitmap, (num_blocks + 7) // 8, "bitmap")
    changed_B = _unpack_bits(bitmap, num_blocks)
    num_changed = int(changed_B.sum())
    if num_changed == 0:
        _expect_size(section, 0, "changed exponents")
        return cached_N
    exponents_BS = _to_blocks(cached_N, block_size).clone()
    exponents_BS[changed_B] = coder.decode(section, num_changed * block_size).view(-1, block_size)
    return exponents_BS.view(-1)[: cached_N.numel()]


def _entropy_coded(data: Tensor, coder: Coder) -> Tensor:
    return coder.encode(data) if data.numel() else data


def _no_larger_than_bits(encoded: Encoded, bits_N: Tensor) -> Encoded:
    size_of_bits = bits_N.numel() * bits_N.element_size()
    return encoded if encoded.size < size_of_bits else encode_raw(bits_N)


def _expect_size(section: Tensor, size: int, name: str) -> None:
    if section.numel() != size:
        raise ValueError(f"{name} section of {section.numel()} bytes where {size} were due")


def _to_blocks(values_N: Tensor, block_size: int) -> Tensor:
    """(N,) as (B, block_size), the last block padded with zeros."""
    padding = -values_N.numel() % block_size
    return (pad(values_N, (0, padding)) if padding else values_N).view(-1, block_size)


def _pack_bits(mask_B: Tensor) -> Tensor:
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=mask_B.device)
    bits = pad(mask_B.to(torch.uint8), (0, -mask_B.numel() % 8)).view(-1, 8)
    return (bits * weights).sum(dim=1, dtype=torch.uint8)


def _unpack_bits(packed: Tensor, num_bits: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.view(-1, 1) >> shifts) & 1).view(-1)[:num_bits].bool()
