"""narrowcast: Mixture-of-Experts training that sends fewer bytes, without changing one bit."""

from narrowcast.allgather.api import NarrowedModel, narrow_all_gather
from narrowcast.allgather.wire import (
    NarrowcastError,
    OutOfStepError,
    PayloadError,
    SenderError,
    SettingsError,
    VerificationError,
)
from narrowcast.reducescatter.api import NarrowedGradients, narrow_reduce_scatter
from narrowcast.volume import Ledger

__all__ = [
    "Ledger",
    "NarrowcastError",
    "NarrowedGradients",
    "NarrowedModel",
    "OutOfStepError",
    "PayloadError",
    "SenderError",
    "SettingsError",
    "VerificationError",
    "narrow_all_gather",
    "narrow_reduce_scatter",
]
