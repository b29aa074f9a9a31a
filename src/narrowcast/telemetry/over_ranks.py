"""Records of numbers, reduced over all ranks: each field states how.

A record is a dataclass. A field holds a number declared by ``summed`` or ``largest``, another
record, or a dictionary of numbers or records, whose metadata are ``by_key``.
"""

from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

Operation = Literal["sum", "max"]
Record = TypeVar("Record")

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def summed() -> Any:
    """A number that is added up over ranks."""
    return field(default=0, metadata={"operation": "sum"})


def largest() -> Any:
    """A number of which the largest of all ranks counts."""
    return field(default=0, metadata={"operation": "max"})


def by_key(
    operation: Operation | None = None, keys: Sequence[str] | None = None, missing: Any = 0
) -> dict[str, Any]:
    """Metadata of a field that holds a dictionary, whose values are reduced key by key.

    Args:
        operation: for values that are numbers; ``None`` for records.
        keys: that any rank may have. An entry that equals ``missing`` on all ranks is left out of
            the result. ``None``: all ranks have the same keys, in the same order.
        missing: stands for the value of a key that a rank does not have.
    """
    return {"operation": operation, "keys": keys, "missing": missing}


def reduce_over_ranks(record: Record, device: torch.device) -> Record:
    """A record reduced over all ranks of the job, each of which must call this. Two collectives.

    Args:
        device: where the collectives take their tensors.
    """
    numbers: dict[str, list[int]] = {operation: [] for operation in _OPERATIONS}

    def collect(number: int, operation: Operation) -> int:
        numbers[operation].append(number)
        return number

    _mapped(record, collect)
    reduced = {}
    for operation, values in numbers.items():
        tensor = torch.tensor(values, dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op=_OPERATIONS[operation])
        reduced[operation] = iter(tensor.tolist())
    return _mapped(record, lambda _, operation: next(reduced[operation]))


def _mapped(record: Record, change: Callable[[int, Operation], int]) -> Record:
    """The record with ``change`` applied to each number, in an order that all ranks share."""
    return replace(
        record,
        **{f.name: _mapped_field(getattr(record, f.name), f, change) for f in fields(record)},
    )


def _mapped_field(value: Any, of: Field, change: Callable[[int, Operation], int]) -> Any:
    operation = of.metadata.get("operation")
    if not isinstance(value, dict):
        return _mapped(value, change) if operation is None else change(value, operation)
    keys, missing = of.metadata["keys"], of.metadata["missing"]
    found = {}
    for key in value if keys is None else keys:
        entry = value.get(key, missing)
        found[key] = _mapped(entry, change) if operation is None else change(entry, operation)
    if keys is not None:
        found = {key: entry for key, entry in found.items() if entry != missing}
    return type(value)(found)
