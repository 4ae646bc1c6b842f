"""Other ranks' private memory, read where it lies: whether that works here, and that it was theirs.

Nothing is guessed: before a rank reads another one's arrays for the first time, it reads a word of that rank
whose value both know.  What came of it stands in a word of the pair, so that a rank knows which ranks can
read its memory; from then on reading is one of the ways that an operation can take.

A process id may be another process's by the time it is used.  So the reader opens the other rank's pidfd
before it tries that word, and looks at the pidfd *after* it has read anything: a process that has not ended
by then has had its id all the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import secrets
import select
import sys
from collections.abc import Iterable, Sequence
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any, TypeAlias

import numpy as np

from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.wire.control import ControlView
from nbparallel.wire.control_layout import ITEMS, PLACE, READ_IN_PLACE_OFF
from nbparallel.wire.system import read_text, ready

# Reading another process's memory in one copy: process_vm_readv(2).
#
# Some facts:
#
# * the reader needs the right to trace the other process (ptrace(2), *Ptrace access mode checking*): the
#   same user and no more privileges there, and what Yama says (``kernel.yama.ptrace_scope``); a seccomp
#   filter may refuse the call, too;
# * with Yama's scope 1 a process may only read its descendants, and those that have named it or an ancestor
#   of it (``PR_SET_PTRACER``);
# * a call moves at most 2 GiB less a page, and stops before the first page that it cannot read: it returns
#   how many bytes it has copied, and an error only if that is none;
# * it stops earlier for a signal that ends the process, else not;
# * memory that a driver has mapped (VM_IO, VM_PFNMAP) cannot be read like this, not even by its own
#   process;
# * a number of a process that has ended may be another process's: a reader has to know that it has not.

YAMA_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
_PR_SET_PTRACER = 0x59616D61
MOST_NBYTES = 1 << 30
"""Of one call: below the system's limit."""


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _find() -> Any:
    """Return the C library's function, None if there is none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError:
        return None
    function.restype = ctypes.c_ssize_t
    vector = ctypes.POINTER(_Vector)
    function.argtypes = (
        ctypes.c_int, vector, ctypes.c_ulong, vector, ctypes.c_ulong, ctypes.c_ulong,
    )  # fmt: skip
    return function


readv = _find()


def read_memory(pid: int, address: int, into: Any) -> int:
    """Fill a contiguous, writable buffer with the bytes at an address of another process.

    Returns
    -------
    int
        0: all of it was read.  Else the system's error (`errno`), and the buffer may hold some of it.
    """
    nbytes = memoryview(into).nbytes
    if nbytes == 0:
        return 0
    if readv is None:
        return errno.ENOSYS
    if address <= 0 or address + nbytes >= 1 << 64:
        return errno.EFAULT
    start = ctypes.addressof(ctypes.c_char.from_buffer(into))
    done = 0
    while done < nbytes:
        length = min(nbytes - done, MOST_NBYTES)
        local, remote = _Vector(start + done, length), _Vector(address + done, length)
        count = readv(pid, local, 1, remote, 1, 0)
        if count > 0:
            done += count
            continue
        number = ctypes.get_errno() if count < 0 else errno.EFAULT
        if number != errno.EINTR:
            return number
    return 0


def allow_reading(reader: int) -> None:
    """Let a process and its descendants read this one's memory, where Yama would not (its scope 1)."""
    with contextlib.suppress(OSError):  # there is no Yama
        if read_text(YAMA_SCOPE).strip() == "1":
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(reader), 0, 0, 0)


OFF = "NBP_READ_IN_PLACE"
"""Environment variable: with the value 0 this process neither reads others' memory nor offers its own."""
READS, REFUSED = 1, 2
"""What the word of a pair says; 0: its reader has not tried yet."""
MOST_PEERS = 64
"""How many ranks one reads: each takes a descriptor, of which a process has 1024 as a rule."""
refused = False
"""Whether this process reads no more: an operation was refused in the middle."""


Block: TypeAlias = "tuple[int, int, AnyArray]"
"""A rank, an address in its memory, and the array to fill with what lies there."""


