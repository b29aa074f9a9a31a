"""Every exception of narrowcast, and how all ranks come to raise the same one.

An error falls under one of three rules:

- All ranks received the bytes that show it: each rank raises it by itself (``error_context``).
- One rank met it alone before a collective that ends a call anyway: the ranks exchange it there
  (``raise_alike``), and process groups can be used again.
- One rank met it alone anywhere else (no memory, a bug), while the others wait in the next
  collective: ``Job.together`` makes it the error of all.

      the rank that fails                          every other rank
      posts the error in the job's store           waits in some collective of the job
      waits for the others to post theirs
        all did: they failed alike, none waits
        else: closes its connections      ->       the wait ends in an error of the backend
      raises the error that was posted first       reads the store, raises the error posted first

The third rule needs no collective and no message while all is well, works across process groups
(replicas, pipeline stages), and asks nothing of the place where the error occurs. A rank that waits
in a collective that is not narrowcast's gets the backend's own error there; ``Job.informed``
replaces it by the error that was posted.

Connections can be closed on gloo alone. On NCCL its own watchdog ends the other ranks, or the
launcher does when the first process has ended.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from narrowcast.attribution import counted_by_caller
from narrowcast.fsdp2 import close_connections, default_store

_GRACE_S = 2.0  # within which ranks that fail alike fail, one later than the other
_POLL_S = 0.02
_CLOSED = ("Connection closed by peer", "Connection reset by peer")  # gloo's words
_PATIENCE = timedelta(seconds=1)  # within which a rank that is merely slow arrives


class NarrowcastError(RuntimeError):
    """Training cannot continue; raised on every rank of the job alike.

    Attributes:
        agreed: whether all ranks are known to raise it.
    """

    agreed = False


class PayloadError(NarrowcastError):
    """A payload that cannot be what its sender encoded."""


class OutOfStepError(NarrowcastError):
    """Caches differ between ranks: one was dropped, or a rank missed a gather or a step."""


class SettingsError(NarrowcastError):
    """The ranks were given different settings, models or versions."""


class SenderError(NarrowcastError):
    """A rank could not encode its shard; the message names the rank and the reason."""


class VerificationError(NarrowcastError):
    """A shard that was rebuilt is not the shard that was sent, though every payload was sound."""


@contextmanager
def error_context(subject: str) -> Iterator[None]:
    """Makes every exception within a ``NarrowcastError`` whose message begins with ``subject``.

    For errors that follow from bytes that every rank has received, so that all raise the same one.

    Raises:
        PayloadError: in the place of a ``ValueError``.
        NarrowcastError: in the place of any other exception; of the same class if it is one.
    """
    try:
        yield
    except ValueError as error:
        raise PayloadError(f"{subject} does not decode: {error}") from error
    except NarrowcastError as error:
        raise type(error)(f"{subject} {error}") from error
    except Exception as error:
        raise NarrowcastError(f"{subject}: {type(error).__name__}: {error}") from cause(error)


def cause(error: Exception) -> Exception | None:
    """What an error is to be raised from: a context manager cannot raise from a StopIteration."""
    return None if isinstance(error, StopIteration) else error


@counted_by_caller()
def raise_alike(
    error: NarrowcastError | None, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raises, on every rank of ``group``, the ``error`` of the first one that has any.

    Costs one small all-reduce where none has. Every rank must call this.
    """
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if failed.item():
        errors: list[NarrowcastError | None] = [None] * group.size()
        dist.all_gather_object(errors, error, group)
        raise next(found for found in errors if found is not None)


