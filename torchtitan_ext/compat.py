"""What torchtitan 0.3.0 needs of torch that the torch of this machine lacks."""

from torchtitan_ext.cpu import apply as support_cpu
from torchtitan_ext.private import provide_set_timeout


def apply() -> None:
    """Complete torch 2.13, and let torchtitan train on CPU where there is no accelerator.

    Idempotent. It may be called before or after torchtitan's modules are imported, but must be
    called before a trainer is built.
    """
    provide_set_timeout()
    support_cpu()
