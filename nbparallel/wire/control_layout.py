"""Where everything lies in a control segment, by the number of ranks alone (the picture is in `control`)."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

WORD = 8
LINE = 16
"""Words in 128 bytes."""
SLOT_AREA = (2 * LINE - 12) * WORD
"""Bytes of a state slot that say where a group meets."""
GENERATIONS = 4
"""Collective slots of a rank: how many operations a slow reader may be behind before it is waited for."""
SLOT_HEADER = 512
"""Bytes of a collective slot before its payload: one line of words, then the description as text."""
SLOT_OF_A_MEMBER = 256
"""Bytes of a slot for each member at least: a record with a short value for each of them fits.  One that does
not lies in memory of its own, which all others have to attach: 64 ranks took 16 ms for what takes one."""
SLOT_TEXT = SLOT_HEADER - LINE * WORD
FAILED_LINES = 16
FAILED_TEXT = FAILED_LINES * LINE * WORD - 6 * WORD
"""Bytes of the message that a failed rank leaves."""
MAX_WORLD_SIZE = 1024
"""Rings grow with the square of the ranks: beyond this one segment would be gigabytes."""

RECORD = struct.Struct("<IHBxqIQ")
"""What begins a record in a ring: length of the whole record, of its description; kind; tag (negative: it is
no message); line of the sender's cell; group."""
RECORD_ALIGN = 8
"""Records begin at multiples of this."""

# Lines of one rank, in order.
INTERRUPT, DEATH, LEFT, SLOT, WRITING, BELL, PARKED, TIMING, ARRIVE, DONE, ITEMS, FAILED = (
    0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12,
)  # fmt: skip
PLACE = 6
"""Index in the line of items of words that say where the rank's instruction is (`peer_memory`)."""
LOCKS = FAILED + FAILED_LINES
LOCK_LINES = 2
RANK_LINES = LOCKS + LOCK_LINES
ABANDONED_LINES = 16
READ_IN_PLACE_OFF = 8
"""Index of the header's word with which the notebook has ranks not read each other's private memory."""
KEEP_FRAMES = 9
"""The same, with which it has them keep the frames of a failure."""
HEADER_LINES = 1 + ABANDONED_LINES
"""The header; and locks that were abandoned in an earlier epoch."""
(
    TIMING_CELL, TIMING_WAIT, TIMING_AS_OF, TIMING_MOVING, TIMING_OPERATIONS, TIMING_UNCOUNTED,
    TIMING_INSIDE, TIMING_INSIDE_WAIT, TIMING_AWAITED,
) = range(9)  # fmt: skip
TIMING_WORDS = TIMING_AWAITED + 1
"""Words of a `TimingRecord`, in the order of its fields; begin and operation share one."""
OPERATION_BITS = 0xFF
"""Bits of that word that hold the operation; the others are those of the time."""
OPERATION_ENDED = OPERATION_BITS
"""In their place: the rank is in none, and the time is when the last one ended."""

# A table of locks: how many of its entries are in use, then the entries.
LOCK_NAME, LOCK_TICKET, LOCK_NOTE = 0, 1, 2
LOCK_ENTRY = 3
LOCK_ENTRIES = (LOCK_LINES * LINE - 1) // LOCK_ENTRY
"""How many locks a rank can hold at one time."""
LOCK_HELD, LOCK_REPORTED = 1, 2
"""Low bits of the note: the rank has got the lock, on the line above them; the entry only records that the
abandoned lock with the number above them was reported."""
ABANDONED = LINE
"""Index of the first word of the table of abandoned locks."""
ABANDONED_ENTRIES = (ABANDONED_LINES * LINE - 1) // LOCK_ENTRY
"""How many of them are carried over into the next epoch: the newest."""
DRAWING = 1
"""The ticket of a rank that is drawing one; it comes before all that are drawn."""


