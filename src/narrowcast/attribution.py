"""Whose collective it is that a thread is about to start."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

NOBODY = "counted by its caller"
_thread = threading.local()


def sender() -> object | None:
    """What ``sent_by`` was last given, in this thread; ``None``: what starts is user code's."""
    return getattr(_thread, "sender", None)


@contextmanager
def sent_by(owner: object) -> Iterator[None]:
    """Collectives started within are ``owner``'s."""
    outer, _thread.sender = sender(), owner
    try:
        yield
    finally:
        _thread.sender = outer


def named() -> AbstractContextManager[None]:
    """Collectives started within are under "other" of no ledger: the caller counts them with
    ``add``, or they belong to a model that is not counted, or to no step."""
    return sent_by(NOBODY)
