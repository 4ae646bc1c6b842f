"""Reports of processes: a rank's variables and the messages that it has left, the supervisor's segments.

Of the values of variables only `DrawnNames` has any: the beginnings of those that are to be drawn.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


class Origin(enum.StrEnum):
    """Where a rank has a name from."""

    OWN = "own"
    """It assigned the name itself."""
    COPIED = "copied"
    """The notebook's value, as a copy."""
    SHARED = "shared"
    """The notebook's array, in the same memory."""


@dataclass(frozen=True, slots=True)
class VariableInfo:
    """One variable of one process."""

    name: str
    """As it is called there."""
    kind: str
    """Name of its class, without the module."""
    form: str
    """Shape and dtype of an array, number of elements of a container, else empty."""
    origin: Origin
    """Where it comes from; in the notebook always `Origin.OWN`."""
    writable: bool = True
    """Of an array: whether this process may write to it."""
    segment: int = 0
    """Of an array in shared memory: the segment's id; 0: it is private."""
    start: int = 0
    """First byte in the segment that it touches."""
    stop: int = 0
    """One past the last one."""
    segments: tuple[int, ...] = ()
    """Of a module of torch: those in which its tensors lie."""
    as_delivered: bool | None = None
    """Of a copy: whether its content is as it came from the notebook; None: that is not known."""
    nbytes: int = 0
    """Of an array: its bytes."""

    @property
    def looks(self) -> str:
        """Return what people call it: ``ndarray (3, 4) float64``."""
        return f"{self.kind} {self.form}".rstrip()


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """The answer to ``INSPECT``."""

    number: int
    """The question's."""
    names: tuple[VariableInfo, ...]
    """In alphabetical order; modules are left out."""
    left_out: int = 0
    """How many more there are."""
    problem: str = ""
    """Why there are none."""


Number: TypeAlias = bool | int | float | complex | str
"""An element of an array as plain Python; what is no number is its text."""


@dataclass(frozen=True, slots=True)
class ShownBlock:
    """What stands together in a picture: an array, a number, or an element of a list."""

    rows: tuple[tuple[Number, ...], ...] = ()
    """Its first elements; several rows if it has two or more axes."""
    count: int = 0
    """How many elements it has."""
    form: str = ""
    """Of an array: shape and dtype."""
    word: str = ""
    """What stands for something that is no number and no array."""
    rank: int = -1
    """Of a part of a shared array: whose part it is."""


@dataclass(frozen=True, slots=True)
class ShownValue:
    """The beginning of a variable's value on one rank."""

    blocks: tuple[ShownBlock, ...]
    """One, or one for each element of a list."""
    left_out: int = 0
    """Further elements of a list."""
    numbers: tuple[Number, ...] = field(default=(), repr=False)
    """More of its elements than are shown, to find out which rank has which."""
    complete: bool = True
    """Whether these are all."""
    segment: int = 0
    """Of an array in shared memory: the segment's id; 0: it is private."""
    start: int = 0
    """First byte in the segment that it touches."""
    stop: int = 0
    """One past the last one."""
    parts: tuple[ShownBlock, ...] = ()
    """Of an array in shared memory: the part of each rank, as `dist.shard` divides it."""


@dataclass(frozen=True, slots=True)
class DrawnNames:
    """Variables of one rank before and after a cell; a name that is not defined has None."""

    before: tuple[ShownValue | None, ...]
    """By the names that were asked for; empty if only the values of now were."""
    after: tuple[ShownValue | None, ...]
    """Likewise."""
    before_ns: int
    """When the rank had looked, and ran no code of the cell yet, by `time.monotonic_ns`."""
    after_ns: int
    """When it had run the cell, and began to look."""


def is_users(group: int) -> bool:
    """Whether messages with this word of a group are users', not steps of an operation: it is 0 or odd."""
    return not group or bool(group & 1)


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message that was sent, or several alike."""

    source: int
    """The rank that sent it."""
    destination: int
    """The rank that is to receive it."""
    tag: int
    """As passed to `send`."""
    line: int
    """Of the sender's cell; 0: unknown."""
    in_group: bool
    """Whether it was sent in a group."""
    cell: str = ""
    """The earlier cell that sent it; empty: the one that runs."""


@dataclass(frozen=True, slots=True)
class MessageReport:
    """What one rank knows when it ends a task of messages that were not received in their cell."""

    destinations: tuple[int, ...]
    """Ranks that have not received everything that this one sent."""
    queued: tuple[tuple[SentMessage, int], ...]
    """What this rank has taken out of its rings and not received, and how many of each."""
    late: tuple[tuple[SentMessage, int], ...]
    """What it has received of earlier cells, likewise."""
    label: str = ""
    """What messages call the file of the lines; empty: the cell's."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Code that is being typed: the question of ``COMPLETE``."""

    number: int
    """The question's."""
    text: str
    """The cell as far as it is there."""
    cursor: int
    """Where in it, in characters."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One way to go on."""

    start: int
    """From where on `text` takes the place of what stands before the cursor, in characters."""
    text: str
    """What is to stand there."""
    kind: str
    """``function``, ``instance``, ``module`` …; empty if not known."""


@dataclass(frozen=True, slots=True)
class Completions:
    """The answer to ``COMPLETE``."""

    number: int
    """The question's."""
    found: tuple[Completion, ...]
    """As the rank's own shell orders them."""


class LedgerRow(NamedTuple):
    """One segment that its maker has announced."""

    segment: int
    """Id."""
    nbytes: int
    """Size of the memory in bytes."""
    writable: bool
    """Whether others than its maker may write."""
    holders: tuple[int, ...]
    """Client numbers, ascending; with no messages, empty: its maker may use the memory again."""
    messages: int = 0
    """How many messages in flight hold it."""


class IntroducedRow(NamedTuple):
    """One process that a client has started, and that is a client itself."""

    client: int
    """Its client number."""
    pid: int
    """Its process id."""
    parent: int
    """Client number of the process that started it."""
    daemon: bool
    """Whether it ends with that one."""


def pack_report(segments: Iterable[LedgerRow], introduced: Iterable[IntroducedRow] = ()) -> bytes:
    """Return the payload of the answer to ``LEDGER``."""
    return json.dumps([[*segments], [*introduced]]).encode()


def read_report(payload: bytes) -> tuple[tuple[LedgerRow, ...], tuple[IntroducedRow, ...]]:
    """Return what `pack_report` was given."""
    segments, introduced = json.loads(payload)
    rows = (
        LedgerRow(segment, nbytes, may, tuple(who), count) for segment, nbytes, may, who, count in segments
    )
    return tuple(rows), tuple(IntroducedRow(*row) for row in introduced)