class PeerMemory:
    """One rank's reading of the private memory of others in an epoch, and their reading of its own."""

    def __init__(self, view: ControlView, rank: int) -> None:
        self._words, self._rank = view.words, rank
        self._layout = view.layout
        self.pids: dict[int, int] = {}
        """Process ids of the ranks that were verified."""
        self.pidfds: dict[int, int] = {}
        """And what notices that a process has ended."""
        self._poll = select.poll() if hasattr(select, "poll") else None
        self._proof = ctypes.c_uint64(secrets.randbits(64) | 1)
        self.enabled = os.environ.get(OFF) != "0" and hasattr(os, "pidfd_open")
        """False: this process neither reads others' memory nor offers its own."""
        if self.enabled:
            allow_reading(os.getppid())
            place = self._layout.memory_word(rank)
            self._words[place + 1] = ctypes.addressof(self._proof)
            self._words[place + 2] = self._proof.value
            self._words[place] = os.getpid()

    @property
    def offered(self) -> bool:
        """Whether this rank lets others read its arrays where they lie."""
        return self.enabled and not self._words[READ_IN_PLACE_OFF]

    def verify(self, rank: int) -> bool:
        """Whether this rank can read the memory of another one, which has begun the epoch; tries it once."""
        word = self._word(rank, self._rank)
        known = self._words[word]
        if known:
            return known == READS
        if not self.offered:
            return False  # it may be turned on again
        reads = not refused and len(self.pids) < MOST_PEERS and not self.probe(rank)
        self._words[word] = READS if reads else REFUSED
        return reads

    def probe(self, rank: int) -> int:
        """Read the word of a rank whose value both know; return what failed (`errno`), 0: it can be read."""
        place = self._layout.memory_word(rank)
        pid = self._words[place]
        if not pid or self._poll is None:
            return errno.ESRCH
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            return error.errno or errno.EPERM
        if failed := self._prove(rank, pid):
            os.close(pidfd)
            return failed
        self._poll.register(pidfd, select.POLLIN)
        self.pids[rank], self.pidfds[rank] = pid, pidfd
        return 0

    def _prove(self, rank: int, pid: int) -> int:
        """Read the word whose value both know; 0: it has that value."""
        place, found = self._layout.memory_word(rank), np.zeros(8, np.uint8)
        failed = read_memory(pid, self._words[place + 1], found)
        differs = int(found.view(np.uint64)[0]) != self._words[place + 2]
        return failed or (errno.ESRCH if differs else 0)  # in its own namespace the id is another process's

    def still_reads(self, rank: int) -> bool:
        """Whether the memory of a rank that was verified can be read, now that some of it could not."""
        return not self._prove(rank, self.pids[rank])

    def is_read_by(self, readers: Iterable[int]) -> bool:
        """Whether each of these ranks has found that it can read this one's memory."""
        words, mine = self._words, self._rank
        return self.offered and all(words[self._word(mine, r)] == READS for r in readers if r != mine)

    def all_read(self, ranks: Sequence[int]) -> bool:
        """Whether each of `ranks` has found that it can read all others' memory."""
        words = self._words
        return all(
            words[self._word(source, reader)] == READS
            for source in ranks for reader in ranks if source != reader
        )  # fmt: skip

    def _word(self, source: int, reader: int) -> int:
        """Return the word in which `reader` says whether it can read the memory of `source`."""
        return self._layout.head_word(source, reader) + 5

    def address(self, x: AnyArray) -> int:
        """Return where a contiguous array lies, for others to read; 0 if it cannot be read like that.

        A driver's memory (a pinned tensor's, for example) cannot, and its own process finds that out, too.
        """
        if not self.offered or not x.nbytes:
            return 0
        address = int(x.__array_interface__["data"][0])
        owner: Any = x if x.base is None else x.base  # an mmap, say: numpy's types know arrays alone
        if not isinstance(owner, np.ndarray) or not owner.flags.owndata:
            found = np.empty(1, np.uint8)
            for place in (address, address + x.nbytes - 1):
                if read_memory(os.getpid(), place, found):
                    return 0
        return address

    def read(self, blocks: Iterable[Block]) -> tuple[int, Block] | None:
        """Fill contiguous arrays, each with the memory of a rank that was verified.

        Returns
        -------
        tuple of int and Block, or None
            The first that failed, and why (`errno`).
        """
        for block in blocks:
            rank, address, into = block
            if error := read_memory(self.pids[rank], address, np.ndarray((into.nbytes,), np.uint8, into)):
                return error, block
        return None

    def ended(self, ranks: Iterable[int]) -> int | None:
        """Return one of `ranks` whose process has ended: what was read may be another's; None: all live."""
        if self._poll is None:
            return None
        ended = {fd for fd, _ in ready(self._poll, 0)}
        return next((rank for rank in ranks if self.pidfds.get(rank, -1) in ended), None) if ended else None

    def give_up(self) -> None:
        """Read no more in this process: a call that was allowed before is refused now."""
        global refused
        refused = True

    def close(self) -> None:
        """Close the descriptors."""
        while self.pidfds:
            os.close(self.pidfds.popitem()[1])
        self._poll = None


