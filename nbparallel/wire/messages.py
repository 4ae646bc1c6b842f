"""Messages between the kernel, which unpickles only those of its own ranks, and a rank; each in a frame."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

from nbparallel.wire.identity import WorldPlace
from nbparallel.wire.inspection import DrawnNames, MessageReport

# Timeline of a cell on one rank: start and end of its statements and operations; standard library only.
#
# All times are those of ``time.monotonic_ns``, which is one clock for all processes of a machine
# (``CLOCK_MONOTONIC``, clock_gettime(2)), so that those of different ranks can be compared.  A record travels
# as tuples: a thousand frozen objects would take longer to pickle than the operations took.

Noted = tuple[str, int, int, int, int, int, int, int, int, tuple[int, ...], bool]
"""The fields of an `OperationSpan`, in their order."""


class OperationSpan(NamedTuple):
    """One operation between ranks, as one of them saw it."""

    name: str
    """As users call it."""
    line: int
    """Line of the cell as the gutter counts it; 0 unknown."""
    begin_ns: int
    """When it was called."""
    end_ns: int
    """When it returned or raised."""
    wait_ns: int
    """Of that, time in which this rank slept or gave its processor away until others came."""
    nbytes: int
    """Bytes that it moved or reduced."""
    peer: int
    """The root, the receiver or the source that was asked for; -1: none, or any."""
    awaited: int
    """The rank that was waited for last; -1: none, or not noticed."""
    number: int
    """Which collective of its group it was, in the epoch; 0: none, or not known."""
    group: tuple[int, ...]
    """The members of its group; empty: the world."""
    failed: bool
    """Whether it raised."""


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """What one rank noted of one cell."""

    rank: int
    """Its number."""
    pid: int
    """Its process."""
    began_ns: int
    """When the cell reached it."""
    ended_ns: int
    """When it had ended it."""
    noted_from_ns: int
    """Operations that ended earlier are only counted."""
    operations: int
    """How many operations the rank called, the omitted ones as well."""
    omitted: int
    """Operations that were only counted: too many, or too short and too many."""
    wait_ns: int
    """Time that it waited for other ranks, in all operations."""
    moving_ns: int
    """Time in operations, waits excluded; of those that were only counted by estimate."""
    noted: tuple[Noted, ...]
    """The operations that were noted one by one, in order."""
    statements: tuple[tuple[int, int], ...]
    """Line and time of each statement of the cell that began, in order."""
    private_nbytes: int = 0
    """Bytes of large arrays of its own, in no shared memory, that it passed to reductions."""

    def spans(self) -> tuple[OperationSpan, ...]:
        """Return the operations that were noted one by one, in order."""
        return tuple(map(OperationSpan._make, self.noted))


CELL_FILE = "<ipython-input-"
"""How the file name of a cell's code begins on a rank, ``<ipython-input-2-7>``: IPython's oldest form, which
numba's cache and other libraries know."""

MOST_FRAME_NBYTES = 256 << 20
"""What the frames of a rank's last failure may keep alive; arbitrary."""


class Message:
    """Pickles as a call of its class: what a dataclass with slots does by itself takes five times as long.

    Every cell has one for each rank, and one back.  A message has at least two fields.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        kind = type(self)
        if (read := _readers.get(kind)) is None:
            read = _readers[kind] = attrgetter(*(field.name for field in fields(kind)))  # type: ignore[arg-type]
        return kind, read(self)


_readers: dict[type[Message], Callable[[Any], tuple[Any, ...]]] = {}  # by kind of message: all its fields


@dataclass(frozen=True, slots=True)
class WorkingContext(Message):
    """Where the notebook looks for files and modules, and settings of its libraries."""

    cwd: str
    """Its working directory; empty: that was removed."""
    sys_path: tuple[str, ...]
    """Its ``sys.path``."""
    settings: tuple[tuple[str, bytes], ...] = ()
    """Names of modules, and what is set there, pickled: `engine.environment` follows them."""


@dataclass(frozen=True, slots=True)
class Configure(Message):
    """A rank's configuration: the first message that it receives."""

    session: str
    """The session's id, also in the environment as ``NBP_SESSION``."""
    rank: int
    """Number of the rank, ``0 … world_size - 1``."""
    place: WorldPlace
    """Which ranks are on its machine."""
    client: int
    """The rank's number in the ledger of segments; never used twice in a session."""
    context: WorkingContext
    """Where the notebook is when the rank starts."""
    environment: tuple[tuple[str, str], ...]
    """The notebook's environment variables."""
    usable_cpus: int
    """CPUs that this session may use (affinity and cgroup)."""
    seed: int
    """Entropy of the session; every rank derives its own random streams from it."""
    colors: str
    """IPython's colour scheme of the notebook."""
    magics: bool
    """Whether advice may name magics: a script has none."""
    notebook: int
    """The notebook's own process id."""


