"""A narrowed gather of one chunk, but for the link: the same functions, timed.

Each rank times the chunks of its own shard. What is compared or copied in a gather lies in memory
of its own here too, for ``torch.equal`` of a tensor with itself returns at once.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowcast import util
from narrowcast.allgather import codec
from narrowcast.allgather.codec import Scheme
from narrowcast.autotune.sample_stats import COMPRESSIONS, Cost, SampleStats
from narrowcast.telemetry.changes import count_changes
from narrowcast.wire import floats, packet
from narrowcast.wire.coders import Coder
from narrowcast.wire.exchange import send_buffer
from narrowcast.wire.floats import FloatLayout


def sample_chunk(
    old_N: Tensor,
    new_N: Tensor,
    layout: FloatLayout,
    scheme: Scheme,
    coder: Coder,
) -> SampleStats:
    """Changes and costs of a chunk of a shard.

    Args:
        old_N, new_N: before and after a step of the optimizer, as integers of ``layout.bits``.
        scheme: how exponents are encoded; its compression does not matter.
    """
    changes = count_changes(new_N, old_N, layout, scheme.block_size)
    costs = []
    for compression in COMPRESSIONS:
        timed = TimedGather(replace(scheme, compression=compression), layout, coder)
        first = timed.gather(old_N, new_N, is_first=True)
        later = replace(first, preparing=0.0)  # of ``entropy`` and ``none`` nothing is cached
        if compression in ("delta", "exponent"):
            later = timed.gather(new_N, new_N, is_first=False)
        pairs = zip(first.cost, later.cost, strict=True)
        costs.append(Cost(*(number for pair in pairs for number in pair)))
    return SampleStats(changes, tuple(costs))


@dataclass(frozen=True)
class GatherTimes:
    """What one gather of a chunk takes.

    Attributes:
        nbytes: of the encoded chunk.
        preparing: seconds of what only the first gather of a step does before it encodes.
        hashing: seconds to find the changed blocks.
        encoding: seconds of the rest of encoding.
        decoding: seconds to decode one rank's chunk.
    """

    nbytes: float
    preparing: float
    hashing: float
    encoding: float
    decoding: float

    @property
    def cost(self) -> tuple[float, float, float, float]:
        """Bytes and seconds in the order of the fields of ``Cost``."""
        return self.nbytes, self.hashing, self.preparing + self.encoding, self.decoding


@dataclass(frozen=True)
class TimedGather:
    """Takes a chunk through encoding and decoding as ``NarrowAllGather`` does, in a step in which
    telemetry takes no sample."""

    scheme: Scheme
    layout: FloatLayout
    coder: Coder

    def gather(self, old_N: Tensor, new_N: Tensor, is_first: bool) -> GatherTimes:
        """Gathers ``new_N`` where ``old_N`` was gathered before.

        Args:
            is_first: whether it is the first gather after a step of the optimizer.
        """
        device = new_N.device
        old_N = old_N.clone()
        sender_cache = codec.sender_cache(old_N, self.scheme, self.layout)
        receiver_cache = codec.receiver_cache(old_N, self.scheme, self.layout)
        row_N = torch.empty_like(new_N)
        shard_N, preparing = new_N, 0.0
        if is_first:
            start = util.now(device)
            shard_N = _prepared(new_N)
            preparing = util.now(device) - start
        hashing = self._hashing(shard_N, sender_cache)
        start = util.now(device)
        encoded = codec.encode(shard_N, sender_cache, self.scheme, self.layout, self.coder)
        payload = packet.pack(
            [encoded], coder=self.coder, settings=0, sequence=0, shard_checksum=0, device=device
        )
        buffer = send_buffer(payload, payload.numel())
        encoding = max(util.now(device) - start - hashing, 0.0)
        start = util.now(device)
        self._decode_into(row_N, buffer, receiver_cache)
        decoding = util.now(device) - start
        if self.scheme.caches_hashes:  # of what it has sent, when it decodes its own chunk
            hashing += self._hashing(shard_N, sender_cache)
        return GatherTimes(encoded.size, preparing, hashing, encoding, decoding)

    def _hashing(self, shard_N: Tensor, cached: Tensor | None) -> float:
        """Seconds to find the changed blocks, which is a part of encoding."""
        scheme = self.scheme
        if scheme.compression != "exponent" or scheme.exponent_coding != "blocks":
            return 0.0
        start = util.now(shard_N.device)
        exponents_N = floats.exponents(shard_N, self.layout)
        if scheme.caches_hashes:
            codec.block_hashes(exponents_N, scheme.block_size)
        else:
            codec.changed_blocks(exponents_N, cached, scheme.block_size)
        return util.now(shard_N.device) - start

    def _decode_into(self, row_N: Tensor, buffer: Tensor, cached_N: Tensor | None) -> None:
        """Decodes a received payload, and caches what the compression needs."""
        scheme, layout = self.scheme, self.layout
        (arrived,) = packet.unpack_body(*packet.unpack(buffer))
        bits_N = codec.decode(arrived, cached_N, row_N.numel(), scheme, layout, self.coder)
        row_N.copy_(bits_N)
        to_cache = codec.receiver_cache(bits_N, scheme, layout)
        if to_cache is not cached_N:
            cached_N.copy_(to_cache)


def _prepared(new_N: Tensor) -> Tensor:
    """The shard as it is encoded ahead of its gather: cast and joined, and compared with the
    parameters when the gather is due."""
    shard_N = torch.cat([new_N.clone()])
    torch.equal(shard_N, new_N)
    return shard_N
