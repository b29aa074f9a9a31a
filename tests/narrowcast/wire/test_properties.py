"""Any float and any payload: what is read is what was written, and no damage passes for it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from narrowcast.errors import PayloadError
from narrowcast.wire import floats, packet
from narrowcast.wire.coders import Zstd
from narrowcast.wire.exchange import pairwise_schedule
from narrowcast.wire.packet import SECTIONS, Encoded, Form
from tests.strategies import SIZES, bits, later_bits, layouts, settings

digests = st.integers(0, 2**64 - 1)


@settings(max_examples=40)
@given(data=st.data())
def test_planes_of_a_float_make_up_the_float(data: st.DataObject) -> None:
    layout = data.draw(layouts)
    bits_N = data.draw(bits(layout, data.draw(st.sampled_from(SIZES))))
    exponents_N = floats.exponents(bits_N, layout)
    plane = floats.sign_mantissa(bits_N, layout)
    assert plane.numel() == floats.sign_mantissa_bytes(bits_N.numel(), layout)
    assert torch.equal(floats.merge(exponents_N, plane, layout), bits_N)
    assert torch.equal(floats.ordered(floats.ordered(bits_N, layout), layout), bits_N)
    assert torch.equal(floats.from_byte_planes(floats.byte_planes(bits_N), layout.bits), bits_N)
    old_N = data.draw(later_bits(bits_N, layout))
    planes = floats.byte_planes(floats.zigzag_difference(bits_N, old_N, layout))
    assert torch.equal(floats.apply_zigzag_planes(planes, old_N, layout), bits_N)


@settings(max_examples=25)
@given(data=st.binary(max_size=3000), times=st.sampled_from([1, 2, 300]))
def test_any_bytes_come_back_from_the_coder(data: bytes, times: int) -> None:
    tensor = torch.frombuffer(bytearray(data * times or b"0"), dtype=torch.uint8)
    assert torch.equal(Zstd().decode(Zstd().encode(tensor), tensor.numel()), tensor)


@st.composite
def encoded_chunks(draw: st.DrawFn) -> Encoded:
    form = draw(st.sampled_from(Form))
    sections = [draw(st.binary(max_size=40)) for _ in range(SECTIONS[form])]
    return Encoded(form, tuple(torch.tensor(list(s), dtype=torch.uint8) for s in sections))


@st.composite
def payloads(draw: st.DrawFn) -> tuple[list[Encoded], dict[str, int], Tensor]:
    """What is packed, the fields of the header that are given, and the payload."""
    chunks = draw(st.lists(encoded_chunks(), max_size=4))
    fields = {name: draw(digests) for name in ("settings", "sequence", "shard_checksum")}
    payload = packet.pack(chunks, coder=Zstd(), device=torch.device("cpu"), **fields)
    return chunks, fields, payload


def _read(payload: Tensor) -> tuple[packet.Header, list[Encoded]]:
    header, body = packet.unpack(payload)
    return header, packet.unpack_body(header, body)


@settings(max_examples=40)
@given(payloads())
def test_any_payload_is_unpacked_as_it_was_packed(
    drawn: tuple[list[Encoded], dict[str, int], Tensor],
) -> None:
    chunks, fields, payload = drawn
    header, unpacked = _read(payload)
    assert {name: getattr(header, name) for name in fields} == fields
    assert header.coder == (Zstd().wire_id, Zstd().wire_version)
    assert [one.form for one in unpacked] == [one.form for one in chunks]
    for one, due in zip(unpacked, chunks, strict=True):
        assert len(one.sections) == len(due.sections)
        assert all(map(torch.equal, one.sections, due.sections))


@settings(max_examples=60)
@given(drawn=payloads(), data=st.data())
def test_any_one_damaged_byte_of_a_payload_is_noticed(
    drawn: tuple[list[Encoded], dict[str, int], Tensor], data: st.DataObject
) -> None:
    _, _, payload = drawn
    payload[data.draw(st.integers(0, payload.numel() - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PayloadError):
        _read(payload)


@pytest.mark.parametrize("device", ["cpu", "accelerator"])
@given(content=st.binary(min_size=1, max_size=70), data=st.data())
def test_any_one_damaged_byte_changes_a_checksum(
    device: str, content: bytes, data: st.DataObject
) -> None:
    checksum = packet.checksum if device == "cpu" else packet.word_checksum
    damaged = torch.tensor(list(content), dtype=torch.uint8)
    before = checksum(damaged.clone())
    damaged[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    assert checksum(damaged) != before != 0


@pytest.mark.parametrize("world_size", range(1, 34))
def test_every_two_ranks_meet_once_and_at_the_same_time(world_size: int) -> None:
    """Each rank waits for its partners one after the other. Whoever is first in the order of all
    pairs that are left finds the other one there, so that nobody waits for ever."""
    partners = [list(pairwise_schedule(rank, world_size)) for rank in range(world_size)]
    for rank, met in enumerate(partners):
        assert sorted(met) == [other for other in range(world_size) if other != rank]
    rounds = 0
    while any(partners):
        is_met = [bool(p) and partners[p[0]][:1] == [rank] for rank, p in enumerate(partners)]
        partners = [p[1:] if met else p for p, met in zip(partners, is_met, strict=True)]
        assert any(is_met)
        rounds += 1
    assert rounds == (0 if world_size == 1 else world_size - 1 + world_size % 2)
