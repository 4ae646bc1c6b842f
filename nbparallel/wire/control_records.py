"""What the words of a control segment say: enumerations and frozen records; standard library only."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Cause(enum.IntEnum):
    """Why the kernel ended a cell for everybody."""

    INTERRUPT = 1
    TIMEOUT = 2
    STOP = 3
    ERROR = 4


class State(enum.IntEnum):
    """What a rank is doing."""

    IDLE = 0
    COMPUTING = 1
    WAITING = 2
    LEAVING = 3
    """Its operation failed, and it may not raise before `peer` has stopped writing into its memory."""
    FINISHED = 4
    FAILED = 5


class Operation(enum.IntEnum):
    """Operations between ranks; the names are what users type."""

    none = 0
    send = 1
    recv = 2
    broadcast = 3
    all_reduce = 4
    barrier = 5
    reduce = 6
    gather = 7
    all_gather = 8
    scatter = 9
    reduce_scatter = 10
    all_to_all = 11
    new_group = 12
    """The first operation of a group, in which its members learn where they meet."""
    assert_same = 13
    average_gradients = 14
    batches = 15


class FailureKind(enum.IntEnum):
    """How a rank failed; peers rebuild the same kind of error from it."""

    EXCEPTION = 1
    """An exception of the user's code left the cell."""
    INTERRUPTED = 2
    PEER = 3
    """It only followed another rank's failure, which `FailureRecord.origin` names."""
    MISMATCH = 4
    DEADLOCK = 5
    OPERATION = 6
    """An operation failed half-way, for a reason of this rank alone."""


STATES = {int(state): state for state in State}
OPERATIONS = {int(operation): operation for operation in Operation}
CAUSES = {int(cause): cause for cause in Cause}
KINDS = {int(kind): kind for kind in FailureKind}


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What one rank says of itself; `readable` is False if its slot changed under every try."""

    rank: int
    readable: bool
    version: int
    """Grows by 2 with every change: equal versions mean that nothing happened in between."""
    cell: int
    state: State
    operation: Operation
    sequence: int
    """The collective's number in its epoch, or the message's number for `send`."""
    peer: int
    """The rank waited for; -1: any, or all who are missing."""
    tag: int
    line: int
    """Line of the cell as the gutter counts it; 0 unknown."""
    since_ns: int
    """`time.monotonic_ns` when this state began."""
    deadline: bool
    """The wait ends by itself, so it is no edge of the deadlock graph."""
    target: int
    """What must be reached for the wait to end: the arrival count of a collective."""
    area: bytes = b""
    """Handle of the memory in which the group of a collective meets; empty: the world."""


@dataclass(frozen=True, slots=True)
class TimingRecord:
    """Where one rank's time went in this epoch."""

    rank: int
    compute_ns: int
    wait_ns: int
    nbytes: int
    """Bytes that its operations moved or reduced."""
    operations: int


@dataclass(frozen=True, slots=True)
class DeathRecord:
    """S saw the process end."""

    rank: int
    exit_code: int | None
    signal: int | None
    ns: int

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by signal {self.signal}"
        return "ended" if self.exit_code is None else f"exit code {self.exit_code}"


@dataclass(frozen=True, slots=True)
class AbortRecord:
    """K ended a cell for everybody."""

    cell: int
    cause: Cause
    ns: int


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """A rank failed; its epoch is void."""

    rank: int
    kind: FailureKind
    cell: int
    origin: int
    ns: int
    message: str
