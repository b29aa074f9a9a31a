"""Who counts the collectives that this thread starts."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_CALLER = object()
_thread = threading.local()


def current_owner() -> object | None:
    """The owner that ``counted_as`` was last given in this thread; ``None`` for user code."""
    return getattr(_thread, "owner", None)


@contextmanager
def counted_as(owner: object) -> Iterator[None]:
    """Collectives that start within are counted for ``owner``: a parameter group or a ledger."""
    outer, _thread.owner = current_owner(), owner
    try:
        yield
    finally:
        _thread.owner = outer


@contextmanager
def counted_by_caller() -> Iterator[None]:
    """Collectives that start within are in no ledger's count of "other" collectives.

    The code that starts them counts them itself with ``Ledger.add``, or they belong to a model that
    is not counted, or to no training step.
    """
    with counted_as(_CALLER):
        yield
