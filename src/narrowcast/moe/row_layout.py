"""The byte layout of a dispatched row: token, routing probabilities and experts.

x (D values) | probabilities (J fp32) | experts (J uint8 or int16) | padding
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_ROW_ALIGNMENT = 16  # bytes: a GPU's widest load


@dataclass(frozen=True)
class RowLayout:
    """The byte layout of a row.

    Attributes:
        dim, dtype: of the token, D values.
        max_experts: J, the most experts that one row names.
        num_experts: experts that the receiver can tell apart, where ``num_experts`` itself stands
            for none; 0 where no experts are sent, as with gradients.
    """

    dim: int
    dtype: torch.dtype
    max_experts: int
    num_experts: int

    @property
    def id_dtype(self) -> torch.dtype:
        """The smallest dtype of an expert, or of none."""
        return torch.uint8 if self.num_experts <= 255 else torch.int16

    @property
    def token_nbytes(self) -> int:
        """Bytes of the token alone."""
        return self.dim * self.dtype.itemsize

    @property
    def prob_start(self) -> int:
        """Offset of the probabilities, in bytes."""
        return _rounded_up(self.token_nbytes, 4)

    @property
    def id_start(self) -> int:
        """Offset of the experts, in bytes."""
        return self.prob_start + 4 * self.max_experts

    @property
    def nbytes(self) -> int:
        """Bytes of a row, padding included."""
        id_bytes = self.max_experts * self.id_dtype.itemsize if self.num_experts else 0
        return _rounded_up(self.id_start + id_bytes, _ROW_ALIGNMENT)

    def without_experts(self) -> "RowLayout":
        """The layout of the gradient of a row."""
        return replace(self, num_experts=0)

    def pack(self, x_SD: Tensor, prob_SJ: Tensor, id_SJ: Tensor | None = None) -> Tensor:
        """Return a message (S, nbytes) uint8."""
        message = x_SD.new_zeros(len(x_SD), self.nbytes, dtype=torch.uint8)
        self._x(message).copy_(x_SD)
        self._prob(message).copy_(prob_SJ)
        if id_SJ is not None:
            self._id(message).copy_(id_SJ)
        return message

    def unpack(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the token rows (S, D) and probabilities (S, J) of a message, as views of it, and
        its experts (S, J) int64 if it has any."""
        id_SJ = self._id(message).long() if self.num_experts else None
        return self._x(message), self._prob(message), id_SJ

    def _x(self, message: Tensor) -> Tensor:
        return message[:, : self.token_nbytes].view(self.dtype)

    def _prob(self, message: Tensor) -> Tensor:
        return message[:, self.prob_start : self.id_start].view(torch.float32)

    def _id(self, message: Tensor) -> Tensor:
        end = self.id_start + self.max_experts * self.id_dtype.itemsize
        return message[:, self.id_start : end].view(self.id_dtype)


def _rounded_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
