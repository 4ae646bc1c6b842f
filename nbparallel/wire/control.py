"""The control segment: one sealed memfd per epoch, where all processes leave words for each other.

K is the kernel, S the supervisor, R a rank.  Every word has exactly *one* writer; words with different
writers, or read at different moments, lie 128 bytes apart (two cache lines: the adjacent-line prefetcher
and other makes of processor count in pairs).  Standard library only: S runs this with nothing else.

Some facts that the layout relies on:

* an aligned store of 8 bytes through ``memoryview.cast("Q")`` is one ``mov``: a reader sees the old value or
  the new one, never half of each (4 bytes through ``cast("I")`` likewise);
* x86 keeps the order of stores, so that "data first, then the word that announces it" needs nothing; other
  machines need a fence between the two (`nbparallel.distributed.runtime.waiting.Waiter.fence`);
* a memfd has no name, cannot be truncated under its readers once sealed, and is gone with its last user.

One line is `LINE` words.  The segment::

    header, abandoned locks(2)
           | per rank: interrupt death left slot(2) writing bell parked timing arrive done items failed(16)
           |           locks(2)
           | per ordered pair (source, destination): tail (source), head and acknowledged (destination)
           | per rank and generation: a collective slot (header, description, payload)
           | per ordered pair: the bytes of a ring
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import struct
import threading
import time

from nbparallel.errors import ProtocolError
from nbparallel.wire.control_layout import (
    ABANDONED,
    ABANDONED_ENTRIES,
    DEATH,
    FAILED,
    FAILED_TEXT,
    GENERATIONS,
    INTERRUPT,
    KINDS,
    LOCKS,
    MAX_WORLD_SIZE,
    OPERATIONS,
    SLOT,
    SLOT_AREA,
    SLOT_HEADER,
    SLOT_TEXT,
    STATES,
    TIMING,
    TIMING_WORDS,
    WORD,
    AbandonedLock,
    DeathRecord,
    FailureKind,
    FailureRecord,
    Layout,
    LockRecord,
    Operation,
    SlotRecord,
    State,
    TimingRecord,
    lock_entries,
)

__all__ = [
    "GENERATIONS",
    "SLOT_HEADER",
    "SLOT_TEXT",
    "ControlView",
    "DeathRecord",
    "FailureKind",
    "FailureRecord",
    "Layout",
    "Operation",
    "SlotRecord",
    "State",
    "TimingRecord",
    "create",
]

MAGIC = 0x314C5254434E5042
"""Reads ``BPNCTRL1``."""
VERSION = 3
_RETRIES = 8


def order_stores() -> None:
    """Order the words before against those after, where the machine does not: see `distributed.waiting`."""


if platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686"):
    _lock = threading.Lock()

    def order_stores() -> None:
        for _ in range(2):
            _lock.acquire(False)
            try:
                _lock.release()
            except RuntimeError:  # another thread's round ended in between: it was a fence for both
                pass


HEADER = struct.Struct("<QIIQQQ")


def create(world_size: int, epoch: int, *, label: str = "") -> int:
    """Return the descriptor of a fresh, zeroed, sealed control segment; the caller closes it.

    Raises
    ------
    OSError
        There is not enough memory (space is reserved here, so that no rank meets a SIGBUS later).
    """
    layout = Layout.of(world_size)
    name = f"nbp-control{'-' if label else ''}{label}"
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, layout.nbytes)
        os.pwrite(fd, HEADER.pack(MAGIC, VERSION, world_size, epoch, layout.nbytes, time.monotonic_ns()), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


IMPORT_SECONDS = 3.0
"""How long interrupts wait for the end of an import; by so much later the kernel kills a rank."""


class ControlView:
    """A mapping of one control segment: the words, and functions to read and write them.

    Attributes
    ----------
    words : memoryview of uint64
    halves : memoryview of uint32
        The same memory, for futex words.
    octets : memoryview of bytes
    """

    layout: Layout
    map: mmap.mmap
    octets: memoryview[int]
    words: memoryview[int]
    halves: memoryview[int]

    def __init__(self, fd: int) -> None:
        """Map `fd`, which stays the caller's to close."""
        head = os.pread(fd, HEADER.size, 0)
        if len(head) < HEADER.size:
            raise ProtocolError(f"a control segment of {len(head)} bytes is shorter than its header")
        magic, version, world_size, epoch, nbytes, _ = HEADER.unpack(head)
        if magic != MAGIC or version != VERSION:
            raise ProtocolError(f"not a control segment of version {VERSION}: {head[:12]!r}")
        self.layout = Layout.of(world_size)
        if nbytes != self.layout.nbytes or os.fstat(fd).st_size != nbytes:
            raise ProtocolError(
                f"a control segment for {world_size} ranks has {self.layout.nbytes} bytes, not {nbytes}"
            )
        self.world_size: int = world_size
        self.epoch: int = epoch
        self.map = mmap.mmap(fd, nbytes)
        try:
            self.map.madvise(mmap.MADV_DONTDUMP)  # what ranks say to each other belongs into no core file
        except OSError:
            pass  # advice that the system does not take
        self.octets = memoryview(self.map)
        self.words = self.octets.cast("Q")
        self.halves = self.octets.cast("I")

    # -- what K writes ---------------------------------------------------------------------------

    def write_interrupt(self, rank: int, task: int, sequence: int) -> None:
        """Record which task the next SIGINT to `rank` interrupts."""
        w = self.layout.rank_word(rank, INTERRUPT)
        self.words[w] = task
        order_stores()
        self.words[w + 1] = sequence  # last: a reader that sees it new sees the task new

    def read_interrupt(self, rank: int) -> tuple[int, int]:
        """Return (task, sequence); (0, 0) if there never was one."""
        w = self.layout.rank_word(rank, INTERRUPT)
        sequence = self.words[w + 1]
        return self.words[w], sequence

    def write_importing(self, rank: int, task: int) -> None:
        """Record that an interrupt of `task` waits for the end of an import."""
        self.words[self.layout.rank_word(rank, INTERRUPT) + 2] = task

    def write_ended(self, rank: int, task: int) -> None:
        """Record that the code of `task` has ended: what remains is the report."""
        self.words[self.layout.rank_word(rank, INTERRUPT) + 3] = task

    def read_progress(self, rank: int) -> tuple[int, int]:
        """Return the tasks that `write_importing` and `write_ended` recorded last; 0: none."""
        w = self.layout.rank_word(rank, INTERRUPT)
        return self.words[w + 2], self.words[w + 3]

    def abandoned_locks(self) -> list[AbandonedLock]:
        """Return the locks whose holder died, in this epoch or before, and which no rank has got since."""
        kept = enumerate(lock_entries(self.words, ABANDONED, ABANDONED_ENTRIES), MAX_WORLD_SIZE + 1)
        found = [AbandonedLock(name, rank, line, number) for number, (name, rank, line) in kept]
        reported = set()
        for rank in range(self.world_size):
            for entry in self.read_locks(rank):
                if entry.held and self.words[self.word(rank, DEATH)]:
                    found.append(AbandonedLock(entry.name, rank, entry.line, rank + 1))
                reported.add((entry.name, entry.reported))
        return [lock for lock in found if (lock.name, lock.number) not in reported]

    # -- what S writes ---------------------------------------------------------------------------

    def write_death(self, rank: int, code: int | None) -> None:
        """Record that the process of `rank` has ended, and with which code, as `DeathRecord` has it."""
        w = self.layout.rank_word(rank, DEATH)
        self.words[w + 1] = time.monotonic_ns()
        order_stores()
        self.words[w] = 2 << 32 if code is None else 1 << 32 | (code & 0xFFFF_FFFF)

    def read_death(self, rank: int) -> DeathRecord | None:
        """Return how `rank` ended, None while it lives."""
        w = self.layout.rank_word(rank, DEATH)
        status = self.words[w]
        if not status:
            return None
        known, value = status >> 32 == 1, status & 0xFFFF_FFFF
        return DeathRecord(rank, value - (value >> 31 << 32) if known else None, self.words[w + 1])

    # -- what R writes ---------------------------------------------------------------------------

    def write_slot(
        self,
        rank: int,
        cell: int,
        state: State,
        operation: Operation = Operation.none,
        *,
        sequence: int = 0,
        peer: int = -1,
        tag: int = 0,
        line: int = 0,
        last_line: int = 0,
        deadline: bool = False,
        target: int = 0,
        area: bytes = b"",
    ) -> None:
        """Publish what `rank` is doing: an odd version while it changes (a seqlock)."""
        w, words = self.layout.rank_word(rank, SLOT), self.words
        version = words[w] | 1  # odd already if an interrupt cut the last change short
        words[w] = version
        order_stores()
        words[w + 1], words[w + 2], words[w + 3], words[w + 4] = cell, int(state), int(operation), sequence
        words[w + 5], words[w + 6], words[w + 7] = (
            peer + 1,
            tag & 0xFFFF_FFFF_FFFF_FFFF,
            last_line << 32 | line,
        )
        words[w + 8], words[w + 9], words[w + 10] = time.monotonic_ns(), int(deadline), target
        words[w + 11] = length = len(area) if len(area) <= SLOT_AREA else 0
        if length:
            start = (w + 12) * WORD
            self.octets[start : start + length] = area
        order_stores()
        words[w] = version + 1

    def read_slot(self, rank: int) -> SlotRecord:
        """Return what `rank` says; after a few tries without success it counts as computing."""
        w, words = self.layout.rank_word(rank, SLOT), self.words
        for _ in range(_RETRIES):
            version = words[w]
            order_stores()
            values = words[w + 1 : w + 11].tolist()
            start = (w + 12) * WORD
            area = bytes(self.octets[start : start + min(words[w + 11], SLOT_AREA)])
            order_stores()
            if version & 1 or words[w] != version:
                continue
            cell, state, operation, sequence, peer, tag, lines, since, deadline, target = values
            return SlotRecord(
                rank, True, version, cell, STATES.get(state, State.COMPUTING),
                OPERATIONS.get(operation, Operation.none), sequence, peer - 1, tag,
                lines & 0xFFFF_FFFF, since, bool(deadline), target, area, lines >> 32,
            )  # fmt: skip
        return SlotRecord(rank, False, 0, 0, State.COMPUTING, Operation.none, 0, -1, 0, 0, 0, False, 0)

    def write_failure(self, rank: int, kind: FailureKind, cell: int, origin: int, message: str) -> None:
        """Record that `rank` failed.  The first failure of an epoch stays: later calls do nothing."""
        w, words = self.layout.rank_word(rank, FAILED), self.words
        if words[w]:
            return
        text = message.encode("utf-8", "backslashreplace")[:FAILED_TEXT]
        start = (w + 6) * WORD
        self.octets[start : start + len(text)] = text
        words[w + 1], words[w + 2], words[w + 3], words[w + 4] = (
            cell,
            origin + 1,
            time.monotonic_ns(),
            len(text),
        )
        order_stores()
        words[w] = int(kind)  # last: it makes the record valid

    def read_failure(self, rank: int) -> FailureRecord | None:
        """Return how `rank` failed, None if it did not."""
        w, words = self.layout.rank_word(rank, FAILED), self.words
        kind = KINDS.get(words[w])
        if kind is None:
            return None
        cell, origin, ns, length = words[w + 1 : w + 5].tolist()
        start = (w + 6) * WORD
        text = bytes(self.octets[start : start + min(length, FAILED_TEXT)]).decode("utf-8", "replace")
        return FailureRecord(rank, kind, cell, origin - 1, ns, text)

    def read_locks(self, rank: int) -> list[LockRecord]:
        """Return the entries of a rank's table of locks."""
        return [LockRecord.of(rank, *entry) for entry in lock_entries(self.words, self.word(rank, LOCKS))]

    def read_timing(self, rank: int) -> TimingRecord:
        """Return where the time of `rank` has gone; its words are read again if they have just changed."""
        w = self.layout.rank_word(rank, TIMING)
        values: list[int] = []
        for _ in range(_RETRIES):
            former, values = values, self.words[w : w + TIMING_WORDS].tolist()
            if values == former:
                break
        return TimingRecord.of(rank, values, self.world_size)

    # -- where the ranks' own modules find their words ---------------------------------------------

    def word(self, rank: int, line: int) -> int:
        """Return the index in `words` of the first word of a rank's line (`control_layout.LEFT` …)."""
        return self.layout.rank_word(rank, line)

    def half(self, rank: int, line: int) -> int:
        """Return its index in `halves`."""
        return 2 * self.layout.rank_word(rank, line)

    # -- end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Unmap (idempotent).  Arrays that still view the payload keep the mapping as long as they live."""
        self.words.release()
        self.halves.release()
        self.octets.release()
        try:
            self.map.close()
        except BufferError:  # a view elsewhere: the mapping ends with it
            pass
