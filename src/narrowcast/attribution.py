"""Whose collective it is that a thread is about to start."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

CALLER = "counted by its caller"
_thread = threading.local()


def sender() -> object | None:
    """What ``counted_as`` was last given, in this thread; ``None``: what starts is user code's."""
    return getattr(_thread, "sender", None)


@contextmanager
def counted_as(owner: object) -> Iterator[None]:
    """Collectives started within are ``owner``'s.

    Those of ``CALLER`` are under "other" of no ledger: whoever starts them counts them with
    ``add``, or they belong to a model that is not counted, or to no step.
    """
    outer, _thread.sender = sender(), owner
    try:
        yield
    finally:
        _thread.sender = outer
