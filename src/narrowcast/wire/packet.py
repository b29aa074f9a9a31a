"""The layout of a payload, and every check made on one that arrives.

A payload is what one rank sends of one parameter group. It starts with a header of fixed size,
which describes the rest, and ends with a body of as many bytes as this shard takes:

    header  +------------------------------------------------------------------------------+
            | magic, version | status | coder | number of chunks | settings | sequence     |
            | body size, checksum | checksum of the shard itself (0: not verified)         |
            | for each chunk: form, sizes of its three sections                            |
            | checksum of the header                                                       |
    body    | the sections, chunk after chunk (of a rank that failed: its error, as text)  |
            +------------------------------------------------------------------------------+

A chunk is a sequence of neighbouring values that share a scheme and a dtype. ``sequence`` counts
the gathers that went into the sender's cache; a receiver with another count has another cache (it
is 0 in a reduce-scatter, which caches nothing). The checks of a gather use only bytes that every
rank of the group received, so all ranks raise the same error.
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.errors import OutOfStepError, PayloadError, SenderError, SettingsError
from narrowcast.wire.coders import Coder

MAGIC = b"NCAG"
VERSION = 2
_FIXED = struct.Struct("<4sBBBBIQQQQQ")
_NUM_CHUNKS = struct.Struct("<I")  # within _FIXED
_NUM_CHUNKS_OFFSET = 8
_CHUNK = struct.Struct("<BQQQ")
_CHECKSUM = struct.Struct("<I")


class Form(IntEnum):
    """What the sections of an encoded chunk hold; its number is what the wire carries."""

    RAW = 0  # bits
    ENTROPY = 1  # sign-and-mantissa plane, coded exponents
    EXPONENT_BLOCKS = 2  # sign-and-mantissa plane, bitmap, coded exponents of changed blocks
    EXPONENT_DELTA = 3  # sign-and-mantissa plane, coded difference of exponents
    DELTA = 4  # coded byte planes of the difference; nothing if unchanged
    # For gradients (``narrowcast.reducescatter.codec``):
    ZEROS = 5  # nothing
    PLANES = 6  # sign-and-mantissa plane, coded where that is smaller; coded exponents
    HALVES = 7  # PLANES of the upper 16 bits; byte planes of the lower, coded where that is smaller


SECTIONS: dict[Form, int] = {
    Form.RAW: 1,
    Form.ENTROPY: 2,
    Form.EXPONENT_BLOCKS: 3,
    Form.EXPONENT_DELTA: 2,
    Form.DELTA: 1,
    Form.ZEROS: 0,
    Form.PLANES: 2,
    Form.HALVES: 3,
}


@dataclass(frozen=True)
class Encoded:
    """One encoded chunk: its form and its sections, uint8, which may be empty."""

    form: Form
    sections: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        """Bytes of all sections."""
        return sum(section.numel() for section in self.sections)


def encode_raw(bits_N: Tensor) -> Encoded:
    """A chunk as it is."""
    return Encoded(Form.RAW, (bits_N.contiguous().view(torch.uint8),))


class Status(IntEnum):
    OK = 0
    FAILED = 1


@dataclass(frozen=True)
class Header:
    """The header of a payload.

    Attributes:
        settings: a digest of all that the ranks of a group must agree on.
        sequence: gathers that went into the sender's cache.
        body_size: in bytes.
        body_checksum, shard_checksum: from ``checksum``; of the body, and of the shard before it
            was encoded (0 where it is not to be verified).
        chunks: form and section sizes in bytes of each chunk.
    """

    status: Status
    coder: tuple[int, int]
    settings: int
    sequence: int
    body_size: int
    body_checksum: int
    shard_checksum: int
    chunks: tuple[tuple[Form, tuple[int, ...]], ...]


def header_size(num_chunks: int) -> int:
    """Bytes of the header of a payload with this many chunks."""
    return _FIXED.size + num_chunks * _CHUNK.size + _CHECKSUM.size


def checksum(data: Tensor) -> int:
    """A checksum of the memory of a contiguous tensor; never 0, which stands for none.

    Any single changed byte and any swapped words change it. On the CPU a CRC-32; elsewhere, on the
    device, the sum of the 32-bit words, each multiplied by a factor of its position, modulo 2**64.
    """
    data = data.view(torch.uint8)
    if data.device.type == "cpu":
        return zlib.crc32(data.numpy()) | 1 << 32
    return word_checksum(data)


def word_checksum(data: Tensor) -> int:
    """``checksum`` as it is computed on an accelerator; ``data`` is uint8."""
    words = pad(data, (0, -data.numel() % 4)).view(torch.int32)
    factors = torch.arange(2, 4 * words.numel() + 2, 4, device=data.device)
    return int(factors.mul_(words).sum()) & 0xFFFFFFFFFFFFFFFF | 1


def pack(
    encoded_chunks: list[Encoded],
    *,
    coder: Coder,
    settings: int,
    sequence: int,
    shard_checksum: int,
    device: torch.device,
) -> Tensor:
    """The payload of one shard: header and body, uint8."""
    body = [section for encoded in encoded_chunks for section in encoded.sections]
    size_of_header = header_size(len(encoded_chunks))
    payload = torch.cat([torch.empty(size_of_header, dtype=torch.uint8, device=device), *body])
    body_bytes = payload[size_of_header:]
    header = Header(
        Status.OK,
        (coder.wire_id, coder.wire_version),
        settings,
        sequence,
        body_bytes.numel(),
        checksum(body_bytes),
        shard_checksum,
        tuple((e.form, tuple(s.numel() for s in e.sections)) for e in encoded_chunks),
    )
    payload[:size_of_header] = _pack_header(header).to(device)
    return payload


def pack_failure(
    error: Exception, *, num_chunks: int, settings: int, sequence: int, device: torch.device
) -> Tensor:
    """The payload of a rank that could not encode: every rank raises its ``error``, this rank
    too."""
    message = f"{type(error).__name__}: {error}".partition("\n")[0]
    text = bytearray(message.encode(errors="replace"))
    body = torch.frombuffer(text, dtype=torch.uint8).to(device)
    chunks = ((Form.RAW, ()),) * num_chunks
    header = Header(
        Status.FAILED, (0, 0), settings, sequence, body.numel(), checksum(body), 0, chunks
    )
    return torch.cat([_pack_header(header).to(device), body])


def _pack_header(header: Header) -> Tensor:
    fields = (header.status, *header.coder, len(header.chunks), header.settings, header.sequence)
    sizes = (header.body_size, header.body_checksum, header.shard_checksum)
    packed = bytearray(_FIXED.pack(MAGIC, VERSION, *fields, *sizes))
    for form, sections in header.chunks:
        packed += _CHUNK.pack(form, *(*sections, 0, 0, 0)[:3])
    packed += _CHECKSUM.pack(zlib.crc32(packed))
    return torch.frombuffer(packed, dtype=torch.uint8)


def unpack_header(data: bytes, num_chunks: int) -> Header:
    """Reads a header.

    Raises:
        PayloadError: it is damaged, or of another format.
    """
    if len(data) != header_size(num_chunks):
        raise PayloadError(f"has a header of {len(data)} bytes, not {header_size(num_chunks)}")
    content, stored = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    if content[:4] != MAGIC:
        raise PayloadError(f"starts with {content[:4]!r}, not with {MAGIC!r}")
    if content[4] != VERSION:
        raise PayloadError(f"has format version {content[4]}, this narrowcast reads {VERSION}")
    if _CHECKSUM.pack(zlib.crc32(content)) != stored:
        raise PayloadError("has a header that fails its checksum")
    _, _, status, *coder, _, settings, sequence, size, body_checksum, shard_checksum = (
        _FIXED.unpack_from(content)
    )
    chunks = []
    for chunk in range(num_chunks):
        number, *sections = _CHUNK.unpack_from(content, _FIXED.size + chunk * _CHUNK.size)
        form = Form(number)
        chunks.append((form, tuple(sections[: SECTIONS[form]])))
    return Header(
        Status(status),
        tuple(coder),
        settings,
        sequence,
        size,
        body_checksum,
        shard_checksum,
        tuple(chunks),
    )


def num_chunks_of(data: bytes) -> int:
    """The number of chunks that a header states."""
    (num_chunks,) = _NUM_CHUNKS.unpack_from(data, _NUM_CHUNKS_OFFSET)
    return num_chunks


def unpack(payload: Tensor) -> tuple[Header, Tensor]:
    """The header and the body of a payload, uint8, of any number of chunks.

    Raises:
        PayloadError: the header is damaged, or of another format.
    """
    start = _bytes(payload[: _FIXED.size])
    if len(start) < _FIXED.size:
        raise PayloadError(f"has {len(start)} bytes, less than a header")
    num_chunks = num_chunks_of(start)
    size_of_header = header_size(num_chunks)
    return unpack_header(_bytes(payload[:size_of_header]), num_chunks), payload[size_of_header:]


def _bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def check_agreement(headers: dict[int, Header]) -> None:
    """Checks that the shards of a gather can be decoded with the caches of all ranks.

    Args:
        headers: by global rank. Each rank's own is among them, so that all find the same.

    Raises:
        SettingsError: ranks have different settings or coders.
        OutOfStepError: ranks have different caches.
    """
    if len({header.settings for header in headers.values()}) > 1:
        raise SettingsError(
            f"ranks {list(headers)} were given different settings. Give every rank the same model, "
            "mesh, compression, exponent_coding, block_size, block_check, entropy_coder, "
            "verify_interval and parameters"
        )
    sound = {rank: header for rank, header in headers.items() if header.status == Status.OK}
    if len({header.coder for header in sound.values()}) > 1:
        coders = {rank: header.coder for rank, header in sound.items()}
        raise SettingsError(
            f"ranks use different coders (rank: (id, version)): {coders}. Install the same "
            "releases on every rank"
        )
    if len({header.sequence for header in headers.values()}) > 1:
        sequences = {rank: header.sequence for rank, header in headers.items()}
        raise OutOfStepError(
            f"ranks have cached different gathers (rank: count): {sequences}. A cache was "
            "dropped or a gather missed: call reset() of the handle on every rank, or restart"
        )


def unpack_body(header: Header, body: Tensor) -> list[Encoded]:
    """Cuts a body into its chunks, after checking it.

    Raises:
        PayloadError: the body is damaged.
        SenderError: it holds the error of a rank that could not encode.
    """
    if checksum(body) != header.body_checksum:
        raise PayloadError("has a body that fails its checksum: it was damaged on its way")
    if header.status == Status.FAILED:
        message = _bytes(body).decode(errors="replace")
        raise SenderError(f"reports that its rank could not encode: {message}")
    if sum(size for _, sizes in header.chunks for size in sizes) != body.numel():
        raise PayloadError("has sections that do not add up to its body")
    sections = iter(body.split([size for _, sizes in header.chunks for size in sizes]))
    return [Encoded(form, tuple(next(sections) for _ in sizes)) for form, sizes in header.chunks]
