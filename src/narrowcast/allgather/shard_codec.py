"""Payloads of shards, in and out, with what the ranks of a group cache of each other's shards.

Everything here works on tensors alone: it knows no process group, no clock and no ledger.

What is cached is replicated: ``cache[r]`` is the same on every rank, except that a rank may cache
hashes of its own shard in the place of exponents. The cache changes only in ``decode``. If all
ranks decode the shards of a gather in the order of ranks, their caches are the same even if a later
payload turns out not to decode.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowcast.allgather import codec
from narrowcast.allgather.chunks import Chunk, make_chunks, rechunk
from narrowcast.allgather.codec import Scheme
from narrowcast.allgather.offload import HostCopies, ShardCache
from narrowcast.telemetry.changes import Changes, count_changes, shard_type
from narrowcast.wire import floats, packet
from narrowcast.wire.coders import Coder
from narrowcast.wire.packet import Encoded, Form, Header

Params = Sequence[tuple[str, int, torch.dtype]]
"""Name, number of elements and dtype of each parameter of a shard, in memory order."""


@dataclass(frozen=True)
class Prepared:
    """An encoded shard.

    Attributes:
        shard_bytes: the shard that was encoded, uint8; the payload is valid while it is the same.
        payload: uint8.
        changes: by kind of shard, if they were asked for.
    """

    shard_bytes: Tensor
    payload: Tensor
    changes: dict[str, Changes]


@dataclass
class ShardCodec:
    """Encodes this rank's shard, and decodes every rank's, given what was decoded before.

    Attributes:
        chunks: the parts of a shard that are encoded together.
        cache: for each rank and each chunk, what ``codec`` caches; ``None`` while it is cold.
        rank: of this process among those whose shards are cached.
        num_values: values of a shard.
        verify_interval: shards from one that carries a checksum to the next; 0: none does.
        sequence: gathers that went into ``cache``.
        settings: a digest of all that the ranks must agree on.
    """

    chunks: tuple[Chunk, ...]
    cache: ShardCache
    rank: int
    num_values: int
    coder: Coder
    verify_interval: int = 0
    sequence: int = 0
    settings: int = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(repr((self.chunks, self.verify_interval)).encode()).digest()
        self.settings = int.from_bytes(digest[:8], "little")

    @classmethod
    def cold(
        cls,
        params: Params,
        schemes: dict[str, Scheme],
        coder: Coder,
        *,
        rank: int,
        world_size: int,
        verify_interval: int = 0,
        copies: HostCopies | None = None,
    ) -> "ShardCodec":
        """A codec with nothing cached.

        Args:
            schemes: by parameter name.
            copies: how caches in host memory get to the device; ``None`` where they are on it.
        """
        chunks = make_chunks(params, schemes)
        cache = ShardCache(world_size, len(chunks), copies)
        num_values = sum(numel for _, numel, _ in params)
        return cls(chunks, cache, rank, num_values, coder, verify_interval)

    def take_over(self, old: "ShardCodec") -> None:
        """Caches what ``old`` has cached of the same shards, as far as the schemes of this codec
        can use it."""
        for r in range(len(old.cache)):
            for i, tensor in enumerate(rechunk(old.chunks, old.cache.take(r), self.chunks)):
                if tensor is not None:
                    self.cache.store(r, i, tensor)
        self.sequence = old.sequence

    def reset(self) -> None:
        """Drops what is cached."""
        self.cache.clear()
        self.sequence = 0

    @property
    def header_size(self) -> int:
        """Bytes of the header of every payload."""
        return packet.header_size(len(self.chunks))

    @property
    def shard_bytes(self) -> int:
        """Bytes of a shard."""
        return self.chunks[-1].stop if self.chunks else 0

    @property
    def verifies(self) -> bool:
        """Whether the next payload carries a checksum of its shard."""
        return self.verify_interval > 0 and (self.sequence + 1) % self.verify_interval == 0

    def encode(self, shard_bytes: Tensor, counts_changes: bool = False) -> Prepared:
        """Encodes this rank's shard, uint8.

        Never raises, since the other ranks would wait: the payload of a rank that cannot encode
        holds its error, and every rank raises it when it decodes the payload.

        Args:
            counts_changes: whether to count what changed since the shard that is cached.
        """
        device = shard_bytes.device
        try:
            cached = self.cache.take(self.rank)
            encoded = [
                codec.encode(
                    chunk.bits(shard_bytes), cached_chunk, chunk.scheme, chunk.layout, self.coder
                )
                for chunk, cached_chunk in zip(self.chunks, cached, strict=True)
            ]
            payload = packet.pack(
                encoded,
                coder=self.coder,
                settings=self.settings,
                sequence=self.sequence,
                shard_checksum=packet.checksum(shard_bytes) if self.verifies else 0,
                device=device,
            )
            changes = self._changes(cached, shard_bytes) if counts_changes else {}
        except Exception as error:
            payload = packet.pack_failure(
                error,
                num_chunks=len(self.chunks),
                settings=self.settings,
                sequence=self.sequence,
                device=device,
            )
            changes = {}
        return Prepared(shard_bytes, payload, changes)

    def _changes(self, cached: list[Tensor | None], shard_bytes: Tensor) -> dict[str, Changes]:
        changes: dict[str, Changes] = {}
        for chunk, cached_chunk in zip(self.chunks, cached, strict=True):
            if cached_chunk is None or chunk.scheme.caches_hashes:
                continue
            sizes = [size for _, size in chunk.params]
            parts = zip(
                chunk.bits(shard_bytes).split(sizes), cached_chunk.split(sizes), strict=True
            )
            for (name, size), (bits, cached_bits) in zip(chunk.params, parts, strict=True):
                if size:
                    counted = count_changes(
                        bits, cached_bits, chunk.layout, chunk.scheme.block_size
                    )
                    kind = shard_type(name)
                    changes[kind] = changes.get(kind, Changes()) + counted
        return changes

    def read_header(self, header_bytes: bytes, buffer: Tensor) -> Header:
        """The header of a payload that arrived.

        Args:
            header_bytes: the first ``header_size`` bytes of ``buffer``, on the host.
            buffer: all that arrived in the first round, uint8.

        Raises:
            PayloadError: it is damaged, or of another format.
        """
        if packet.num_chunks_of(header_bytes) == len(self.chunks):
            return packet.unpack_header(header_bytes, len(self.chunks))
        # A sender with other parameters or settings: ``check_agreement`` of all headers reports it.
        header, _ = packet.unpack(buffer)
        return header

    def decode(
        self, r: int, header: Header, body: Tensor, row: Tensor, own_shard: Tensor | None
    ) -> None:
        """Decodes the shard of rank ``r`` into ``row``, uint8, and caches it.

        Args:
            body: of the payload, uint8, without padding.
            own_shard: the shard itself, uint8, if ``r`` is this rank. It is decoded like all
                others, so that it fails where it fails elsewhere.

        Raises:
            PayloadError: the body is damaged.
            SenderError: the sender could not encode.
            ValueError: a chunk does not decode.
        """
        self._decode(r, packet.unpack_body(header, body), row, own_shard)

    def _decode(
        self, r: int, encoded: list[Encoded], row: Tensor, own_shard: Tensor | None
    ) -> None:
        to_cache_of = codec.receiver_cache if own_shard is None else codec.sender_cache
        cached = self.cache.take(r)
        for i, (chunk, one) in enumerate(zip(self.chunks, encoded, strict=True)):
            cached_chunk = cached[i]
            if own_shard is not None and chunk.scheme.caches_hashes and cached_chunk is not None:
                cached_chunk = codec.receiver_cache(
                    chunk.bits(own_shard), chunk.scheme, chunk.layout
                )
            bits = codec.decode(
                one, cached_chunk, chunk.num_values, chunk.scheme, chunk.layout, self.coder
            )
            row[chunk.start : chunk.stop] = bits.view(torch.uint8)
            to_cache = to_cache_of(bits, chunk.scheme, chunk.layout)
            if to_cache is not cached[i]:
                self.cache.store(r, i, to_cache)

    def payload_bytes_if_unchanged(self, headers: Sequence[Header]) -> int:
        """Bytes of the largest payload of the next gather if no shard changes until then.

        Args:
            headers: of the payloads of this gather.
        """
        return self.header_size + max(self._body_bytes_if_unchanged(header) for header in headers)

    def _body_bytes_if_unchanged(self, header: Header) -> int:
        size = 0
        for chunk, (form, sections) in zip(self.chunks, header.chunks, strict=True):
            if chunk.scheme.compression == "delta":
                continue
            if chunk.scheme.compression == "exponent" and form != Form.RAW:
                size += floats.sign_mantissa_bytes(chunk.num_values, chunk.layout)
                if chunk.scheme.exponent_coding == "blocks":
                    size += (-(-chunk.num_values // chunk.scheme.block_size) + 7) // 8
            else:
                size += sum(sections)
        return size
