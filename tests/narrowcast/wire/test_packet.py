"""Payloads: every byte is protected, and whatever is wrong is an error that names it."""

import struct
import zlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from narrowcast import errors
from narrowcast.allgather import codec
from narrowcast.allgather.codec import Scheme
from narrowcast.errors import (
    NarrowcastError,
    OutOfStepError,
    PayloadError,
    SenderError,
    SettingsError,
)
from narrowcast.wire import packet
from narrowcast.wire.coders import Zstd
from narrowcast.wire.floats import LAYOUTS
from narrowcast.wire.packet import Encoded, Form, Status

CODER = Zstd()
CPU = torch.device("cpu")
BF16 = LAYOUTS[torch.bfloat16]
SCHEMES = (Scheme("none"), Scheme("delta"), Scheme("exponent", "blocks", 50), Scheme("delta"))
FLIPS = (0x01, 0x80, 0xFF)


def bits_of_weights(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).bfloat16().view(torch.int16)


OLD = [bits_of_weights(size, seed=0) for size in (5, 200, 151, 64)]
NEW = [OLD[0], OLD[1] + 1, OLD[2] ^ 0x81, OLD[3]]


def encode_chunks() -> list[Encoded]:
    """Four chunks: uncompressed, a difference of values, blocks of exponents, unchanged values."""
    return [
        codec.encode(new, codec.sender_cache(old, scheme, BF16), scheme, BF16, CODER)
        for new, old, scheme in zip(NEW, OLD, SCHEMES, strict=True)
    ]


def pack(chunks: list[Encoded] | None = None, settings: int = 7, sequence: int = 3) -> Tensor:
    return packet.pack(
        encode_chunks() if chunks is None else chunks,
        coder=CODER,
        settings=settings,
        sequence=sequence,
        shard_checksum=11,
        device=CPU,
    )


def receive(payload: Tensor, num_chunks: int) -> list[Encoded]:
    """What a receiver does with what should be a payload."""
    size_of_header = packet.header_size(num_chunks)
    header = packet.unpack_header(bytes(payload[:size_of_header].numpy()), num_chunks)
    body = payload[size_of_header : size_of_header + header.body_size]
    return packet.unpack_body(header, body)


def header_of(payload: Tensor, num_chunks: int) -> packet.Header:
    return packet.unpack_header(
        bytes(payload[: packet.header_size(num_chunks)].numpy()), num_chunks
    )


def damaged_bytes(payload: Tensor):
    for position in range(payload.numel()):
        for flip in FLIPS:
            damaged = payload.clone()
            damaged[position] ^= flip
            yield damaged


def with_sound_checksum(header: bytes) -> bytes:
    return header[:-4] + struct.pack("<I", zlib.crc32(header[:-4]))


def test_chunks_are_sent_in_a_payload_section_by_section_and_decode():
    sent = encode_chunks()
    assert [encoded.form for encoded in sent] == [
        Form.RAW,
        Form.DELTA,
        Form.EXPONENT_BLOCKS,
        Form.DELTA,
    ]
    payload = pack(sent)
    assert payload.numel() == packet.header_size(4) + sum(encoded.size for encoded in sent)
    arrived = receive(payload, num_chunks=4)
    for i, (one, other) in enumerate(zip(arrived, sent, strict=True)):
        assert one.form == other.form
        assert all(torch.equal(*pair) for pair in zip(one.sections, other.sections, strict=True))
        cached = codec.receiver_cache(OLD[i], SCHEMES[i], BF16)
        bits = codec.decode(one, cached, NEW[i].numel(), SCHEMES[i], BF16, CODER)
        assert torch.equal(bits, NEW[i])


def test_a_header_states_what_was_packed():
    header = header_of(pack(), num_chunks=4)
    chunks = tuple((e.form, tuple(s.numel() for s in e.sections)) for e in encode_chunks())
    body_size = sum(size for _, sizes in chunks for size in sizes)
    coder = (CODER.wire_id, CODER.wire_version)
    body_checksum = packet.checksum(pack()[packet.header_size(4) :])
    assert header == packet.Header(Status.OK, coder, 7, 3, body_size, body_checksum, 11, chunks)


def test_a_header_holds_any_64_bit_digest_and_count():
    payload = packet.pack(
        [], coder=CODER, settings=2**64 - 1, sequence=2**63, shard_checksum=2**64 - 1, device=CPU
    )
    header = header_of(payload, num_chunks=0)
    assert (header.settings, header.sequence, header.shard_checksum) == (
        2**64 - 1,
        2**63,
        2**64 - 1,
    )


def test_an_unchanged_delta_shard_is_a_header_and_nothing_more():
    encoded = codec.encode(OLD[1], OLD[1], Scheme("delta"), BF16, CODER)
    payload = pack([encoded])
    assert payload.numel() == packet.header_size(1)
    assert packet.header_size(1) < 100
    assert receive(payload, num_chunks=1)[0].size == 0


