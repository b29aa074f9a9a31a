"""How every rank comes to raise the same error when one of them fails.

What a rank can tell from bytes that all ranks received, all raise by themselves. Everything else
(no memory, damage on one rank's own way, a bug) one rank meets alone, somewhere between two
collectives, while the others wait in the next one. Whatever it is, and wherever:

    the rank that fails                          every other rank
    posts the error in the job's store           waits in some collective of the job
    waits for the others to post theirs
      all did: they failed alike, nobody waits
      else: closes its connections      ->       the wait ends in an error of the backend
    raises the error that was posted first       reads the store, raises the error posted first

That takes no collective and no message while all is well, works across process groups (replicas,
pipeline stages), and asks nothing of the place where it happens. A rank that waits in a collective
that is not narrowcast's gets the backend's own error there; ``Job.informed`` makes the named one of
it.

Where ranks agree anyhow in the last collective of a call (``agreement.raise_alike``), they all post
their error, and process groups can be used again.

Only gloo's connections can be closed so. On NCCL its own watchdog ends the others, or the launcher
does when the first process has ended.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from narrowcast.attribution import counted_by_caller
from narrowcast.fsdp2 import close_connections, default_store

_GRACE_S = 2.0  # for ranks that fail alike, one later than the other
_POLL_S = 0.02
_CLOSED = ("Connection closed by peer", "Connection reset by peer")  # as gloo says it
_PATIENCE = timedelta(seconds=1)  # in which a rank that is merely slow has come


class NarrowcastError(RuntimeError):
    """Something that no rank can go on from; raised on every rank of the job alike.

    Attributes:
        agreed: whether all ranks have come to raise it (see ``narrowcast.errors``).
    """

    agreed = False


class PayloadError(NarrowcastError):
    """A payload that cannot be what its sender encoded."""


class OutOfStepError(NarrowcastError):
    """The ranks do not keep the same: a cache was dropped, or a rank missed a gather."""


class SettingsError(NarrowcastError):
    """The ranks were given different settings, models or versions."""


class SenderError(NarrowcastError):
    """A rank could not encode its shard; the message says which and why."""


class VerificationError(NarrowcastError):
    """A shard that was rebuilt is not the shard that was sent, though every payload was sound."""


@contextmanager
def error_context(subject: str) -> Iterator[None]:
    """Begins the message of an error with what it is about, and makes any a NarrowcastError."""
    try:
        yield
    except ValueError as error:
        raise PayloadError(f"{subject} does not decode: {error}") from error
    except NarrowcastError as error:
        raise type(error)(f"{subject} {error}") from error
    except Exception as error:
        raise NarrowcastError(f"{subject}: {type(error).__name__}: {error}") from cause(error)


def cause(error: Exception) -> Exception | None:
    """What an error is to be raised from: a context manager would raise a StopIteration itself."""
    return None if isinstance(error, StopIteration) else error


class Job:
    """The ranks that train together, and the error that ended their training.

    Attributes:
        group: of all these ranks.
        error: what every rank raises; ``None`` while all is well.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.error: NarrowcastError | None = None
        self._round = 0  # of failures that all ranks met alike, and survived
        self._watches = 0
        self._store = default_store()

    def size(self) -> int:
        return self.group.size()

    @contextmanager
    def together(self, subject: str) -> Iterator[None]:
        """Every exception within becomes one error, the same on every rank of the job.

        Args:
            subject: what is done within; begins the message of an error that has no better one.

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
        """An error of the backend within, where a rank waited for one that has failed, becomes the
        error of that one.

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
        """Whether another rank has failed, asked without waiting for anybody.

        Raises:
            NarrowcastError: one has.
        """
        if self._posted("error"):
            raise self._agree(NarrowcastError("another rank failed"))

    def new_watch(self) -> int:
        """A number for whoever counts steps, the same on every rank."""
        self._watches += 1
        return self._watches

    def wait(
        self, work: dist.Work, watch: int, step: int, *, steps_end: bool, groups: list[str]
    ) -> None:
        """Waits for a collective that ranks which count other steps would never come to.

        A rank that skips a step of the optimizer goes on to gather parameters, while the others
        wait for it where a step ends. Neither is late: they wait for each other.

        Args:
            work: of a gloo collective.
            watch: from ``new_watch``.
            step: how many steps of the optimizer this rank has finished.
            steps_end: whether this is where a step ends, or else a gather of the next forward.
            groups: names of the process groups whose parameters this rank gathers.

        Raises:
            OutOfStepError: of a gather: a rank that shards the same parameters is a step ahead.
        """
        while not _done(work):
            for group in groups:
                if steps_end:
                    self._store.set(self._key(f"ended/{watch}/{group}/{step}"), "")
                elif self._posted(f"ended/{watch}/{group}/{step + 1}"):
                    raise OutOfStepError(
                        f"rank {dist.get_rank()} gathers parameters after step {step} of the "
                        f"optimizer, while others have finished step {step + 1} and wait for it: "
                        "a rank skipped optimizer.step(), or took one more. Let all ranks take "
                        "each step, or none (a NaN guard must decide for all ranks at once); "
                        "fixed compressions need no such agreement"
                    )

    def _agree(self, error: NarrowcastError) -> NarrowcastError:
        """The error that was posted first, once nobody waits for this rank any more."""
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
        """Whether all ranks of the job have failed too, or do so soon."""
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

    def _key(self, name: str) -> str:
        return f"narrowcast/{self.group.group_name}/{self._round}/{name}"


def _named(error: Exception, subject: str) -> NarrowcastError:
    """The error with the rank that met it, unless all could tell it from what they received."""
    rank = dist.get_rank()
    if isinstance(error, NarrowcastError):
        known = error.__cause__ is None or isinstance(error.__cause__, NarrowcastError)
        return error if known else type(error)(f"{error} (on rank {rank})")
    if any(text in str(error) for text in _CLOSED):
        return NarrowcastError(
            f"{subject}: rank {rank} lost its connection to another rank, which has ended or "
            f"cannot be reached: {error}"
        )
    return NarrowcastError(f"{subject} failed on rank {rank}: {type(error).__name__}: {error}")


def _done(work: dist.Work) -> bool:
    """Waits for a gloo collective, but not for longer than a rank may reasonably be late. One that
    was waited for in vain goes on and can be waited for again."""
    try:
        return work.wait(_PATIENCE)
    except RuntimeError as error:
        if "timed out" in str(error).lower():
            return False
        raise


_jobs: dict[str, Job] = {}


def job_of(group: dist.ProcessGroup | None) -> Job:
    """The job of these ranks; ``None``: of all. One object, whoever asks."""
    group = group if group is not None else dist.group.WORLD
    known = _jobs.get(group.group_name)
    if known is None or known.group is not group:
        known = _jobs[group.group_name] = Job(group)
    return known


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
