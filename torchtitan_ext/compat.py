"""What torchtitan 0.3.0 asks of torch and torch 2.13 does not have, on any device."""

import torch.distributed
import torch.distributed.distributed_c10d as c10d


def apply() -> None:
    """Give torch 2.13 the public names that torchtitan 0.3.0 calls. Idempotent.

    `torch.distributed.set_timeout` (torch 2.14): `torchtitan.distributed.utils.set_pg_timeouts`
    calls it after the first step. torch 2.13 has the same function as a private one.
    """
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = c10d._set_pg_timeout
