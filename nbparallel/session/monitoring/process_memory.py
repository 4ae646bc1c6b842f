"""Process memory: what the system says about one process, cheap enough to be read several times a second.

Some facts (proc_pid_status(5)): the counters of ``/proc/PID/status`` need no walk through the pages, as those
of ``smaps`` do.  Resident memory is the sum of three kinds: *anonymous* memory, which only this process sees
(of a forked rank also pages that it has not changed since, and that its template still has); *shared* memory
(memfds and files in ``/dev/shm``), whichever process made it; and pages of files on a disk, as of libraries.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nbparallel.wire.system import ReadText, read_text

_FIELDS = re.compile(r"^(VmRSS|RssAnon|RssShmem|Threads):\s+(\d+)", re.MULTILINE)
_HAS_ENDED = re.compile(r"^State:\s+[ZX]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The memory of one process at one moment."""

    resident_nbytes: int
    """All of it."""
    private_nbytes: int
    """Anonymous memory."""
    mapped_nbytes: int
    """Shared memory that it has touched."""
    threads: int
    """Its threads."""
    stopped: bool
    """Whether it was stopped (SIGSTOP)."""


def read_memory(pid: int, read: ReadText = read_text) -> ProcessMemory | None:
    """Return what the system says of a process; None if it has ended, or the system does not say."""
    try:
        text = read(f"/proc/{pid}/status")
    except OSError:
        return None
    fields = {name: int(value) for name, value in _FIELDS.findall(text)}
    if "VmRSS" not in fields and _HAS_ENDED.search(text):
        return None  # without that it is ending: no other process can notice it yet
    resident, private, mapped = (fields.get(name, 0) << 10 for name in ("VmRSS", "RssAnon", "RssShmem"))
    return ProcessMemory(resident, private, mapped, fields.get("Threads", 0), "\nState:\tT" in text)
