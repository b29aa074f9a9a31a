"""One rank's contribution to the gradients of another: a row in, a payload out, and back.

Everything here works on tensors alone: it knows no process group, no clock and no ledger. Nothing
is cached from call to call, so no rank can come out of step.
"""

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowcast import errors
from narrowcast.config import MAX_CHUNK_VALUES
from narrowcast.reducescatter import codec
from narrowcast.reducescatter.codec import Compression
from narrowcast.wire import packet
from narrowcast.wire.coders import Coder

OTHER_GRADIENTS = (
    "holds other gradients than are due here, by their number, dtype or compression: give every "
    "rank the same model, mesh, compression and reduce dtype, and let the same parameters have "
    "gradients on all"
)


@dataclass(frozen=True)
class RowCodec:
    """Encodes and decodes rows of one size and dtype.

    Attributes:
        label: of the parameters whose gradients these are; the same on every rank.
        shape, dtype: of the rows of all ranks together, (W, N).
        settings: a digest of all that the ranks must agree on.
    """

    label: str
    shape: torch.Size
    dtype: torch.dtype
    compression: Compression
    coder: Coder
    settings: int = field(init=False)

    def __post_init__(self) -> None:
        text = repr((self.label, self.shape, self.dtype, self.compression))
        digest = hashlib.sha256(text.encode()).digest()
        object.__setattr__(self, "settings", int.from_bytes(digest[:8], "little"))

    def encode(self, row_N: Tensor) -> Tensor:
        """The payload, uint8, of a row.

        Never raises, since the receiver would wait: the payload of a rank that cannot encode holds
        its error, and the receiver raises it.
        """
        chunks = row_N.split(MAX_CHUNK_VALUES)
        try:
            return packet.pack(
                [codec.encode(chunk, self.compression, self.coder) for chunk in chunks],
                coder=self.coder,
                settings=self.settings,
                sequence=0,
                shard_checksum=0,
                device=row_N.device,
            )
        except Exception as error:
            return packet.pack_failure(
                error,
                num_chunks=len(chunks),
                settings=self.settings,
                sequence=0,
                device=row_N.device,
            )

    def decode_into(self, row_N: Tensor, payload: Tensor) -> None:
        """Checks a payload, and decodes it into ``row_N``.

        Raises:
            PayloadError: the payload is damaged.
            SettingsError: the sender has other settings or another coder.
            SenderError: the sender could not encode.
            ValueError: a chunk does not decode.
        """
        header, body = packet.unpack(payload)
        if header.settings != self.settings:
            raise errors.SettingsError(OTHER_GRADIENTS)
        coder = (self.coder.wire_id, self.coder.wire_version)
        if header.status == packet.Status.OK and header.coder != coder:
            raise errors.SettingsError(
                f"is coded by (id, version) {header.coder}, this rank's coder is {coder}: install "
                "the same releases on every rank"
            )
        encoded_chunks = packet.unpack_body(header, body)
        for chunk, encoded in zip(row_N.split(MAX_CHUNK_VALUES), encoded_chunks, strict=True):
            codec.decode_into(chunk, encoded, self.coder)


def sum_in_order(output_N: Tensor, rows_WN: Tensor, factor: float, divisor: int) -> None:
    """Writes ``factor`` times each row, summed from the first to the last, over ``divisor``.

    Overwrites ``rows_WN``. Works on chunks that stay in a CPU's cache.
    """
    size = MAX_CHUNK_VALUES
    for output, rows in zip(output_N.split(size), rows_WN.split(size, dim=1), strict=True):
        if factor != 1:
            rows.mul_(factor)
        output.copy_(rows[0])
        for row in rows[1:]:
            output.add_(row)
        if divisor != 1:
            output.div_(divisor)
