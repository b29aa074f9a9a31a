"""Times what a device does, not only what it was asked to do."""

import time

import torch


def now(device: torch.device) -> float:
    """Seconds of a clock, once the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