def test_any_damaged_byte_is_a_payload_error():
    payload = pack()
    for damaged in damaged_bytes(payload):
        with pytest.raises(PayloadError):
            receive(damaged, num_chunks=4)


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_any_damaged_byte_of_a_shard_of_zeros_is_a_payload_error(size):
    payload = pack([packet.encode_raw(torch.zeros(size, dtype=torch.int16))])
    for damaged in damaged_bytes(payload):
        with pytest.raises(PayloadError):
            receive(damaged, num_chunks=1)


def test_a_payload_cut_anywhere_is_a_payload_error():
    zeros = packet.encode_raw(torch.zeros(9, dtype=torch.int16))
    for chunks in (encode_chunks(), [zeros]):
        payload = pack(chunks)
        for length in range(payload.numel()):
            with pytest.raises(PayloadError):
                receive(payload[:length], len(chunks))


def test_a_body_with_zeros_added_or_taken_is_a_payload_error():
    payload = pack([packet.encode_raw(torch.zeros(9, dtype=torch.int16))])
    header, body = header_of(payload, num_chunks=1), payload[packet.header_size(1) :]
    for other in (body[:-1], body[:0], torch.cat([body, body[:1]])):
        with pytest.raises(PayloadError):
            packet.unpack_body(header, other)


def test_noise_and_empty_buffers_are_payload_errors():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (500,), generator=generator).to(torch.uint8)
    for payload in (noise, torch.zeros_like(noise), torch.cat([pack()[:5], noise])):
        with pytest.raises(PayloadError):
            receive(payload, num_chunks=4)


@pytest.mark.parametrize("num_chunks", [0, 1, 3, 5, 40])
def test_a_header_of_another_number_of_chunks_is_a_payload_error(num_chunks):
    with pytest.raises(PayloadError):
        receive(pack(), num_chunks)
    with pytest.raises(PayloadError):
        packet.unpack_header(bytes(pack()[: packet.header_size(4)].numpy()), num_chunks)


def test_another_format_is_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(packet, "VERSION", 9)
        later = pack()
    with pytest.raises(PayloadError, match=f"version 9, this narrowcast reads {packet.VERSION}"):
        receive(later, num_chunks=4)
    other = pack()
    other[0] = ord("X")
    with pytest.raises(PayloadError, match="XCAG"):
        receive(other, num_chunks=4)


@pytest.mark.parametrize("status_or_form", [Status, Form])
def test_a_number_that_this_release_does_not_know_is_an_error(status_or_form):
    """Only a peer of another release can send one, for the checksum of the header is sound."""
    header = bytearray(pack()[: packet.header_size(4)].numpy())
    offset = 5 if status_or_form is Status else packet.header_size(0) - 4
    header[offset] = 99
    with pytest.raises((PayloadError, ValueError)):
        packet.unpack_header(with_sound_checksum(bytes(header)), 4)


def test_a_failed_rank_sends_what_went_wrong():
    payload = packet.pack_failure(
        OSError("не читается"), num_chunks=4, settings=7, sequence=3, device=CPU
    )
    assert header_of(payload, num_chunks=4).status == Status.FAILED
    with pytest.raises(SenderError, match="OSError: не читается"):
        receive(payload, num_chunks=4)
    for damaged in damaged_bytes(payload):
        with pytest.raises(PayloadError):
            receive(damaged, num_chunks=4)


@pytest.mark.parametrize("message", ["a lone surrogate: \udcff", "long " * 10_000])
def test_any_message_of_a_failed_rank_arrives(message):
    payload = packet.pack_failure(
        OSError(message), num_chunks=2, settings=7, sequence=3, device=CPU
    )
    with pytest.raises(SenderError):
        receive(payload, num_chunks=2)


def receive_alone(payload: Tensor) -> list[Encoded]:
    """What a receiver does with a payload that was meant for it alone."""
    return packet.unpack_body(*packet.unpack(payload))


@pytest.mark.parametrize("num_chunks", [0, 1, 4, 40])
def test_a_payload_states_how_many_chunks_it_has(num_chunks):
    sent = (encode_chunks() * 10)[:num_chunks]
    header, body = packet.unpack(pack(sent))
    assert header == header_of(pack(sent), num_chunks)
    assert body.numel() == header.body_size == sum(encoded.size for encoded in sent)
    for one, other in zip(receive_alone(pack(sent)), sent, strict=True):
        assert one.form == other.form
        assert all(torch.equal(*pair) for pair in zip(one.sections, other.sections, strict=True))


def test_any_damaged_byte_of_a_payload_for_one_rank_is_a_payload_error():
    failed = packet.pack_failure(OSError("no"), num_chunks=2, settings=7, sequence=0, device=CPU)
    with pytest.raises(SenderError, match="OSError: no"):
        receive_alone(failed)
    for payload in (pack(), pack([]), failed):
        for damaged in damaged_bytes(payload):
            with pytest.raises(PayloadError):
                receive_alone(damaged)


