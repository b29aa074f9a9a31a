"""What comes before a job on all of its ranks: they agree that it can begin, or all end alike."""

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

# As set by torchrun, and by other launchers of ranks that meet at an address.
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(seconds=300)  # torchtitan's own, for ranks to meet
_kept: list["Store"] = []  # what one rank hosts must last as long as the others look


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def speaks() -> bool:
    """Whether this is the rank of its node that prints messages."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def prepared(program: str, prepare: Callable[[], T]) -> T:
    """What `prepare` returns on this rank, if it returns on every one.

    If it raises a ValueError, an ImportError or an OSError anywhere, or exits, all ranks exit with
    code 2, after the first rank of each node has said why. Another exception is its rank's own, and
    ends the other ranks so. Within it torchtitan logs nothing, and other ranks print nothing.

    Args:
        program: named before the message.
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
        error = ""  # the parser of the command line has said it
    except Exception as failure:  # whose traceback this rank will show
        if _is_launched():
            _first_error(f"{type(failure).__name__}: {failure}")
            _wait_until_said()
        raise
    found = _first_error(error) if _is_launched() else error
    if found is None:
        return result
    if found and speaks():
        print(f"{program}: {found}", file=sys.stderr, flush=True)
    if _is_launched():
        _wait_until_said()
    sys.exit(2)


def _first_error(mine: str | None) -> str | None:
    """The error of the first rank, or else of any other; None if there is none on any.

    The ranks meet at the store where their process group will."""
    rank = int(os.environ["RANK"])
    try:
        store = _store()
        if mine is not None:
            store.set("0" if rank == 0 else "other", mine if rank == 0 else _of_rank(rank, mine))
        _meet("checked")
        return next((store.get(key).decode() for key in ("0", "other") if store.check([key])), None)
    except RuntimeError as lost:
        if mine is not None:
            return mine
        return f"not all of the {os.environ['WORLD_SIZE']} ranks have come: {lost}"


def _wait_until_said() -> None:
    """torchrun ends all ranks once one has ended: each is to end by itself, with its own code, and
    not before the reason is told."""
    with contextlib.suppress(RuntimeError):  # another has ended
        _meet("said")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _of_rank(rank: int, message: str) -> str:
    return f"on rank {rank}: {message or 'the command line is wrong'}"


def _meet(where: str) -> None:
    store = _store()
    if store.add(f"{where}/ranks", 1) == int(os.environ["WORLD_SIZE"]):
        store.set(f"{where}/all", "")
    store.wait([f"{where}/all"], _TIMEOUT)


def _store() -> "Store":
    if not _kept:
        import torch.distributed as dist

        store, *_ = next(dist.rendezvous("env://", timeout=_TIMEOUT))
        _kept.append(dist.PrefixStore("narrowcast", store))
    return _kept[0]


def _is_launched() -> bool:
    return all(os.environ.get(name) for name in LAUNCHED) and os.environ["WORLD_SIZE"] != "1"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torchtitan's log lines, and without a word of ranks that are not to speak."""
    logging.disable(logging.WARNING)
    try:
        if speaks():
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