@dataclass(frozen=True, slots=True)
class JoinWorld(Message):
    """A new epoch: its control segment is the frame's descriptor."""

    epoch: int
    """Number of the epoch, counted from 1."""
    place: WorldPlace
    """The ranks in it; that of `Configure` may be older."""
    free_port: int = 0
    """What MASTER_PORT says, to programs that listen there themselves."""


@dataclass(frozen=True, slots=True)
class Task(Message):
    """What a rank is to run: a cell, a function, or take or give variables."""

    number: int
    """Counts the tasks of a session; displays and late output carry it."""
    ranks: tuple[int, ...]
    """The ranks that run it."""
    updates: tuple[Any, ...]
    """`NameUpdate` records to apply first."""
    want_values: bool
    """Whether the value is to be sent back."""
    seed: int | None
    """Reseed the rank's random streams from this first."""


@dataclass(frozen=True, slots=True)
class CellTask(Task):
    """A cell's source."""

    source: str
    """The cell without its ``%%parallel`` line."""
    line_offset: int
    """How many lines of the cell stand above `source`."""
    execution_count: int
    """The notebook's ``In[n]``."""
    show_values: bool
    """Whether the last expression's value is shown."""
    go_on: bool
    """Whether a rank's failure only concerns the ranks that wait for it."""
    uses: Any
    """`UsageHints`, or None."""
    draw: tuple[str, ...] = ()
    """Names of which the beginning is reported, before and after the cell."""
    observers: tuple[str, ...] = ()
    """Modules that observe it (`nbparallel.distributed.runtime.observers`)."""
    follows_names: bool = True
    """Whether names are looked up at the caller too."""


@dataclass(frozen=True, slots=True)
class CallTask(Task):
    """A function with its arguments, pickled together."""

    call: bytes
    """`transfer.pickling` bytes of ``(function, args)``."""
    items: int = -1
    """How many items, if they are of ``(function, items)``; then a pipe of `TICKET` records comes along."""
    return_errors: bool = False
    """Whether what the function raises for an item is its result."""
    item_seconds: float | None = None
    """How long one item may take."""
    send_seconds: float = 0.0
    """After so long, and at its end, a rank sends the results that it has."""
    observers: tuple[str, ...] = ()
    """Modules that observe it, as a cell's."""


@dataclass(frozen=True, slots=True)
class ScriptTask(Task):
    """A whole script, to be run as ``__main__``."""

    source: str
    """Its text."""
    path: str
    """Where it lies: ``__file__``, and the file name in tracebacks."""
    package: str | None
    """``__package__``, if it is a module (``-m``)."""
    arguments: tuple[str, ...]
    """``sys.argv[1:]``."""


def runs_user_code(task: Task | None) -> bool:
    """Whether a task has a timeline: what the session does by itself has none."""
    return isinstance(task, CellTask | CallTask | ScriptTask)


@dataclass(frozen=True, slots=True)
class PullTask(Task):
    """Give the value of a variable."""

    name: str
    """Name of the variable."""


@dataclass(frozen=True, slots=True)
class PushTask(Task):
    """Assign variables."""

    values: bytes
    """`transfer.pickling` bytes of a dict."""


@dataclass(frozen=True, slots=True)
class NamesTask(Task):
    """Give the names of the variables that would be lost with the rank."""


@dataclass(frozen=True, slots=True)
class DrawTask(Task):
    """Give the beginning of what variables hold."""

    draw: tuple[str, ...]
    """Their names."""


@dataclass(frozen=True, slots=True)
class DebugTask(Task):
    """Have the user examine the frames of a failure."""

    failed_ns: int
    """Its `RankFailure.time_ns`."""


@dataclass(frozen=True, slots=True)
class RankSegment(Message):
    """A segment that a rank made and has in use."""

    segment: int
    """Id."""
    nbytes: int
    """Size of the memory in bytes."""
    strategy: str
    """Name of the sharing strategy that made it."""
    phase: str
    """``live`` or ``released``: only others use it."""
    writable: bool
    """Whether others may write to it."""


@dataclass(frozen=True, slots=True)
class RankMemory(Message):
    """What memory a rank had made, or held, when it ended its last task."""

    segments: tuple[RankSegment, ...] = ()
    """In use; of many the largest."""
    count: int = 0
    """How many there are."""
    nbytes: int = 0
    """Their bytes."""
    pooled_nbytes: int = 0
    """Bytes that it keeps for reuse."""
    frames_nbytes: int = 0
    """What the frames of its last failure keep alive, shared or not."""


@dataclass(frozen=True, slots=True)
class MessageSettlement(Message):
    """What becomes of the messages that a cell has left."""

    cell: str
    """The cell's name."""
    dropped: tuple[tuple[int, int], ...]
    """Sources whose messages are dropped, and where in their rings those of the cell end."""
    kept: tuple[tuple[int, int], ...]
    """Sources whose messages stay, likewise."""
    released: tuple[int, ...]
    """Ranks that drop everything that this one has sent them."""
    remark: str
    """What was dropped, for the error about a deadlock in the next cell."""