class Job:
    """The ranks that train together, and the error that ended their training.

    Attributes:
        group: of all these ranks.
        error: what every rank raises; ``None`` while training can continue.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.error: NarrowcastError | None = None
        self._round = 0  # failures that all ranks met alike, and survived
        self._watches = 0
        self._store = default_store()

    def size(self) -> int:
        return self.group.size()

    @contextmanager
    def together(self, subject: str) -> Iterator[None]:
        """Every exception within becomes one error, the same on every rank of the job.

        Args:
            subject: what is done within; begins the message of an error that names no subject.

        Raises:
            NarrowcastError: this rank's error, or the one that another rank posted before.
        """
        if self.error is not None:
            raise self.error
        try:
            yield
        except Exception as error:
            if getattr(error, "agreed", False):
                raise
            raise self._agree(_named(error, subject)) from cause(error)

    @contextmanager
    def informed(self) -> Iterator[None]:
        """An error of the backend within, where this rank waited for one that has failed, becomes
        the error of that rank.

        Raises:
            NarrowcastError: another rank has posted it.
        """
        try:
            yield
        except RuntimeError as error:
            if getattr(error, "agreed", False) or not self._posted("error"):
                raise
            raise self._agree(_named(error, "training")) from error

    def check(self) -> None:
        """Checks whether another rank has failed, without waiting for any.

        Raises:
            NarrowcastError: one has.
        """
        if self._posted("error"):
            raise self._agree(NarrowcastError("another rank failed"))

    def new_watch(self) -> int:
        """A number for a counter of steps, the same on every rank."""
        self._watches += 1
        return self._watches

    def wait(
        self, work: dist.Work, steps: Mapping[int, int], *, steps_end: bool, groups: list[str]
    ) -> None:
        """Waits for a collective that a rank at another step would never reach.

        A rank that skips a step of the optimizer continues to gather parameters, while the others
        wait for it where a step ends. Neither is late: they wait for each other.

        Args:
            work: of a gloo collective.
            steps: how many steps of the optimizer this rank has finished, by watch
                (``new_watch``).
            steps_end: ``True`` where a step ends; ``False`` in a gather of the next forward.
            groups: names of the process groups whose parameters this rank gathers.

        Raises:
            OutOfStepError: of a gather: a rank that shards the same parameters is ahead.
        """
        while not _done(work):
            for (watch, step), group in product(steps.items(), groups):
                posted = f"ended/{watch}/{group}"
                if steps_end:
                    self._store.set(self._key(posted), str(step))
                elif self._posted(posted) and (ahead := self._read_step(posted)) > step:
                    raise OutOfStepError(
                        f"rank {dist.get_rank()} gathers parameters after step {step} of the "
                        f"optimizer, while others have finished step {ahead} and wait for it: "
                        "a rank skipped optimizer.step(), or took one more. Let all ranks take "
                        "each step, or none (a NaN guard must decide for all ranks at once); "
                        "fixed compressions need no such agreement"
                    )

    def _agree(self, error: NarrowcastError) -> NarrowcastError:
        """Posts ``error``, sees to it that no rank waits for this one, and returns the error that
        was posted first."""
        content = json.dumps([type(error).__name__, str(error)])
        try:
            kind, text = json.loads(self._store.compare_set(self._key("error"), "", content))
            error = globals()[kind](text)
            alike = self._all_raise()
        except RuntimeError:  # the store has gone, with the process that held it
            alike = False
        error.agreed = True
        if alike:
            self._round += 1
        else:
            self.error = error
            close_connections()
        return error

    def _all_raise(self) -> bool:
        """Whether all ranks of the job have failed too, or do so within ``_GRACE_S``."""
        raised, start = self._store.add(self._key("raised"), 1), time.monotonic()
        while raised < self.size():
            if self._posted("alone") or time.monotonic() - start > _GRACE_S:
                self._store.set(self._key("alone"), "")
                return False
            time.sleep(_POLL_S)
            raised = self._store.add(self._key("raised"), 0)
        return not self._posted("alone")  # one of them had given up waiting

    def _posted(self, name: str) -> bool:
        return self._store.check([self._key(name)])

    def _read_step(self, name: str) -> int:
        return int(self._store.get(self._key(name)))

    def _key(self, name: str) -> str:
        return f"narrowcast/{self.group.group_name}/{self._round}/{name}"


_jobs: dict[str, Job] = {}


def job_of(group: dist.ProcessGroup | None) -> Job:
    """The job of these ranks, ``None`` for all: one object for all callers."""
    group = group if group is not None else dist.group.WORLD
    known = _jobs.get(group.group_name)
    if known is None or known.group is not group:
        known = _jobs[group.group_name] = Job(group)
    return known


def _named(error: Exception, subject: str) -> NarrowcastError:
    """The error with the rank that met it, unless it followed from what all ranks received."""
    rank = dist.get_rank()
    if isinstance(error, NarrowcastError):
        is_common = error.__cause__ is None or isinstance(error.__cause__, NarrowcastError)
        return error if is_common else type(error)(f"{error} (on rank {rank})")
    if any(text in str(error) for text in _CLOSED):
        return NarrowcastError(
            f"{subject}: rank {rank} lost its connection to another rank, which has ended or "
            f"cannot be reached: {error}"
        )
    return NarrowcastError(f"{subject} failed on rank {rank}: {type(error).__name__}: {error}")


def _done(work: dist.Work) -> bool:
    """Waits for a gloo collective for at most ``_PATIENCE``. One that is not done by then continues
    and can be waited for again."""
    try:
        return work.wait(_PATIENCE)
    except RuntimeError as error:
        if "timed out" in str(error).lower():
            return False
        raise
