"""What kernel and nodes say to each other: pickled, and cut into pieces that a cluster may carry."""

from __future__ import annotations

import pickle
import platform
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

import nbparallel
from nbparallel.errors import rank_list
from nbparallel.session.results import CellRecord
from nbparallel.session.tasks.cell import CellOptions
from nbparallel.transfer.pickling import dump_error
from nbparallel.wire.control import FailureKind
from nbparallel.wire.messages import Cause, Outcome, RankFailure, RankTimeline, Task

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
    options: CellOptions
    """Its time-out, and what a failure does to other ranks."""
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


class FailureNotice(NamedTuple):
    """What went wrong first on a host, for ranks of others that wait in an operation over hosts."""

    kind: FailureKind
    """How their errors are to be classed."""
    rank: int
    """Of that host."""
    text: str
    """It names the rank and its host."""

    @classmethod
    def of(cls, outcome: Outcome) -> FailureNotice:
        """Return the notice about a rank that reports an error."""
        failure, rank = outcome.failure, outcome.rank
        name, text = ("", "") if failure is None else (failure.ename, failure.evalue)
        if name in SAME_ERRORS:
            return cls(SAME_ERRORS[name], rank, text)
        return cls(FailureKind.PEER, rank, f"{rank_list([rank])} failed: {name}: {text}")


def failed_outcome(number: int, failure: RankFailure) -> Outcome:
    """Return the outcome of a rank that cannot report one."""
    return Outcome(number, failure.rank, False, False, None, "", "", failure, False, 0, 0, (), applied=False)


def lost_outcomes(number: int, ranks: Iterable[int], error: Exception) -> tuple[Outcome, ...]:
    """Return the outcomes of ranks that are lost with their host, or have not begun."""
    now, text, dumped = time.monotonic_ns(), str(error), dump_error(error)
    failures = (RankFailure(r, now, type(error).__name__, text, dumped, cause=Cause.DIED) for r in ranks)
    return tuple(failed_outcome(number, failure) for failure in failures)


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


# Clock of a host beside that of the first one: its node asks for the time there while a cell runs.
#
# A question and its answer have four times: when it was asked, came and was answered, and when the answer
# came.  If both took equally long on their way, the offset is the mean of what each shows.  It is off by half
# of the round trip at most (Cristian, doi:10.1007/BF01784024; RFC 5905, section 8), so the shortest of some
# round trips counts.  Between those of the cell's beginning and of its end the offset changes evenly.

ROUNDS = 4
"""Of which the shortest counts: at the beginning of a cell one behind the other, and the last of it."""
EVERY_NS = 250_000_000
"""Between two later ones: the end of a cell is not known before, and waits for none."""
STAMP, TIMES = struct.Struct("<Q"), struct.Struct("<QQQ")
"""A question, and an answer: when it was asked, came and was answered."""


class ClockSample(NamedTuple):
    """What one round trip shows; the one with the smallest error is the least."""

    error_ns: int
    """Half of the round trip, without what the answer took there."""
    at_ns: int
    """When that was, by this host's clock."""
    offset_ns: int
    """What is to be added to times of this host."""

    @classmethod
    def of(cls, asked: int, came: int, answered: int, now: int) -> ClockSample:
        """Return what four times show.

        >>> ClockSample.of(1000, 5300, 5400, 1500)  # 200 there, 200 back
        ClockSample(error_ns=200, at_ns=1250, offset_ns=4100)
        """
        error = -((asked + answered - came - now) // 2)
        return cls(error, (asked + now) // 2, (came + answered - asked - now) // 2)


class HostClock:
    """The offset of one host's clock, in one cell; the first host's has none."""

    def __init__(self, *, is_first: bool) -> None:
        self._begin = [ClockSample(0, 0, 0)] if is_first else []
        self._end = deque[ClockSample](maxlen=ROUNDS)
        self._due = 0

    @property
    def known(self) -> bool:
        """Whether there is an answer."""
        return bool(self._begin)

    def ask(self) -> bytes:
        """Return a question, if it is time for one, or nothing."""
        now = time.monotonic_ns()
        if now < self._due:
            return b""
        self._due = now + EVERY_NS
        return STAMP.pack(now)

    def take(self, answer: bytes | memoryview) -> None:
        """Take an answer."""
        now = time.monotonic_ns()
        asked, came, answered = TIMES.unpack(answer)
        sample = ClockSample.of(asked, came, answered, now)
        if len(self._begin) < ROUNDS:
            self._begin.append(sample)
            self._due = 0
        else:
            self._end.append(sample)

    def _samples(self) -> tuple[ClockSample, ClockSample]:
        first = min(self._begin)
        return first, min(self._end, default=first)

    @property
    def error_ns(self) -> int:
        """How far `on_first` may be off."""
        return max(sample.error_ns for sample in self._samples())

    def on_first(self, ns: int) -> int:
        """Return a time of this host on the first host's clock."""
        (_, begin, offset), (_, end, last) = self._samples()
        share = (min(max(ns, begin), end) - begin) / max(1, end - begin)
        return ns + offset + round(share * (last - offset))


def on_other_clock(record: CellRecord, at: Callable[[int], int]) -> CellRecord:
    """Return a host's record with all times as ``at(ns)``."""
    ranks = {rank: _moved(notes, at) for rank, notes in record.ranks.items()}
    return replace(record, ranks=ranks, began_ns=at(record.began_ns))


def _moved(notes: RankTimeline, at: Callable[[int], int]) -> RankTimeline:
    return replace(
        notes,
        began_ns=at(notes.began_ns),
        ended_ns=at(notes.ended_ns),
        noted_from_ns=at(notes.noted_from_ns),
        noted=tuple((*each[:2], at(each[2]), at(each[3]), *each[4:]) for each in notes.noted),
        statements=tuple((line, at(ns)) for line, ns in notes.statements),
    )
