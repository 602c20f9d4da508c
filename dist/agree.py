"""How the ranks decide together, and how a run that fails says so once.

Decided here: an action that may fail on some ranks is run with its outcome exchanged, so that either every rank has
its result or every rank raises the same ``AgreedError`` with the cause of the lowest failing rank. Nobody waits for a
rank that has given up. For failures in the middle of a step, where nothing can be exchanged any more, the ranks
share the store of the process group: the first to write its cause there is the one that prints.

Object collectives need a CPU backend. Where the default group has none (NCCL), a gloo group is made at the first
call; every function here except ``report_failure`` and ``FailureWatch`` is therefore collective.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed

from conf.checks import ConfigError

T = TypeVar("T")

# errors of these types are the user's to mend: their message stands alone, without rank and traceback
USER_ERRORS = (ConfigError, ValueError, OSError)
# how long a rank with a secondary error waits for the rank that failed first to write its cause
GRACE_SECONDS = 3.0
# words in the messages of gloo, NCCL and the stores when a peer is gone
SECONDARY_WORDS = ("connection closed", "connection reset", "broken pipe", "gloo", "nccl", "socket", "timed out")
CLAIM_KEY = "gossamer/failure/claims"
CAUSE_KEY = "gossamer/failure/cause"
STATUS_KEY = "gossamer/failure/status"
FAILED = 1
# a status other than FAILED is for whoever starts the run again: nothing is left to be printed by others
STATUS_PATIENCE_SECONDS = 1.0

# what the watch has read: the store may end before the main thread asks
_seen_status: int | None = None
_control_group: tuple[Any, torch.distributed.ProcessGroup] | None = None


class AgreedError(RuntimeError):
    """The same failure on every rank.

    ``rank`` is the lowest rank that failed, ``kind`` the class name of its error, ``errno`` its error number if it
    was an ``OSError``, ``user`` whether it is for the user to mend (then the message is the original one), ``trace``
    the traceback of the failing rank as text.
    """

    def __init__(self, message: str, rank: int, kind: str, user: bool, errno: int | None, trace: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.user = user
        self.errno = errno
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank, self.kind, self.user, self.errno, self.trace)


class AgreedConfigError(AgreedError, ConfigError):
    """An ``AgreedError`` whose first cause was a ``ConfigError``."""


@dataclass
class _Outcome(Generic[T]):
    """What one rank sends: its value, or the description of its error."""

    value: T | None = None
    error: AgreedError | None = None


def control_group() -> torch.distributed.ProcessGroup:
    """A group of all ranks that moves CPU data: the default one if it can, else a gloo group made once."""
    global _control_group
    world = torch.distributed.group.WORLD
    assert world is not None, "a run always has a process group"
    if _control_group is None or _control_group[0] is not world:
        moves_cpu_data = torch.device("cpu") in world._device_types
        group = world if moves_cpu_data else torch.distributed.new_group(backend="gloo")
        _control_group = (world, group)
        return group
    return _control_group[1]


def gather(value: T, group: torch.distributed.ProcessGroup | None = None) -> list[T]:
    """Every rank's ``value`` in rank order, on every rank."""
    group = group or control_group()
    values: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def broadcast(value: T, group: torch.distributed.ProcessGroup | None = None) -> T:
    """Rank 0's ``value``, on every rank."""
    box: list[Any] = [value]
    torch.distributed.broadcast_object_list(box, src=0, group=group or control_group())
    received: T = box[0]
    return received


def any_rank(flag: bool, group: torch.distributed.ProcessGroup | None = None) -> bool:
    """Whether ``flag`` is set on any rank, on every rank."""
    box = torch.tensor(int(flag))
    torch.distributed.all_reduce(box, torch.distributed.ReduceOp.MAX, group=group or control_group())
    return bool(box)


def together(action: Callable[[], T], what: str, group: torch.distributed.ProcessGroup | None = None) -> T:
    """Run ``action`` on every rank; return this rank's result once it is known that no rank failed.

    ``action`` must be local: a collective inside it would leave the peers of a failing rank waiting. ``what`` names
    it in messages ("reading the tokenizer").

    Raises:
        AgreedError: on every rank, if ``action`` failed on any (AgreedConfigError for a ``ConfigError``).
    """
    outcome = _run(action, what)
    for error in gather(outcome.error, group):
        if error is not None:
            raise error
    return cast(T, outcome.value)


