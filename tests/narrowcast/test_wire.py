"""Payloads: every byte is guarded, and whatever is wrong ends in the error that names it."""

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
SCHEMES = (Scheme("raw"), Scheme("value"), Scheme("exponent", "blocks", 50), Scheme("value"))
FLIPS = (0x01, 0x80, 0xFF)


def bits_of_weights(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).bfloat16().view(torch.int16)


OLD = [bits_of_weights(size, seed=0) for size in (5, 200, 151, 64)]
NEW = [OLD[0], OLD[1] + 1, OLD[2] ^ 0x81, OLD[3]]


def encode_runs() -> list[Encoded]:
    """Four runs: raw, a difference of values, blocks of exponents, and values unchanged."""
    return [
        codec.encode(new, codec.sender_keeps(old, scheme, BF16), scheme, BF16, CODER)
        for new, old, scheme in zip(NEW, OLD, SCHEMES, strict=True)
    ]


def pack(runs: list[Encoded] | None = None, settings: int = 7, sequence: int = 3) -> Tensor:
    return packet.pack(
        encode_runs() if runs is None else runs,
        coder=CODER,
        settings=settings,
        sequence=sequence,
        shard_checksum=11,
        device=CPU,
    )


def receive(payload: Tensor, num_runs: int) -> list[Encoded]:
    """What a receiver does with what it took for a payload."""
    size_of_head = packet.head_size(num_runs)
    head = packet.unpack_head(bytes(payload[:size_of_head].numpy()), num_runs)
    body = payload[size_of_head : size_of_head + head.body_size]
    return packet.unpack_body(head, body)


def head_of(payload: Tensor, num_runs: int) -> packet.Head:
    return packet.unpack_head(bytes(payload[: packet.head_size(num_runs)].numpy()), num_runs)


def damaged_bytes(payload: Tensor):
    for position in range(payload.numel()):
        for flip in FLIPS:
            damaged = payload.clone()
            damaged[position] ^= flip
            yield damaged


def with_sound_checksum(head: bytes) -> bytes:
    return head[:-4] + struct.pack("<I", zlib.crc32(head[:-4]))


def test_runs_cross_in_a_payload_section_by_section_and_decode():
    sent = encode_runs()
    assert [encoded.form for encoded in sent] == [
        Form.RAW,
        Form.VALUE_DIFFERENCE,
        Form.EXPONENT_BLOCKS,
        Form.VALUE_DIFFERENCE,
    ]
    payload = pack(sent)
    assert payload.numel() == packet.head_size(4) + sum(encoded.size for encoded in sent)
    arrived = receive(payload, num_runs=4)
    for i, (one, other) in enumerate(zip(arrived, sent, strict=True)):
        assert one.form == other.form
        assert all(torch.equal(*pair) for pair in zip(one.sections, other.sections, strict=True))
        kept = codec.receiver_keeps(OLD[i], SCHEMES[i], BF16)
        bits = codec.decode(one, kept, NEW[i].numel(), SCHEMES[i], BF16, CODER)
        assert torch.equal(bits, NEW[i])


def test_a_head_says_what_was_packed():
    head = head_of(pack(), num_runs=4)
    runs = tuple((e.form, tuple(s.numel() for s in e.sections)) for e in encode_runs())
    body_size = sum(size for _, sizes in runs for size in sizes)
    coder = (CODER.wire_id, CODER.wire_version)
    body_checksum = packet.checksum(pack()[packet.head_size(4) :])
    assert head == packet.Head(Status.OK, coder, 7, 3, body_size, body_checksum, 11, runs)


def test_a_head_holds_any_64_bit_digest_and_count():
    payload = packet.pack(
        [], coder=CODER, settings=2**64 - 1, sequence=2**63, shard_checksum=2**64 - 1, device=CPU
    )
    head = head_of(payload, num_runs=0)
    assert (head.settings, head.sequence, head.shard_checksum) == (2**64 - 1, 2**63, 2**64 - 1)


def test_an_unchanged_value_shard_is_a_head_and_nothing_more():
    encoded = codec.encode(OLD[1], OLD[1], Scheme("value"), BF16, CODER)
    payload = pack([encoded])
    assert payload.numel() == packet.head_size(1)
    assert packet.head_size(1) < 100
    assert receive(payload, num_runs=1)[0].size == 0


def test_any_damaged_byte_is_a_payload_error():
    payload = pack()
    for damaged in damaged_bytes(payload):
        with pytest.raises(PayloadError):
            receive(damaged, num_runs=4)


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_any_damaged_byte_of_a_shard_of_zeros_is_a_payload_error(size):
    payload = pack([packet.encode_raw(torch.zeros(size, dtype=torch.int16))])
    for damaged in damaged_bytes(payload):
        with pytest.raises(PayloadError):
            receive(damaged, num_runs=1)


def test_a_payload_cut_anywhere_is_a_payload_error():
    zeros = packet.encode_raw(torch.zeros(9, dtype=torch.int16))
    for runs in (encode_runs(), [zeros]):
        payload = pack(runs)
        for length in range(payload.numel()):
            with pytest.raises(PayloadError):
                receive(payload[:length], len(runs))


def test_a_body_with_zeros_added_or_taken_is_a_payload_error():
    payload = pack([packet.encode_raw(torch.zeros(9, dtype=torch.int16))])
    head, body = head_of(payload, num_runs=1), payload[packet.head_size(1) :]
    for other in (body[:-1], body[:0], torch.cat([body, body[:1]])):
        with pytest.raises(PayloadError):
            packet.unpack_body(head, other)


