"""Objects and errors of single ranks, brought to all of them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist


def gathered(local: Any, *, on_every_rank: bool = True) -> list[Any] | None:
    """The objects of all ranks, in the order of the ranks. Every rank must call it alike.

    Returns:
        None on every rank but the first if not ``on_every_rank``.
    """
    objects: list[Any] | None = [None] * dist.get_world_size()
    if on_every_rank:
        dist.all_gather_object(objects, local)
        return objects
    objects = objects if dist.get_rank() == 0 else None
    dist.gather_object(local, objects)
    return objects


def from_every_rank(make: Callable[[], Any]) -> list[Any]:
    """What ``make`` returns on each rank, in the order of the ranks. Every rank must call it alike.

    Raises:
        ValueError: ``make`` raised on a rank. The message is the same on every rank, that of the
            first rank that failed.
    """
    made, failure = None, None
    try:
        made = make()
    except Exception as error:
        failure = error
    outcomes = gathered((made, None if failure is None else _message(failure)))
    for rank, (_, message) in enumerate(outcomes):
        if message is not None:
            raise ValueError(message if rank == 0 else f"on rank {rank}: {message}") from failure
    return [made for made, _ in outcomes]


def from_first_rank(read: Callable[[], Any], source: str) -> Any:
    """What ``read`` returns on the first rank, on every rank. Every rank must call it alike.

    Args:
        read: is called on the first rank alone.
        source: what is read. It stands before the message of an error.

    Raises:
        ValueError: ``read`` raised. The message is the same on every rank.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [read(), None]
        except Exception as error:
            outcome = [None, f"{source}: {_message(error)}"]
    dist.broadcast_object_list(outcome, src=0)
    found, message = outcome
    if message is not None:
        raise ValueError(message)
    return found


@contextlib.contextmanager
def naming(source: str) -> Iterator[None]:
    """Turns errors of files within it into ``ValueError``s that begin with ``source``."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error


def _message(error: Exception) -> str:
    """The message of an error that is meant for users; of any other error, its type as well."""
    is_for_users = isinstance(error, ValueError | ImportError | OSError)
    return str(error) if is_for_users else f"{type(error).__name__}: {error}"
