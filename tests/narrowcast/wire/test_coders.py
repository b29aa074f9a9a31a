"""Entropy coders: exactly the same bytes back, or a ``CoderError``; never anything else."""

import zlib

import pytest
import torch
import zstandard
from torch import Tensor

from narrowcast.wire.coders import CODERS, CoderError, Zstd, find_coder

each_coder = pytest.mark.parametrize("coder", CODERS.values(), ids=CODERS.keys())


def uint8(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def exponents(size: int) -> Tensor:
    """Bytes distributed as the exponents of Gaussian weights are."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    return (values.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)


@each_coder
def test_the_same_bytes_come_back(coder):
    generator = torch.Generator().manual_seed(0)
    for size in (0, 1, 7, 8, 9, 511, 512, 513, 70_001):
        noise = torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)
        for data in (noise, exponents(size), torch.zeros_like(noise)):
            stream = coder.encode(data)
            assert stream.dtype == torch.uint8
            assert stream.dim() == 1
            decoded = coder.decode(stream, size)
            assert decoded.dtype == torch.uint8
            assert torch.equal(decoded, data)


@each_coder
def test_exponents_take_less_than_half_of_their_bytes(coder):
    assert coder.encode(exponents(100_000)).numel() < 50_000


@each_coder
def test_data_may_lie_anywhere_in_memory_and_is_not_written_to(coder):
    data = exponents(4001)
    before = data.clone()
    stream = torch.cat([data[:3], coder.encode(data[1::2])])[3:]
    decoded = coder.decode(stream, 2000)
    assert torch.equal(decoded, data[1::2])
    decoded.fill_(0)
    assert torch.equal(data, before)
    assert torch.equal(coder.decode(stream, 2000), data[1::2])


@each_coder
def test_encoding_is_deterministic(coder):
    assert torch.equal(coder.encode(exponents(5000)), coder.encode(exponents(5000).clone()))


@each_coder
@pytest.mark.parametrize("size", [0, 1, 999, 1001, 1 << 40])
def test_a_stream_of_another_size_is_an_error(coder, size):
    with pytest.raises(CoderError, match=str(size)):
        coder.decode(coder.encode(exponents(1000)), size)


@each_coder
def test_a_stream_cut_or_continued_anywhere_is_an_error(coder):
    stream = coder.encode(exponents(1000))
    for length in range(stream.numel()):
        with pytest.raises(CoderError):
            coder.decode(stream[:length], 1000)
    for more in (stream.new_zeros(1), stream.new_full((100,), 0xFF), stream):
        with pytest.raises(CoderError):
            coder.decode(torch.cat([stream, more]), 1000)


@each_coder
def test_any_damaged_byte_is_a_coder_error_or_gives_as_many_bytes(coder):
    """A coder need not see all damage (a payload has a checksum for that), but never crashes."""
    stream = coder.encode(exponents(1000))
    errors = 0
    for position in range(stream.numel()):
        for flip in (0x01, 0x10, 0x80, 0xFF):
            damaged = stream.clone()
            damaged[position] ^= flip
            try:
                assert coder.decode(damaged, 1000).numel() == 1000
            except CoderError:
                errors += 1
    assert errors > 0


def test_what_is_no_zstd_frame_is_an_error():
    data = bytes(exponents(1000).numpy())
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(data)
    skippable = b"\x50\x2a\x4d\x18" + (8).to_bytes(4, "little") + bytes(8)
    for stream in (b"", b"\x00", b"(\xb5/\xfd", data, zlib.compress(data), unsized, skippable):
        with pytest.raises(CoderError):
            Zstd().decode(uint8(stream), 1000)


def test_a_coder_error_is_a_value_error_that_names_its_cause():
    with pytest.raises(ValueError, match="not a zstd frame of 7 bytes") as raised:
        Zstd().decode(uint8(b"nonsense"), 7)
    assert isinstance(raised.value, CoderError)


def test_coders_have_wire_ids_that_fit_a_byte_and_differ():
    ids = [(coder.wire_id, coder.wire_version) for coder in CODERS.values()]
    assert len({wire_id for wire_id, _ in ids}) == len(ids)
    assert all(0 < number < 256 for pair in ids for number in pair)  # (0, 0): no coder


def test_coders_are_found_by_name_and_unknown_ones_refused_with_the_allowed():
    assert find_coder("zstd") is CODERS["zstd"]
    assert find_coder("auto") in CODERS.values()
    with pytest.raises(ValueError, match=r"coder = 'lz4'; .*'auto'.*'zstd'"):
        find_coder("lz4")
