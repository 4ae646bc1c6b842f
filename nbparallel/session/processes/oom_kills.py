"""Was it for want of memory?  The system counts the processes that it has killed for that.

Some facts (mm/oom_kill.c; Documentation/admin-guide/cgroup-v1/memory.rst, cgroup-v2.rst; proc_vmstat(5)):

* the count goes up before the process is signalled: who reads it after a death has it;
* a container's count is ``oom_kill`` in ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1), the
  machine's is in ``/proc/vmstat``; who is killed counts in both, whichever of them was out of memory;
* programs that kill before memory is really gone (systemd-oomd, earlyoom) count nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from nbparallel.wire.system import ReadText, memory_cgroups, read_text

GLANCE_SECONDS = 0.1
"""Between two looks before tasks; reading the count takes as long as a tenth of a short task."""


class MemoryKills:
    """Watches the count of out-of-memory kills where the ranks run.

    Notes
    -----
    Threads may call `look` and `explain` at the same time: at worst a death is explained one time too few.
    """

    def __init__(self, read: ReadText = read_text) -> None:
        self._read = read
        self._file = next((path for path in _files(read) if self._count(path) is not None), "")
        self._seen = 0
        self.look()

    def look(self) -> None:
        """Take note of the count: what comes later explains deaths that come later."""
        self._looked = time.monotonic()
        self._seen = self._count(self._file) or 0

    def glance(self) -> None:
        """Do what `look` does, unless that was a moment ago: a script may run a thousand tasks a second."""
        if time.monotonic() - self._looked >= GLANCE_SECONDS:
            self.look()

    def explain(self) -> str:
        """Return why a process was killed just now, the end of ``was …``; empty if it was not for memory.

        Each kill explains one death.
        """
        count = self._count(self._file) or 0
        if count <= self._seen:
            return ""
        self._seen += 1
        return (
            f"killed by the system because memory ran out (oom_kill went from {self._seen - 1} to {count} in "
            f"{self._file}): take less at a time, share arrays instead of copying them, or use fewer ranks"
        )

    def _count(self, path: str) -> int | None:
        try:
            for line in self._read(path).splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        except (OSError, ValueError):
            pass  # not counted there, or the container hides it
        return None


def _files(read: ReadText) -> Iterator[str]:
    """Yield where the count may be, the closest to us first."""
    for directory, version in memory_cgroups(read):
        yield f"{directory}/{'memory.events' if version == 2 else 'memory.oom_control'}"
    yield "/proc/vmstat"