def test_noise_and_empty_slots_are_payload_errors():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (500,), generator=generator).to(torch.uint8)
    for payload in (noise, torch.zeros_like(noise), torch.cat([pack()[:5], noise])):
        with pytest.raises(PayloadError):
            receive(payload, num_runs=4)


@pytest.mark.parametrize("num_runs", [0, 1, 3, 5, 40])
def test_a_head_of_another_number_of_runs_is_a_payload_error(num_runs):
    with pytest.raises(PayloadError):
        receive(pack(), num_runs)
    with pytest.raises(PayloadError):
        packet.unpack_head(bytes(pack()[: packet.head_size(4)].numpy()), num_runs)


def test_another_format_is_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(packet, "VERSION", 9)
        later = pack()
    with pytest.raises(PayloadError, match=f"version 9, this narrowcast reads {packet.VERSION}"):
        receive(later, num_runs=4)
    other = pack()
    other[0] = ord("X")
    with pytest.raises(PayloadError, match="XCAG"):
        receive(other, num_runs=4)


@pytest.mark.parametrize("status_or_form", [Status, Form])
def test_a_number_that_this_release_does_not_know_is_an_error(status_or_form):
    """Only a peer of another release can send one, for the checksum of the head is sound."""
    head = bytearray(pack()[: packet.head_size(4)].numpy())
    offset = 5 if status_or_form is Status else packet.head_size(0) - 4
    head[offset] = 99
    with pytest.raises((PayloadError, ValueError)):
        packet.unpack_head(with_sound_checksum(bytes(head)), 4)


def test_a_failed_rank_sends_what_went_wrong():
    payload = packet.pack_failure(
        OSError("не читается"), num_runs=4, settings=7, sequence=3, device=CPU
    )
    assert head_of(payload, num_runs=4).status == Status.FAILED
    with pytest.raises(SenderError, match="OSError: не читается"):
        receive(payload, num_runs=4)
    for damaged in damaged_bytes(payload):
        with pytest.raises(PayloadError):
            receive(damaged, num_runs=4)


@pytest.mark.parametrize("message", ["a lone surrogate: \udcff", "long " * 10_000])
def test_any_message_of_a_failed_rank_arrives(message):
    payload = packet.pack_failure(OSError(message), num_runs=2, settings=7, sequence=3, device=CPU)
    with pytest.raises(SenderError):
        receive(payload, num_runs=2)


def receive_alone(payload: Tensor) -> list[Encoded]:
    """What a receiver does with a payload that was meant for it alone."""
    return packet.unpack_body(*packet.unpack(payload))


@pytest.mark.parametrize("num_runs", [0, 1, 4, 40])
def test_a_payload_says_itself_how_many_runs_it_has(num_runs):
    sent = (encode_runs() * 10)[:num_runs]
    head, body = packet.unpack(pack(sent))
    assert head == head_of(pack(sent), num_runs)
    assert body.numel() == head.body_size == sum(encoded.size for encoded in sent)
    for one, other in zip(receive_alone(pack(sent)), sent, strict=True):
        assert one.form == other.form
        assert all(torch.equal(*pair) for pair in zip(one.sections, other.sections, strict=True))


def test_any_damaged_byte_of_a_payload_for_one_rank_is_a_payload_error():
    failed = packet.pack_failure(OSError("no"), num_runs=2, settings=7, sequence=0, device=CPU)
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


def test_blame_falls_on_what_an_error_is_about():
    with (
        pytest.raises(PayloadError, match=r"^the payload does not decode: too short$"),
        errors.blamed("the payload"),
    ):
        raise ValueError("too short")
    with (
        pytest.raises(SettingsError, match=r"^the payload is of another coder$"),
        errors.blamed("the payload"),
    ):
        raise SettingsError("is of another coder")
    with (
        pytest.raises(NarrowcastError, match=r"^the payload: MemoryError: 9 bytes$"),
        errors.blamed("the payload"),
    ):
        raise MemoryError("9 bytes")


def test_ranks_that_agree_pass():
    head = head_of(pack(), num_runs=4)
    failed = head_of(
        packet.pack_failure(OSError("no"), num_runs=4, settings=7, sequence=3, device=CPU),
        num_runs=4,
    )
    packet.check_agreement({0: head})
    packet.check_agreement({4: head, 6: replace(head, body_size=1, body_checksum=2, runs=())})
    packet.check_agreement({0: head, 1: failed})  # its message is what is raised
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
def test_ranks_that_disagree_all_come_to_the_same_named_error(change, error, said):
    head = head_of(pack(), num_runs=4)
    other = replace(head, **change)
    with pytest.raises(error, match=said) as raised:
        packet.check_agreement({4: head, 6: other})
    assert isinstance(raised.value, NarrowcastError)
    with pytest.raises(error, match="ranks"):
        packet.check_agreement({0: other, 1: head, 2: head})


def test_a_failed_rank_out_of_step_is_out_of_step():
    failed = packet.pack_failure(OSError("no"), num_runs=4, settings=7, sequence=0, device=CPU)
    with pytest.raises(OutOfStepError):
        packet.check_agreement({0: head_of(pack(), 4), 1: head_of(failed, 4)})


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