def test_a_payload_for_one_rank_that_is_cut_or_continued_is_a_payload_error():
    zeros = packet.encode_raw(torch.zeros(9, dtype=torch.int16))
    for payload in (pack(), pack([zeros]), pack([])):
        for length in range(payload.numel()):
            with pytest.raises(PayloadError):
                receive_alone(payload[:length])
        with pytest.raises(PayloadError):
            receive_alone(torch.cat([payload, payload[:1]]))


def test_an_error_context_begins_the_message_with_its_subject():
    with (
        pytest.raises(PayloadError, match=r"^the payload does not decode: too short$"),
        errors.error_context("the payload"),
    ):
        raise ValueError("too short")
    with (
        pytest.raises(SettingsError, match=r"^the payload is of another coder$"),
        errors.error_context("the payload"),
    ):
        raise SettingsError("is of another coder")
    with (
        pytest.raises(NarrowcastError, match=r"^the payload: MemoryError: 9 bytes$"),
        errors.error_context("the payload"),
    ):
        raise MemoryError("9 bytes")


def test_ranks_that_agree_pass():
    header = header_of(pack(), num_chunks=4)
    failed = header_of(
        packet.pack_failure(OSError("no"), num_chunks=4, settings=7, sequence=3, device=CPU),
        num_chunks=4,
    )
    packet.check_agreement({0: header})
    packet.check_agreement({4: header, 6: replace(header, body_size=1, body_checksum=2, chunks=())})
    packet.check_agreement({0: header, 1: failed})  # its message is what is raised
    packet.check_agreement({0: failed, 1: failed})


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"settings": 8}, SettingsError, "different settings"),
        ({"coder": (2, 1)}, SettingsError, r"different coders .*4: \(1, 1\).*6: \(2, 1\)"),
        ({"coder": (1, 2)}, SettingsError, r"different coders .*4: \(1, 1\).*6: \(1, 2\)"),
        ({"sequence": 0}, OutOfStepError, r"4: 3, 6: 0.*reset"),
        ({"settings": 8, "sequence": 0}, SettingsError, "different settings"),
    ],
)
def test_ranks_that_disagree_all_raise_the_same_error(change, error, said):
    header = header_of(pack(), num_chunks=4)
    other = replace(header, **change)
    with pytest.raises(error, match=said) as raised:
        packet.check_agreement({4: header, 6: other})
    assert isinstance(raised.value, NarrowcastError)
    with pytest.raises(error, match="ranks"):
        packet.check_agreement({0: other, 1: header, 2: header})


def test_a_failed_rank_out_of_step_is_out_of_step():
    failed = packet.pack_failure(OSError("no"), num_chunks=4, settings=7, sequence=0, device=CPU)
    with pytest.raises(OutOfStepError):
        packet.check_agreement({0: header_of(pack(), 4), 1: header_of(failed, 4)})


CHECKSUMS = pytest.mark.parametrize("checksum", [packet.checksum, packet.word_checksum])


@CHECKSUMS
@pytest.mark.parametrize("content", ["zeros", "ones", "noise"])
def test_a_checksum_changes_with_any_byte(content, checksum):
    for size in (1, 3, 4, 5, 64, 301):
        data = torch.zeros(size, dtype=torch.uint8)
        if content != "zeros":
            high = 2 if content == "ones" else 256
            generator = torch.Generator().manual_seed(size)
            data = torch.randint(high - 1 if high == 2 else 0, high, (size,), generator=generator)
            data = data.to(torch.uint8)
        sound = checksum(data)
        for position in range(size):
            for flip in FLIPS:
                data[position] ^= flip
                assert checksum(data) != sound
                data[position] ^= flip
        assert checksum(data) == sound


@CHECKSUMS
def test_a_checksum_changes_with_swapped_words(checksum):
    words = torch.arange(-20, 20, dtype=torch.int32) * 104_729_000
    sound = checksum(words.view(torch.uint8))
    swapped = set()
    for i in range(40):
        for j in range(i):
            other = words.clone()
            other[i], other[j] = words[j], words[i]
            swapped.add(checksum(other.view(torch.uint8)))
    assert sound not in swapped


@CHECKSUMS
def test_a_checksum_is_of_the_bytes_wherever_they_lie_and_never_zero(checksum):
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (999,), generator=generator).to(torch.uint8)
    for start in range(1, 6):
        before = data[start:].clone()
        assert checksum(data[start:]) == checksum(before)
        assert torch.equal(data[start:], before)
    zeros = [checksum(torch.zeros(size, dtype=torch.uint8)) for size in range(9)]
    assert all(0 < of_zeros < 2**64 for of_zeros in zeros)