# Where a rank is inside a statement of several lines, for the notebook's panel; it costs the rank nothing.
#
# CPython writes the address of the instruction that a frame executes to a word of the frame, each time.  A
# rank publishes once where that word is, and the notebook's process reads it when it looks.  A thread of the
# rank would see only lines that release the interpreter's lock, and the handler of a signal the line after.

_INNER, _INSTRUCTION = 24, 56
"""Bytes from a frame object to the address of its inner frame, and from that to the word."""
_KNOWN = sys.implementation.name == "cpython" and sys.version_info < (3, 15) and object.__basicsize__ == 16
"""Whether that is so here: it is in 3.11 to 3.14.

Without a global lock, or with references traced, objects begin otherwise.
"""


def publish_place(view: ControlView, rank: int, cell: int, frame: FrameType) -> None:
    """Publish where the frame of a statement of several lines keeps its instruction; not of a function."""
    code, w, word_at = frame.f_code, view.word(rank, ITEMS) + PLACE, ctypes.c_uint64.from_address
    if not _KNOWN or code.co_flags & CO_OPTIMIZED or os.environ.get(OFF) == "0":
        return
    place = word_at(id(frame) + _INNER).value + _INSTRUCTION
    begin = word_at(place).value - frame.f_lasti
    is_known = view.words[w] == cell and view.words[w + 3] == begin
    lines = [] if is_known else [line for *_, line in code.co_lines() if line]
    if lines and max(lines) > lines[0]:
        table = ctypes.cast(ctypes.c_char_p(code.co_linetable), ctypes.c_void_p).value or 0
        words = 0, lines[0], place, begin, table, len(code.co_linetable), code.co_firstlineno
        for i, word in enumerate(words):
            view.words[w + i] = word
        view.words[w] = cell  # last: it makes them valid


def line_inside(view: ControlView, pid: int, rank: int) -> int:
    """Return on which line a rank is of the statement that it says it executes; 0: unknown."""
    was, w = view.read_slot(rank), view.word(rank, ITEMS) + PLACE
    cell, statement, place, begin, *table = view.words[w : w + 7].tolist()
    if (cell, statement) != (was.cell, was.line):
        return 0
    lines, word = _lines(pid, cell, *table), np.zeros(1, np.uint64)
    offset = -1 if read_memory(pid, place, word) else int(word[0]) - begin
    found, now = [line for start, end, line in lines if start <= offset < end], view.read_slot(rank)
    # if another statement has begun, the word may be another frame's
    return found[0] or 0 if found and now.cell == cell and was.line <= now.line <= was.last_line else 0


@functools.lru_cache(64)
def _lines(pid: int, _cell: int, address: int, nbytes: int, first: int) -> list[tuple[int, int, int | None]]:
    table, code = np.zeros(nbytes, np.uint8), publish_place.__code__
    failed = read_memory(pid, address, table)
    return [] if failed else [*code.replace(co_linetable=table.tobytes(), co_firstlineno=first).co_lines()]
