"""Public names of torch that torchtitan 0.3.0 calls and torch 2.13 lacks, on any device."""

import torch.distributed

from narrowcast import fsdp2


def apply() -> None:
    """Adds ``torch.distributed.set_timeout`` (torch 2.14), which
    ``torchtitan.distributed.utils.set_pg_timeouts`` calls after the first step. Idempotent."""
    torch.distributed.set_timeout = fsdp2.set_timeout