class Layout(NamedTuple):
    """Where everything lies, from the number of ranks alone."""

    world_size: int
    ring_capacity: int
    slot_payload: int

    @classmethod
    def of(cls, world_size: int) -> Layout:
        """Return the layout for `world_size` ranks: 64 KiB a ring and a slot, less when there are many."""
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size must be between 1 and {MAX_WORLD_SIZE}, not {world_size}")
        ring = 64 << 10
        while ring > 2048 and ring * world_size**2 > 16 << 20:
            ring >>= 1
        slot = 64 << 10 if world_size <= 8 else max(16 << 10, SLOT_OF_A_MEMBER * world_size)
        return cls(world_size, ring, slot)

    def rank_word(self, rank: int, line: int) -> int:
        """Return the index of the first word of a rank's line."""
        return (HEADER_LINES + rank * RANK_LINES + line) * LINE

    @property
    def _pairs(self) -> int:
        return (HEADER_LINES + self.world_size * RANK_LINES) * LINE

    def tail_word(self, source: int, destination: int) -> int:
        """Return the word in which `source` counts the bytes it put into the pair's ring.

        The next two: how many chunks it has streamed, and from which on they lie elsewhere (`streaming`).
        """
        return self._pairs + (source * self.world_size + destination) * 2 * LINE

    def head_word(self, source: int, destination: int) -> int:
        """Return the word in which `destination` counts the bytes it took.

        The next two: up to which message its user has taken all, and the newest that it has taken.  Then: how
        many chunks it has taken out of the stream, whether it fills buffers (`streaming`), and whether it can
        read the memory of `source` (`peer_memory`).
        """
        return self.tail_word(source, destination) + LINE

    def memory_word(self, rank: int) -> int:
        """Return the first of three words by which others find and try its memory (`peer_memory`)."""
        return self.rank_word(rank, WRITING) + 1

    def slot_byte(self, rank: int, generation: int) -> int:
        """Return the first byte of a collective slot."""
        slots = (self._pairs + self.world_size**2 * 2 * LINE) * WORD
        slots = (slots + 4095) & ~4095
        return slots + (rank * GENERATIONS + generation) * (SLOT_HEADER + self.slot_payload)

    def ring_byte(self, source: int, destination: int) -> int:
        """Return the first byte of the pair's ring."""
        start = (self.slot_byte(self.world_size, 0) + 4095) & ~4095
        return start + (source * self.world_size + destination) * self.ring_capacity

    @property
    def nbytes(self) -> int:
        """Size of the whole segment."""
        return (self.ring_byte(self.world_size, 0) + 4095) & ~4095


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
    scan = 16
    exscan = 17
    maxloc = 18
    minloc = 19
    lock = 20
    monitored_barrier = 21


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
KINDS = {int(kind): kind for kind in FailureKind}


class SlotRecord(NamedTuple):
    """What one rank publishes about itself; `readable` is False if its slot changed under every try."""

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
    """The rank waited for; -1: any, or all that are missing."""
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
    last_line: int = 0
    """Where the statement that begins on `line` ends; 0 unknown."""


class TimingRecord(NamedTuple):
    """Where one rank's time has gone in its last cell, as far as it has published that."""

    rank: int
    cell: int
    """Which cell it is about; 0: none yet."""
    wait_ns: int
    """Time that its operations waited for other ranks."""
    as_of_ns: int
    """When `wait_ns` was written: of a wait that began earlier it contains all until then."""
    moving_ns: int
    """Time in operations that have ended, waits excluded."""
    operations: int
    """How many it has called, but for short ones after `uncounted` was set."""
    uncounted: bool
    """Whether short operations are called that are counted later."""
    begin_ns: int
    """When the operation that it is in began; 0: in none."""
    ended_ns: int
    """When the last one ended; 0: none has, or the rank is in one.  Of short ones not while `uncounted`."""
    operation: Operation
    """That operation."""
    operation_wait_ns: int
    """The part of `wait_ns` in it, if `as_of_ns` lies in it."""
    awaited: tuple[int, ...]
    """Ranks that it waited for in a collective of a group, when it last looked; of the first 64."""

    @classmethod
    def of(cls, rank: int, words: list[int], world_size: int) -> TimingRecord:
        """Return the record that a rank's words hold."""
        cell, wait, as_of, moving, operations, uncounted, inside, inside_wait, awaited = words
        code, moment = inside & OPERATION_BITS, inside & ~OPERATION_BITS
        begin, ended = (0, moment) if code == OPERATION_ENDED else (moment, 0)
        return cls(
            rank, cell, wait, as_of, moving, operations, bool(uncounted), begin, ended,
            OPERATIONS.get(code, Operation.none), inside_wait,
            tuple(other for other in range(min(64, world_size)) if awaited >> other & 1),
        )  # fmt: skip


