"""How fast entropy coders, hashes and comparisons are on exponents of weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.autotune.stopwatch import Stopwatch
from narrowcast.config import MAX_CHUNK_VALUES
from narrowcast.wire import floats
from narrowcast.wire.coders import Coder

_REPEATS = 3
_SAMPLE = 1 << 20  # bytes to encode


@dataclass(frozen=True)
class CoderSpeed:
    """How fast a coder is on exponents of Gaussian bf16 values, while all ranks use it at once.

    Attributes:
        encode, decode: bytes of exponents a second.
        ratio: bytes in over bytes out.
        hidden: share of the encoding that goes on after the call has returned; 0 on the CPU.
    """

    name: str
    encode: float
    decode: float
    ratio: float
    hidden: float


def exponent_chunks(device: torch.device) -> list[Tensor]:
    """Exponents of Gaussian bf16 values, in chunks as they are coded in training."""
    generator = torch.Generator().manual_seed(0)  # the job's own stays as it is
    values = torch.randn(_SAMPLE, generator=generator, device="cpu").to(device, torch.bfloat16)
    layout = floats.LAYOUTS[torch.bfloat16]
    return list(floats.exponents(values.view(layout.bits), layout).split(MAX_CHUNK_VALUES))


def measure_coder(
    name: str, coder: Coder, chunks: list[Tensor], stopwatch: Stopwatch
) -> CoderSpeed:
    """Measures a coder on ``exponent_chunks``."""

    def encode() -> list[Tensor]:
        return [coder.encode(chunk) for chunk in chunks]

    streams = encode()
    encoding, returned, _ = stopwatch.times(encode, _REPEATS)
    decode = bytes_per_second(
        lambda: [
            coder.decode(stream, chunk.numel())
            for stream, chunk in zip(streams, chunks, strict=True)
        ],
        _SAMPLE,
        stopwatch,
    )
    return CoderSpeed(
        name=name,
        encode=_SAMPLE / encoding,
        decode=decode,
        ratio=_SAMPLE / sum(stream.numel() for stream in streams),
        hidden=0.0 if stopwatch.device.type == "cpu" else 1 - returned / encoding,
    )


def bytes_per_second(operation: Callable[[], object], nbytes: int, stopwatch: Stopwatch) -> float:
    """The speed of an operation on as many bytes."""
    operation()  # a warm-up
    seconds, *_ = stopwatch.times(operation, _REPEATS)
    return nbytes / seconds
