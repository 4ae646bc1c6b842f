"""What kernel and nodes say to each other: pickled, and cut into pieces that a cluster may carry."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nbparallel.cluster.contract import MOST_EVENT
from nbparallel.wire.identity import WorldPlace
from nbparallel.wire.messages import Cause, Outcome, RankFailure, Task

_MORE, _LAST = b"\1", b"\0"
"""First byte of an event: whether the message goes on in the next one."""
INLINE = MOST_EVENT - 2048
"""Bytes of a report that travel with the event about a task's end; more is taken in pieces."""


@dataclass(frozen=True, slots=True)
class HostStart:
    """Start the ranks of a host."""

    place: WorldPlace
    """Where they are in the session."""
    start_method: str
    """As for `Session`."""


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
class OutputItem:
    """Something that a rank printed or showed."""

    rank: int
    kind: str
    """``stdout`` or ``stderr``; ``display``, ``update``, ``result`` or ``clear``; ``note`` of no rank."""
    text: str = ""
    """What it printed."""
    display: Any = None
    """A `Display`."""


def failed_outcome(number: int, failure: RankFailure) -> Outcome:
    """Return the outcome of a rank that cannot report one."""
    return Outcome(number, failure.rank, False, False, None, "", "", failure, False, 0, 0, (), applied=False)


def failure_of(rank: int, error: Exception, time_ns: int) -> RankFailure:
    """Return the failure of a rank that is gone."""
    return RankFailure(rank, time_ns, type(error).__name__, str(error), pickle.dumps(error), cause=Cause.DIED)


def send_message(emit: Callable[[bytes], None], *message: Any) -> None:
    """Emit a message in as many events as it needs."""
    data = pickle.dumps(message, 5)
    room = MOST_EVENT - 1
    for start in range(0, len(data), room):
        emit((_LAST if start + room >= len(data) else _MORE) + data[start : start + room])


class EventJoiner:
    """Makes messages of one host's events."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, event: bytes) -> tuple[Any, ...] | None:
        """Take an event; return the message that it completes, or None."""
        self._parts.append(event[1:])
        if event[:1] == _MORE:
            return None
        data, self._parts = b"".join(self._parts), []
        message: tuple[Any, ...] = pickle.loads(data)
        return message
