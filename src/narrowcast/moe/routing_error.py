"""Checks of the routing that a dispatch receives.

The device finds invalid rows without waiting; they are described once the host asks. All ranks then
raise the same error.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.errors import NarrowcastError, raise_alike


class RoutingError(NarrowcastError):
    """The routing of a rank names a slot twice for one token, or a slot that does not exist."""


def argument_error(x_TD: Tensor, prob_TK: Tensor, slot_TK: Tensor) -> RoutingError | None:
    """Return an error if the dtype of the slots or the shapes of the arguments are invalid."""
    if slot_TK.is_floating_point() or slot_TK.is_complex() or slot_TK.dtype == torch.bool:
        return _error(f"slots are {slot_TK.dtype}; expected integers, such as int64 or int32")
    fit = prob_TK.shape == slot_TK.shape == (*x_TD.shape[:1], *slot_TK.shape[1:])
    if x_TD.ndim != 2 or slot_TK.ndim != 2 or not fit:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (x_TD, prob_TK, slot_TK))
        return _error(
            f"tokens, probabilities and slots have shapes {shapes}; expected (T, D), (T, K) and "
            "(T, K)"
        )
    return None


def has_faults(slot_TK: Tensor, num_slots: int) -> Tensor:
    """Return () bool, whether any token names a slot twice or a slot that does not exist.

    It does not wait for the device.
    """
    return _faults(slot_TK, num_slots)[1].any()


def first_fault(slot_TK: Tensor, num_slots: int) -> RoutingError | None:
    """Return an error for the first token for which ``has_faults`` is true, if any.

    It waits for the device.
    """
    sorted_TK, is_fault_TK = _faults(slot_TK, num_slots)
    found = is_fault_TK.nonzero()
    if not len(found):
        return None
    token, column = found[0].tolist()
    row = sorted_TK[token].tolist()
    slot = row[min(column, len(row) - 1)]
    fault = f"slot {slot} twice"
    if not 0 <= slot < num_slots:
        fault = f"slot {slot}, but slots are 0 to {num_slots - 1}"
    return _error(
        f"token {token} is routed to {fault} (its row: {slot_TK[token].tolist()}). A router must "
        "name slots that exist, and none of them twice for one token"
    )


def agreed(error: RoutingError | None, group: dist.ProcessGroup, device: torch.device) -> Exception:
    """Return the error that every rank of a group continues with, where at least one has one."""
    try:
        raise_alike(error, group, device)
    except NarrowcastError as found:
        return found
    raise AssertionError("a rank reported invalid routing, but no error")


def _faults(slot_TK: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """Return (T, K) the slots of each token, ascending, and (T, K + 1) bool, whether a slot is not
    larger than the one before it, with -1 before the first and E after the last."""
    sorted_TK = slot_TK.long().sort(dim=1).values
    below_T1, above_T1 = (sorted_TK.new_full((len(slot_TK), 1), end) for end in (-1, num_slots))
    ends_TK = torch.cat([below_T1, sorted_TK, above_T1], dim=1)
    return sorted_TK, ends_TK[:, 1:] <= ends_TK[:, :-1]


def _error(what: str) -> RoutingError:
    return RoutingError(f"rank {dist.get_rank()}: {what}")