def on_first(action: Callable[[], T], what: str, group: torch.distributed.ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0 only and return its result, which must pickle, on every rank; raises as ``together``."""
    outcome = broadcast(_run(action, what) if torch.distributed.get_rank() == 0 else _Outcome(), group)
    if outcome.error is not None:
        raise outcome.error
    return cast(T, outcome.value)


def agreed_error(error: BaseException, what: str, rank: int) -> AgreedError:
    """``error`` of ``rank`` in the form that every rank raises."""
    if isinstance(error, AgreedError):
        return error
    user = isinstance(error, USER_ERRORS)
    kind = type(error).__name__
    trace = "".join(traceback.format_exception(error))
    message = _user_message(error, what) if user else f"{what} failed on rank {rank}: {kind}: {error}"
    form = AgreedConfigError if isinstance(error, ConfigError) else AgreedError
    return form(message, rank, kind, user, getattr(error, "errno", None), trace)


def is_secondary(error: BaseException) -> bool:
    """Whether ``error`` looks like the consequence of another rank's end: a lost connection or a timeout."""
    if isinstance(error, AgreedError | ConfigError):
        return False
    words = str(error).lower()
    is_transport = isinstance(error, torch.distributed.DistError | ConnectionError | RuntimeError)
    return is_transport and any(word in words for word in SECONDARY_WORDS)


def report_failure(error: BaseException, grace_seconds: float = GRACE_SECONDS, status: int = FAILED) -> bool:
    """Write ``error`` to the store unless another rank was first; return whether this rank is the one to print it.

    The first one's ``status`` is what all ranks leave with (``failure_status``).

    Call it first in the entry point's ``except`` block, before any process group is destroyed: closing the
    connections is what makes the peers fail. A peer's secondary error ("connection closed") waits ``grace_seconds``
    for the first cause, and is printed only if the failing rank died without a word. Where the store has gone, rank 0
    that served it has ended and reported: a secondary error is then not printed. Without a process group: True.
    """
    if not torch.distributed.is_initialized():
        return True
    secondary = is_secondary(error)
    try:
        store = _store()
        deadline = time.monotonic() + (grace_seconds if secondary else 0.0)
        while time.monotonic() < deadline and not store.check([CLAIM_KEY]):
            time.sleep(0.05)
        if store.add(CLAIM_KEY, 1) != 1:
            return False
        rank = torch.distributed.get_rank()
        store.set(CAUSE_KEY, f"rank {rank}: {type(error).__name__}: {error}")
        store.set(STATUS_KEY, str(status))
        return True
    except (RuntimeError, OSError):
        # DistError is a RuntimeError: the store cannot be reached
        return not secondary


def failure_status(default: int = FAILED) -> int:
    """The exit status that the first rank to fail has chosen; ``default`` where nobody has, or it cannot be known."""
    if not torch.distributed.is_initialized():
        return default
    try:
        return _read_status(_store()) or default
    except (RuntimeError, OSError):
        # the rank that served the store has left; the watch has looked into it before
        return _seen_status or default


class FailureWatch:
    """Ends this process when another rank has failed and this one is stuck where no exception can reach it.

    A rank inside an NCCL collective does not notice that its peer is gone until the collective's timeout. The watch
    looks into the store every ``interval_seconds``; ``patience_seconds`` after another rank's failure, which is ample
    for gloo's own errors to arrive, it leaves with that rank's status. ``stop()`` ends the watch.
    """

    def __init__(self, interval_seconds: float = 1.0, patience_seconds: float = 5.0) -> None:
        self._interval_seconds = interval_seconds
        self._patience_seconds = patience_seconds
        self._done = threading.Event()
        # a connection of its own: a store's connection is locked while the main thread waits on it
        self._failures = _store(clone=True)
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch; call it before the process group is destroyed."""
        self._done.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        global _seen_status
        while not self._done.wait(self._interval_seconds):
            try:
                failed = self._failures.check([CLAIM_KEY])
                if failed:
                    _seen_status = _read_status(self._failures)
            except (RuntimeError, OSError):
                # the store ends with rank 0 or with the launcher: nothing is left to run for
                failed = True
            status = _seen_status or FAILED
            patience = self._patience_seconds if status == FAILED else STATUS_PATIENCE_SECONDS
            if failed and not self._done.wait(patience):
                os._exit(status)


def _user_message(error: BaseException, what: str) -> str:
    # an error of the operating system names the file but not what it was wanted for
    if isinstance(error, OSError) and error.strerror:
        return f"{what}: {error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error)


def _run(action: Callable[[], T], what: str) -> _Outcome[T]:
    try:
        return _Outcome(value=action())
    except Exception as error:
        return _Outcome(error=agreed_error(error, what, torch.distributed.get_rank()))


def _read_status(store: Any) -> int | None:
    deadline = time.monotonic() + 1.0
    # the first one to fail writes its status a moment after its claim
    while store.check([CLAIM_KEY]) and time.monotonic() < deadline:
        if store.check([STATUS_KEY]):
            return int(store.get(STATUS_KEY))
        time.sleep(0.01)
    return None


def _store(clone: bool = False) -> Any:
    # there is no public way to the store that every process group was made with
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    return store.clone() if clone else store
