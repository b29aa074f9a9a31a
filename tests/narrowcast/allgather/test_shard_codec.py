"""The shard codec of several ranks, simulated in one process: no process group, no FSDP."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from narrowcast.allgather.codec import Scheme
from narrowcast.allgather.shard_codec import ShardCodec
from narrowcast.errors import PayloadError, SenderError
from narrowcast.telemetry.changes import Changes
from narrowcast.wire import packet
from narrowcast.wire.coders import Zstd
from narrowcast.wire.packet import Header

PARAMS = [
    ("norm.weight", 5, torch.bfloat16),
    ("attention.wq", 300, torch.bfloat16),
    ("router.gate", 0, torch.bfloat16),
    ("experts.w1", 128, torch.float32),
    ("mask", 3, torch.int64),
]
NAMES = [name for name, *_ in PARAMS]
SIZE = sum(numel * dtype.itemsize for _, numel, dtype in PARAMS)
WORLD_SIZE = 3
SCHEMES = {
    **{name: Scheme(name) for name in ("delta", "exponent", "entropy", "none")},
    "blocks": Scheme("exponent", "blocks", block_size=8),
    "hashes": Scheme("exponent", "blocks", block_size=8, block_check="hash"),
}


def codec_of(rank: int, scheme: Scheme, verify_interval: int = 0) -> ShardCodec:
    return ShardCodec.cold(
        PARAMS,
        dict.fromkeys(NAMES, scheme),
        Zstd(),
        rank=rank,
        world_size=WORLD_SIZE,
        verify_interval=verify_interval,
    )


def codecs_of(scheme: Scheme, verify_interval: int = 0) -> list[ShardCodec]:
    return [codec_of(rank, scheme, verify_interval) for rank in range(WORLD_SIZE)]


def shards_of(step: int) -> list[Tensor]:
    """A shard of each rank, uint8: weights that change a little from step to step."""
    shards = []
    for rank in range(WORLD_SIZE):
        start = torch.Generator().manual_seed(rank)
        change = torch.Generator().manual_seed(100 * step + rank)
        parts = []
        for _, numel, dtype in PARAMS:
            values = torch.randn(numel, generator=start)
            values += 1e-3 * step * torch.randn(numel, generator=change)
            parts.append(values.to(dtype).view(torch.uint8))
        shards.append(torch.cat(parts))
    return shards


def read(codec: ShardCodec, payload: Tensor) -> tuple[Header, Tensor]:
    header = codec.read_header(bytes(payload[: codec.header_size].numpy()), payload)
    return header, payload[codec.header_size :][: header.body_size]


def gather(codecs: list[ShardCodec], shards: list[Tensor]) -> tuple[list[Tensor], list[Header]]:
    """Payloads and headers of a gather, in which every rank decodes the shards of all."""
    payloads = [codec.encode(shards[codec.rank]).payload for codec in codecs]
    for codec in codecs:
        arrived = [read(codec, payload) for payload in payloads]
        headers = [header for header, _ in arrived]
        packet.check_agreement(dict(enumerate(headers)))
        for r, (header, body) in enumerate(arrived):
            row = torch.full((SIZE,), 77, dtype=torch.uint8)
            codec.decode(r, header, body, row, shards[r] if r == codec.rank else None)
            assert torch.equal(row, shards[r])
        codec.sequence += 1
    return payloads, headers


def cached_rows(codec: ShardCodec, r: int) -> list[Tensor | None]:
    return [tensor if tensor is None else tensor.clone() for tensor in codec.cache[r]]


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(
        x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_shards_arrive_bitwise_identical_and_caches_of_all_ranks_are_the_same(name: str) -> None:
    codecs = codecs_of(SCHEMES[name])
    for step in (0, 1, 1, 2):
        gather(codecs, shards_of(step))
        for r in range(WORLD_SIZE):
            first, *others = [cached_rows(codec, r) for codec in codecs if codec.rank != r]
            assert all(same(first, other) for other in others)
            if not SCHEMES[name].caches_hashes:
                assert same(first, cached_rows(codecs[r], r))


@pytest.mark.parametrize("name", SCHEMES)
def test_the_predicted_size_is_that_of_the_next_payload_if_nothing_changes(name: str) -> None:
    codecs = codecs_of(SCHEMES[name])
    for step in (0, 1):
        _, headers = gather(codecs, shards_of(step))
        (predicted,) = {codec.payload_bytes_if_unchanged(headers) for codec in codecs}
        payloads, _ = gather(codecs, shards_of(step))
        assert predicted == max(payload.numel() for payload in payloads)


def test_what_a_payload_is_sent_in_shrinks_once_shards_are_cached() -> None:
    codecs = codecs_of(SCHEMES["delta"])
    cold, _ = gather(codecs, shards_of(0))
    warm, _ = gather(codecs, shards_of(0))
    assert cold[0].numel() > SIZE / 2
    assert warm[0].numel() == codecs[0].header_size + 3 * 8  # integers are never compressed


def test_reset_codecs_start_cold_and_count_gathers_from_zero() -> None:
    codecs = codecs_of(SCHEMES["delta"])
    cold, _ = gather(codecs, shards_of(0))
    for codec in codecs:
        codec.reset()
        assert (codec.sequence, codec.cache.nbytes) == (0, 0)
    again, _ = gather(codecs, shards_of(0))
    assert all(torch.equal(*pair) for pair in zip(cold, again, strict=True))


@pytest.mark.parametrize(
    ("before", "after", "is_warm"),
    [("delta", "exponent", True), ("exponent", "delta", False), ("delta", "blocks", True)],
)
def test_another_scheme_takes_over_what_it_can_use(before: str, after: str, is_warm: bool) -> None:
    old = codecs_of(SCHEMES[before])
    gather(old, shards_of(0))
    new = codecs_of(SCHEMES[after])
    for codec, predecessor in zip(new, old, strict=True):
        codec.take_over(predecessor)
        assert codec.sequence == 1
        cached = [codec.cache[r][i] for r in range(WORLD_SIZE) for i in range(len(codec.chunks))]
        assert any(tensor is not None for tensor in cached) == is_warm
    gather(new, shards_of(1))


def test_changes_are_counted_only_where_they_are_asked_for_and_something_is_cached() -> None:
    codecs = codecs_of(SCHEMES["delta"])
    assert codecs[0].encode(shards_of(0)[0], counts_changes=True).changes == {}
    gather(codecs, shards_of(0))
    assert codecs[0].encode(shards_of(1)[0]).changes == {}
    changes = codecs[0].encode(shards_of(1)[0], counts_changes=True).changes
    assert {kind: counted.values for kind, counted in changes.items() if kind != "other"} == {
        "norm": 5,
        "attention": 300,
        "expert_ffn": 128,
    }
    assert changes["expert_ffn"].changed_values > 100
    unchanged = codecs[0].encode(shards_of(0)[0], counts_changes=True).changes
    assert sum(unchanged.values(), Changes()).changed_values == 0


def test_a_rank_that_cannot_encode_sends_its_error_to_all() -> None:
    class Broken(Zstd):
        def encode(self, data: Tensor) -> Tensor:
            raise MemoryError("no memory for the coder")

    codecs = codecs_of(SCHEMES["entropy"])
    codecs[1].coder = Broken()
    payload = codecs[1].encode(shards_of(0)[1]).payload
    for codec in codecs:
        header, body = read(codec, payload)
        with pytest.raises(SenderError, match="MemoryError: no memory for the coder"):
            codec.decode(1, header, body, torch.empty(SIZE, dtype=torch.uint8), None)


def test_a_damaged_body_is_an_error_and_changes_no_cache() -> None:
    codecs = codecs_of(SCHEMES["delta"])
    gather(codecs, shards_of(0))
    before = cached_rows(codecs[0], 1)
    payload = codecs[1].encode(shards_of(1)[1]).payload
    payload[-1] ^= 1
    header, body = read(codecs[0], payload)
    with pytest.raises(PayloadError, match="checksum"):
        codecs[0].decode(1, header, body, torch.empty(SIZE, dtype=torch.uint8), None)
    assert same(before, cached_rows(codecs[0], 1))


def test_only_every_nth_payload_carries_the_checksum_of_its_shard() -> None:
    codecs = codecs_of(SCHEMES["delta"], verify_interval=3)
    carries = []
    for step in range(6):
        shards = shards_of(step)
        _, headers = gather(codecs, shards)
        sums = [header.shard_checksum for header in headers]
        assert sums in ([0] * WORLD_SIZE, [packet.checksum(shard) for shard in shards])
        carries.append(any(sums))
    assert carries == [False, False, True, False, False, True]


def test_ranks_with_other_chunks_schemes_or_intervals_have_other_settings() -> None:
    base = codec_of(0, SCHEMES["delta"])
    others = [
        codec_of(0, SCHEMES["exponent"]),
        codec_of(0, SCHEMES["delta"], verify_interval=2),
        codec_of(0, replace(SCHEMES["delta"], block_size=100)),
    ]
    assert base.settings == codec_of(2, SCHEMES["delta"]).settings
    assert base.settings not in {other.settings for other in others}
