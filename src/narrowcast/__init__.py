"""narrowcast: Mixture-of-Experts training that sends fewer bytes, without changing one bit."""

from narrowcast.all_gather import NarrowedModel, narrow_all_gather
from narrowcast.errors import (
    NarrowcastError,
    OutOfStepError,
    PayloadError,
    SenderError,
    SettingsError,
    VerificationError,
)
from narrowcast.reduce_scatter import NarrowedGradients, narrow_reduce_scatter
from narrowcast.telemetry.ledger import Ledger

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