@dataclass(frozen=True, slots=True)
class Outcome(Message):
    """How a task ended on a rank."""

    number: int
    """The task's number."""
    rank: int
    """The rank that reports."""
    ok: bool
    """Whether it ran to its end."""
    has_value: bool
    """Whether there was a value: the last expression's, or what the function returned."""
    value: bytes | None
    """`transfer.pickling` bytes."""
    value_error: str
    """Why the value could not travel; empty if it could."""
    text: str
    """The value as text."""
    failure: Any
    """`RankFailure`, or None."""
    interrupted: bool
    """Whether an interrupt ended it."""
    wall_ns: int
    """Time from start to end in nanoseconds."""
    wait_ns: int
    """Of it, time spent waiting in operations."""
    notes: tuple[str, ...]
    """Lines of ours for the cell."""
    applied: bool = True
    """Whether the rank has taken the notebook's names, or there were none to take."""
    memory: RankMemory = RankMemory()
    """Shared memory that this rank made."""
    invalidates_epoch: bool = False
    """Whether an operation failed here, even if the cell caught its error: no other one can begin."""
    timeline: RankTimeline | None = None
    """When statements and operations of a cell, a call or a script began and ended."""
    messages: MessageReport | None = None
    """None if all were received in their cell, as far as this rank knows."""
    drawn: DrawnNames | None = None
    """Of the names in `draw`; None if there are none."""
    cpu_ns: int = 0
    """Processor time of the rank's process, in nanoseconds."""
    observed: Mapping[str, Any] = field(default_factory=dict)
    """The log of each of a cell's observers."""


@dataclass(frozen=True, slots=True)
class Display(Message):
    """A rich output of a rank."""

    number: int
    """The task that caused it."""
    kind: str
    """``display``, ``update``, ``result`` or ``clear``."""
    data: dict[str, Any]
    """Mime bundle; for ``clear`` empty."""
    metadata: dict[str, Any]
    """Its metadata; for ``clear`` holds ``wait``."""
    transient: dict[str, Any]
    """``display_id`` and the like."""


@dataclass(frozen=True, slots=True)
class InputRequest(Message):
    """A rank's ``input()``: it waits for the `InputReply`."""

    task: int
    """The task that asks."""
    serial: int
    """Counts the rank's questions, so that a late answer to an interrupted one is known as such."""
    prompt: str
    """What it wants to know."""
    secret: bool
    """Whether the answer is not to be shown, as for ``getpass``."""


@dataclass(frozen=True, slots=True)
class InputReply(Message):
    """The user's answer, or why there is none."""

    serial: int
    """Of the question."""
    text: str
    """What was typed."""
    refusal: str
    """Why no rank was queried; empty if one was."""


@dataclass(frozen=True, slots=True)
class Stream(Message):
    """Text that a thread of an earlier task printed while no cell ran."""

    number: int
    """The task that started the thread."""
    name: str
    """``stdout`` or ``stderr``."""
    text: str
    """What was printed."""


@dataclass(frozen=True, slots=True)
class ObservedPart(Message):
    """A part of an observer's log of a cell, sent before it became large; of a map, results so far."""

    number: int
    """The task's number."""
    observer: str
    """Its module; empty: it is a map."""
    log: Any
    """The part."""


class Cause(enum.StrEnum):
    """Why a rank failed; one that no other rank caused can be the root cause of a cell's failure."""

    ERROR = "error"
    """User code raised, or one of our operations found a mistake."""
    DIED = "died"
    """The process ended."""
    EXIT = "exit"
    """``sys.exit`` was called."""
    PEER = "peer"
    """The rank waited for another one that failed: a consequence, never the root."""
    INTERRUPT = "interrupt"
    """The rank was interrupted: a consequence, never the root."""


@dataclass(frozen=True, slots=True)
class FrameLine:
    """One frame of user code, outermost first in a failure."""

    filename: str
    """``In[7]`` for a cell of the notebook, else the path of a file."""
    line: int
    """From 1, as the cell's gutter counts."""
    function: str
    """``<module>`` for the cell itself."""
    source: str
    """The line's text without its indentation, or an empty string."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """One rank's exception; two are equal when a person would call them the same, whatever the rank."""

    rank: int = field(compare=False)
    """The rank that failed."""
    time_ns: int = field(compare=False)
    """``time.monotonic_ns()`` when it was raised: one clock for all ranks of a machine."""
    ename: str
    """Name of the exception's class."""
    evalue: str
    """Its text."""
    exception: bytes | None = field(default=None, compare=False, repr=False)
    """The pickled exception; None if it cannot travel."""
    traceback: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """IPython's structured traceback, one string a part, the message last; may hold colour codes."""
    frames: tuple[FrameLine, ...] = ()
    """Frames of user code only, outermost first."""
    cause: Cause = Cause.ERROR
    """Why."""
    item: str = field(default="", compare=False)
    """The item that a function was mapped over when it failed, in words: ``item 7 ('abc')``."""

    @property
    def line(self) -> int | None:
        """The line of the cell that ran: that of the outermost frame."""
        return self.frames[0].line if self.frames else None