TICKET = struct.Struct("<IIQ")
"""A record of the pipe of a map: number and length of a chunk that no rank has taken, and its first item.

Several ranks read the pipe, each record reaches one of them (pipe(7)); its end means that none is left.
"""


class ItemRecord(NamedTuple):
    """How far one rank is in a task that maps a function over items."""

    task: int
    """Number of that task; 0: there was none in this epoch."""
    current: int
    """Index of the item that it took last; -1: it has taken none."""
    done: int
    """How many it has done."""
    began_ns: int = 0
    """When the function began with it (`time.monotonic_ns`), if items have a time-out; 0: it does not run.
    Of a bar: when it began."""
    steps: int = 0
    """Of a bar that the rank shows, how long it is, and `done` how far; 0: it is a map."""

    @classmethod
    def read(cls, words: memoryview, layout: Layout, rank: int) -> ItemRecord:
        """Return how far `rank` is; it writes the task after it has cleared the other words."""
        task, current, *rest = words[(w := layout.rank_word(rank, ITEMS)) : w + 5].tolist()
        return cls(task, current - 1, *rest)


class LockRecord(NamedTuple):
    """An entry in the table of locks of one rank: it holds the lock, or waits for it."""

    rank: int
    name: int
    """The lock's name as a word."""
    ticket: int
    """Ranks get the lock in the order of tickets, then of ranks; `DRAWING`: it has none yet."""
    held: bool
    line: int
    """Line of the cell on which it called for the lock; 0 unknown."""
    reported: int
    """The number of an abandoned lock that this entry only records as reported; 0: it is no such entry."""

    @classmethod
    def of(cls, rank: int, name: int, ticket: int, note: int) -> LockRecord:
        """Return the record of an entry's words."""
        reported = 0 if ticket or not note & LOCK_REPORTED else note >> 2
        return cls(rank, name, ticket, bool(ticket and note & LOCK_HELD), note >> 2, reported)


class AbandonedLock(NamedTuple):
    """A lock whose holder died, and which no rank has got since."""

    name: int
    """The lock's name as a word."""
    rank: int
    """The rank that died."""
    line: int
    """Line of its cell on which it had called for the lock."""
    number: int
    """Distinguishes it from others of its name in this epoch."""


def lock_entries(words: memoryview, start: int, most: int = LOCK_ENTRIES) -> list[list[int]]:
    """Return the entries of a table of locks, three words each."""
    stop = start + 1 + min(words[start], most) * LOCK_ENTRY
    return [words[w : w + LOCK_ENTRY].tolist() for w in range(start + 1, stop, LOCK_ENTRY)]


def keep_locks(words: memoryview, locks: Sequence[AbandonedLock]) -> None:
    """Write the locks that were abandoned in the last epoch, before any rank maps this one.

    They are in the order of their deaths; the oldest are left out if there are too many.
    """
    for i, lock in enumerate(locks[-ABANDONED_ENTRIES:]):
        w = ABANDONED + 1 + i * LOCK_ENTRY
        words[w], words[w + 1], words[w + 2] = lock.name, lock.rank, lock.line
        words[ABANDONED] = i + 1


class DeathRecord(NamedTuple):
    """The end of a rank's process, as the supervisor recorded it."""

    rank: int
    code: int | None
    """Its exit code; negative: the number of the signal that ended it; None: not known."""
    ns: int


class FailureRecord(NamedTuple):
    """A rank failed; its epoch is invalid."""

    rank: int
    kind: FailureKind
    cell: int
    origin: int
    ns: int
    message: str
