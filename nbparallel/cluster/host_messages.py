"""What kernel and nodes say to each other: pickled, and cut into pieces that a cluster may carry."""

from __future__ import annotations

import pickle
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import nbparallel
from nbparallel.errors import rank_list
from nbparallel.transfer.pickling import dump_error
from nbparallel.wire.control import FailureKind
from nbparallel.wire.messages import Cause, Outcome, RankFailure, Task

MOST_EVENT = 16 << 10
"""Bytes of an event: the scheduler keeps the last 1000 of a session."""
MORE, _LAST = b"\1", b"\0"
"""First byte of an event: whether the message goes on in the next one."""
SAME_ERRORS = {
    "CollectiveMismatchError": FailureKind.MISMATCH,
    "DeadlockError": FailureKind.DEADLOCK,
    "PeerFailedError": FailureKind.PEER,
}
"""By name: errors that ranks of other hosts raise with the same text."""
INLINE = MOST_EVENT - 2048
"""Bytes of a report that travel with the event about a task's end; more is asked for."""


@dataclass(frozen=True, slots=True)
class NodeReply:
    """What became of a call on one host."""

    data: bytes = b""
    """What the node returned."""
    error: str = ""
    """What it raised instead, as text; empty: nothing."""
    silent: bool = False
    """Whether there was no answer in time; the call may still be performed."""


@dataclass(frozen=True, slots=True)
class HostTask:
    """One task, for the ranks of one host."""

    number: int
    """It is the session's."""
    tasks: Mapping[int, Task]
    """By rank; bytes of the user's are unpickled on ranks only."""
    timeout: float | None
    """Seconds after which ranks are interrupted."""
    on_error: str
    """As for `Session.run`."""
    keep_messages: bool
    """Whether messages that no rank has received stay."""
    epoch: int
    """Grows when ranks of all hosts are to begin a new epoch: something has failed on one."""
    hosts: tuple[str, ...] = ()
    """Of user code on all ranks of several hosts: their names; its ranks call operations over hosts."""


@dataclass(frozen=True, slots=True)
class HostReport:
    """How a task ended on the ranks of a host."""

    outcomes: tuple[Outcome, ...] = ()
    """Of every rank; a value that could travel is one that can leave the machine."""
    interrupted: bool = False
    """Whether the user's interrupt reached the ranks."""
    timed_out: bool = False
    """Whether the time-out passed."""
    freed: frozenset[int] = frozenset()
    """Ranks that were interrupted because another one had failed."""
    notes: tuple[str, ...] = ()
    """Lines for the user, which were shown already."""
    error: str = ""
    """What ended all of it, such as the death of the supervisor."""


@dataclass(frozen=True, slots=True)
class FailureNotice:
    """What went wrong first on a host, for ranks of others that wait in an operation over hosts."""

    kind: FailureKind
    """How their errors are to be classed."""
    rank: int
    """Of that host."""
    text: str
    """It names the rank and its host."""


def notice_of(outcome: Outcome) -> FailureNotice:
    """Return the notice about a rank that reports an error."""
    failure, rank = outcome.failure, outcome.rank
    name, text = ("", "") if failure is None else (failure.ename, failure.evalue)
    if name in SAME_ERRORS:
        return FailureNotice(SAME_ERRORS[name], rank, text)
    return FailureNotice(FailureKind.PEER, rank, f"{rank_list([rank])} failed: {name}: {text}")


def failed_outcome(number: int, failure: RankFailure) -> Outcome:
    """Return the outcome of a rank that cannot report one."""
    return Outcome(number, failure.rank, False, False, None, "", "", failure, False, 0, 0, (), applied=False)


def lost_outcome(number: int, rank: int, error: Exception) -> Outcome:
    """Return the outcome of a rank that is lost with its host, or has not begun."""
    now, name = time.monotonic_ns(), type(error).__name__
    failure = RankFailure(rank, now, name, str(error), dump_error(error), cause=Cause.DIED)
    return failed_outcome(number, failure)


def send_message(emit: Callable[[bytes], None], *message: Any) -> None:
    """Emit a message in as many events as it needs."""
    data = pickle.dumps(message, 5)
    room = MOST_EVENT - 1
    for start in range(0, len(data), room):
        emit((_LAST if start + room >= len(data) else MORE) + data[start : start + room])


def versions() -> dict[str, str]:
    """Return what the kernel and all hosts must have in common."""
    return {
        "system": sys.platform,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "nbparallel": nbparallel.__version__,
        "numpy": np.__version__.partition(".")[0],
    }
