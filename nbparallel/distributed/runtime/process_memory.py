"""Reading another process's memory in one copy: process_vm_readv(2).

Some facts:

* the reader needs the right to trace the other process (ptrace(2), *Ptrace access mode checking*): the same
  user and no more privileges there, and what Yama says (``kernel.yama.ptrace_scope``); a seccomp filter may
  refuse the call, too;
* with Yama's scope 1 a process may only read its descendants, and those that have named it or an ancestor of
  it (``PR_SET_PTRACER``);
* a call moves at most 2 GiB less a page, and stops before the first page that it cannot read: it returns how
  many bytes it has copied, and an error only if that is none;
* it stops earlier for a signal that ends the process, else not;
* memory that a driver has mapped (VM_IO, VM_PFNMAP) cannot be read like this, not even by its own process;
* a number of a process that has ended may be another process's: a reader has to know that it has not.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import sys
from dataclasses import dataclass
from typing import Any

from nbparallel.wire.system import read_text

YAMA_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
_PR_SET_PTRACER = 0x59616D61
MOST_NBYTES = 1 << 30
"""Of one call: below the system's limit."""


class ReadFailure(enum.Enum):
    """Why another process's memory was not read."""

    REFUSED = enum.auto()
    """This process may not, or the system has no such call."""
    UNREADABLE = enum.auto()
    """There is no memory that can be read."""
    GONE = enum.auto()
    """There is no such process."""


@dataclass(frozen=True, slots=True)
class ReadError:
    """A read that failed."""

    failure: ReadFailure
    number: int
    """The system's error (`errno`)."""

    def __str__(self) -> str:
        return os.strerror(self.number)


_FAILURES = {
    errno.EFAULT: ReadFailure.UNREADABLE,
    errno.ENOMEM: ReadFailure.UNREADABLE,
    errno.ESRCH: ReadFailure.GONE,
}


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


def read_memory(pid: int, address: int, into: Any) -> ReadError | None:
    """Fill a contiguous, writable buffer with the bytes at an address of another process.

    Returns
    -------
    ReadError or None
        None: all of it was read.  Else the buffer may hold some of it.
    """
    nbytes = memoryview(into).nbytes
    if nbytes == 0:
        return None
    if readv is None:
        return ReadError(ReadFailure.REFUSED, errno.ENOSYS)
    if address <= 0 or address + nbytes >= 1 << 64:
        return ReadError(ReadFailure.UNREADABLE, errno.EFAULT)
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
            return ReadError(_FAILURES.get(number, ReadFailure.REFUSED), number)
    return None


def allow_reading(reader: int) -> None:
    """Let a process and its descendants read this one's memory, where Yama would not (its scope 1)."""
    try:
        if read_text(YAMA_SCOPE).strip() == "1":
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(reader), 0, 0, 0)
    except OSError:
        pass  # there is no Yama
