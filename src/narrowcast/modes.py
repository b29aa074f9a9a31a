"""What narrowcast makes does not depend on the mode that a model runs in."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def own_mode() -> Iterator[None]:
    """Tensors made within are ordinary ones, whatever mode the caller runs in.

    Caches that were first filled in an evaluation under ``torch.inference_mode`` would be inference
    tensors, which nothing may write to outside of it.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def ordinary(tensor: Tensor) -> Tensor:
    """The same memory as an ordinary tensor, to be written to in ``own_mode``."""
    if not tensor.is_inference():
        return tensor
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape)
