"""Before a job begins, all of its ranks agree that it can, or all end with the same error."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

# Set by torchrun, and by other launchers of ranks that rendezvous at an address.
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(seconds=300)  # torchtitan's own, of the rendezvous
_stores: list["Store"] = []  # one rank hosts it, for as long as the others use it


def is_first_rank() -> bool:
    """Whether this is the rank that reads and writes files."""
    return os.environ.get("RANK", "0") == "0"


def is_speaker() -> bool:
    """Whether this is the rank of its node that prints messages."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def prepared(program: str, prepare: Callable[[], T]) -> T:
    """What ``prepare`` returns on this rank, if it returns on every rank.

    If it raises a ``ValueError``, an ``ImportError`` or an ``OSError`` on any rank, or exits, all
    ranks exit with code 2, after the first rank of each node has printed the message. If it raises
    another exception, this rank raises it, and the other ranks exit with code 2. Within
    ``prepare``, torchtitan logs nothing, and only the first rank of each node prints.

    Args:
        program: stands before the message.
        prepare: is called alike on every rank, before any process group.
    """
    error = None
    try:
        with quiet():
            result = prepare()
    except (ValueError, ImportError, OSError) as wrong:
        logging.getLogger(__name__).debug("%s", wrong, exc_info=True)
        error = str(wrong)
    except SystemExit as ended:
        if not ended.code:  # --help
            raise
        error = ""  # the parser of the command line has printed it
    except Exception as failure:  # whose traceback this rank will show
        if _is_launched():
            _first_error(f"{type(failure).__name__}: {failure}")
            _wait_until_printed()
        raise
    found = _first_error(error) if _is_launched() else error
    if found is None:
        return result
    if found and is_speaker():
        print(f"{program}: {found}", file=sys.stderr, flush=True)
    if _is_launched():
        _wait_until_printed()
    sys.exit(2)


def _first_error(local: str | None) -> str | None:
    """The error of the first rank, or else of any other; None if no rank has one.

    Ranks exchange it by the store of their later process group."""
    rank = int(os.environ["RANK"])
    try:
        store = _store()
        if local is not None:
            store.set("0" if rank == 0 else "other", local if rank == 0 else _of_rank(rank, local))
        _wait_for_all("checked")
        return next((store.get(key).decode() for key in ("0", "other") if store.check([key])), None)
    except RuntimeError as lost:
        if local is not None:
            return local
        return f"not all of the {os.environ['WORLD_SIZE']} ranks have come: {lost}"


def _wait_until_printed() -> None:
    """Wait until every rank has printed its message. torchrun ends all ranks once one has ended,
    but each must end by itself, with its own code."""
    with contextlib.suppress(RuntimeError):  # another has ended
        _wait_for_all("printed")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _of_rank(rank: int, message: str) -> str:
    return f"on rank {rank}: {message or 'the command line is wrong'}"


def _wait_for_all(key: str) -> None:
    """Wait until every rank has called this with the same key."""
    store = _store()
    if store.add(f"{key}/ranks", 1) == int(os.environ["WORLD_SIZE"]):
        store.set(f"{key}/all", "")
    store.wait([f"{key}/all"], _TIMEOUT)


def _store() -> "Store":
    if not _stores:
        import torch.distributed as dist

        store, *_ = next(dist.rendezvous("env://", timeout=_TIMEOUT))
        _stores.append(dist.PrefixStore("narrowcast", store))
    return _stores[0]


def _is_launched() -> bool:
    return all(os.environ.get(name) for name in LAUNCHED) and os.environ["WORLD_SIZE"] != "1"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torchtitan's log lines, and without the output of all but one rank of each node."""
    logging.disable(logging.WARNING)
    try:
        if is_speaker():
            yield
            return
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            yield
    finally:
        logging.disable(logging.NOTSET)
