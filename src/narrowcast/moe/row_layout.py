"""How a row that crosses between ranks lies in bytes: token, probabilities and experts.

x (D values) | probabilities (J fp32) | experts (J uint8, int16) | padding
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_ROW_ALIGNMENT = 16  # bytes: a GPU's widest load


@dataclass(frozen=True)
class RowLayout:
    """How a row that crosses lies in bytes.

    Attributes:
        dim, dtype: of the token.
        places: J, experts and probabilities that go with it.
        num_ids: experts at the other end; 0 where none are sent (gradients).
    """

    dim: int
    dtype: torch.dtype
    places: int
    num_ids: int

    @property
    def id_dtype(self) -> torch.dtype:
        return torch.uint8 if self.num_ids <= 255 else torch.int16

    @property
    def token_nbytes(self) -> int:
        """Of the token alone."""
        return self.dim * self.dtype.itemsize

    @property
    def prob_start(self) -> int:
        return _rounded_up(self.token_nbytes, 4)

    @property
    def id_start(self) -> int:
        return self.prob_start + 4 * self.places

    @property
    def nbytes(self) -> int:
        id_bytes = self.places * self.id_dtype.itemsize if self.num_ids else 0
        return _rounded_up(self.id_start + id_bytes, _ROW_ALIGNMENT)

    def pack(self, x_SD: Tensor, prob_SJ: Tensor, id_SJ: Tensor | None = None) -> Tensor:
        """(S, nbytes) uint8."""
        message = x_SD.new_zeros(len(x_SD), self.nbytes, dtype=torch.uint8)
        self._x(message).copy_(x_SD)
        self._prob(message).copy_(prob_SJ)
        if id_SJ is not None:
            self._id(message).copy_(id_SJ)
        return message

    def unpack(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The token rows (S, D) and probabilities (S, J) of a message, as views of it, and its
        experts (S, J) int64."""
        id_SJ = self._id(message).long() if self.num_ids else None
        return self._x(message), self._prob(message), id_SJ

    def _x(self, message: Tensor) -> Tensor:
        return message[:, : self.token_nbytes].view(self.dtype)

    def _prob(self, message: Tensor) -> Tensor:
        return message[:, self.prob_start : self.id_start].view(torch.float32)

    def _id(self, message: Tensor) -> Tensor:
        end = self.id_start + self.places * self.id_dtype.itemsize
        return message[:, self.id_start : end].view(self.id_dtype)


def _rounded_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
