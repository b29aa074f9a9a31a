"""What torchtitan 0.3.0 needs of torch that this machine's torch lacks."""

import torch.distributed

from narrowcast.fsdp2 import set_timeout
from torchtitan_ext.cpu import apply as support_cpu


def apply() -> None:
    """Complete torch 2.13, and let torchtitan train on CPU where there is no accelerator.

    ``torchtitan.distributed.utils.set_pg_timeouts`` calls ``torch.distributed.set_timeout`` of
    torch 2.14 after the first step.

    Idempotent. It may be called before or after torchtitan's modules are imported, but must be
    called before a trainer is built.
    """
    torch.distributed.set_timeout = set_timeout
    support_cpu()
