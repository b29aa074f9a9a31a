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
from narrowcast.volume import Ledger

__all__ = [
    "Ledger",
    "NarrowcastError",
    "NarrowedModel",
    "OutOfStepError",
    "PayloadError",
    "SenderError",
    "SettingsError",
    "VerificationError",
    "narrow_all_gather",
]
