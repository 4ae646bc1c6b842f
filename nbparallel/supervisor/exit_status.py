"""Exit statuses of processes that are not children of this one, as far as the system reports them.

Some facts (proc_pid_stat(5), pidfs):

* only the parent can wait for a process; for others its pidfd only shows *that* it has ended;
* until its parent has waited, the last field but one of ``/proc/PID/stat`` is the status that it will get;
* from then on a pidfd answers ``PIDFD_GET_INFO`` with it (Linux 6.15).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from nbparallel.wire.identity import Process, process_state

_INFO = struct.Struct("=QQ11Ii")
"""mask, cgroup, eleven numbers of process and users, exit status: what `PIDFD_GET_INFO` fills."""
_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
_HAS_STATUS = 1 << 3
_TRIES = 3
"""The parent may wait for it between our two questions."""


def exit_status(pidfd: int, process: Process) -> tuple[int | None, int | None]:
    """Return (exit code, signal) of a process that has ended; (None, None) if it cannot be known."""
    for _ in range(_TRIES):
        status = _of_zombie(process)
        if status is None:
            status = _of_pidfd(pidfd)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            return (code, None) if code >= 0 else (None, -code)
    return None, None


def _of_zombie(process: Process) -> int | None:
    state = process_state(process.pid)
    if state is None or state.letter != "Z" or state.started != process.started:
        return None
    try:
        with open(f"/proc/{process.pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[49]) if int(fields[19]) == process.started else None
    except (OSError, IndexError, ValueError):
        return None  # its parent has waited for it since


def _of_pidfd(pidfd: int) -> int | None:
    question = bytearray(64)
    struct.pack_into("=Q", question, 0, _HAS_STATUS)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, question)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EINVAL, errno.ESRCH, errno.EPERM):
            return None  # an older system, or its parent has not waited yet
        raise
    mask, *_, status = _INFO.unpack_from(question)
    return status if mask & _HAS_STATUS else None
