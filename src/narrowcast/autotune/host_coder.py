"""Entropy coders that do not run on the device of the model: what they cost is said, and ``auto``
leaves baseline FSDP2 in place.

On a GPU without a coder of its own every coded byte is copied to host memory, coded there and
copied back, which takes longer than most links take to send it uncompressed.
"""

import logging
import time
from collections.abc import Sequence

import torch

from narrowcast.fsdp2 import ParamGroup
from narrowcast.wire import floats
from narrowcast.wire.coders import Coder, runs_on

logger = logging.getLogger(__name__)

_SAMPLE = 1 << 20  # bytes of exponents


def leaves_plain(groups: Sequence[ParamGroup], coder: Coder, what: str, *, force: bool) -> bool:
    """Whether ``auto`` leaves baseline FSDP2 in place, since the coder does not run on the device;
    it warns of that.

    Args:
        what: ``all-gather`` or ``reduce-scatter``.
        force: ``False`` always, and no warning.
    """
    device = groups[0].device
    if force or runs_on(coder, device):
        return False
    if _speaks(groups):
        logger.warning(
            'narrowcast: %s: no entropy coder runs on %s; compression "auto" leaves baseline FSDP2 '
            "in place. force = true chooses all the same, by way of host memory",
            what,
            device.type,
        )
    return True


def warn_of_cost(
    groups: Sequence[ParamGroup],
    coder: Coder,
    what: str,
    *,
    encoded: int,
    decoded: int,
    force: bool,
) -> None:
    """Warns of what an explicit compression costs where the coder does not run on the device.

    Args:
        what: ``all-gather`` or ``reduce-scatter``.
        encoded, decoded: values that this rank encodes, and decodes, in one collective of every
            parameter group.
        force: no warning.
    """
    device = groups[0].device
    if force or runs_on(coder, device) or not _speaks(groups):
        return
    encoding, decoding = seconds_per_byte(coder)
    seconds = encoded * encoding + decoded * decoding
    logger.warning(
        "narrowcast: %s: no entropy coder runs on %s: all that is coded is copied to host memory "
        "and back. That takes at least %.3g s for one %s of all parameters, copies not counted. "
        'compression = "auto" leaves baseline FSDP2 in place; force = true keeps this compression '
        "without a warning",
        what,
        device.type,
        seconds,
        what,
    )


def seconds_per_byte(coder: Coder) -> tuple[float, float]:
    """Seconds to encode and to decode a byte of exponents of Gaussian bf16 values in host memory,
    measured now, in a few milliseconds."""
    generator = torch.Generator().manual_seed(0)  # the job's own stays as it is
    values_N = torch.randn(_SAMPLE, generator=generator, device="cpu").to(torch.bfloat16)
    layout = floats.LAYOUTS[torch.bfloat16]
    exponents_N = floats.exponents(values_N.view(layout.bits), layout)
    start = time.perf_counter()
    stream = coder.encode(exponents_N)
    encoded = time.perf_counter()
    coder.decode(stream, _SAMPLE)
    decoded = time.perf_counter()
    return (encoded - start) / _SAMPLE, (decoded - encoded) / _SAMPLE


def _speaks(groups: Sequence[ParamGroup]) -> bool:
    """Whether this rank warns for those that share its first parameter group."""
    return groups[0].process_group.rank() == 0
