"""Out-of-memory kills, as the system counts them: whether a killed rank was one of them.

Some facts (mm/oom_kill.c; Documentation/admin-guide/cgroup-v1/memory.rst, cgroup-v2.rst; proc_vmstat(5)):

* the count rises before the process is signalled: a read after a death includes that death;
* a container's count is ``oom_kill`` in ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1), the
  machine's is in ``/proc/vmstat``; a kill counts in both, whichever of them was out of memory;
* kills by programs that act earlier (systemd-oomd, earlyoom) count nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from nbparallel.wire.system import ReadText, cgroups, read_text

POLL_SECONDS = 0.1
"""Shortest time between two reads before tasks: one takes a tenth of the time of a short task."""

_MACHINE = "/proc/vmstat"
"""The file with the machine's own count."""


class OomKillCounter:
    """The count of out-of-memory kills where the ranks run.

    Notes
    -----
    Thread-safe in effect: with `read_count` and `explain` at the same time one explanation can be missing.
    """

    def __init__(self, read: ReadText = read_text) -> None:
        self._read = read
        self._file = next((path for path in _files(read) if self._count(path) is not None), "")
        self._seen = 0
        self.read_count()

    def read_count(self) -> None:
        """Read the count: a later rise explains a later death."""
        self._read_at = time.monotonic()
        self._seen = self._count(self._file) or 0

    def poll(self) -> None:
        """Read the count unless that was done a moment ago: a script can run a thousand tasks a second."""
        if time.monotonic() - self._read_at >= POLL_SECONDS:
            self.read_count()

    def explain(self) -> str:
        """Return the cause of a kill as the end of ``was …``; empty if the system did not run out of memory.

        Each kill explains one death.
        """
        count = self._count(self._file) or 0
        if count <= self._seen:
            return ""
        self._seen += 1
        where = "this machine's" if self._file == _MACHINE else "this container's"
        return (
            f"killed by the system because memory ran out ({where} count of such kills has risen): take less "
            "at a time, share arrays instead of copying them, or use fewer ranks"
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
    """Yield the files that can hold the count, the innermost cgroup first."""
    for directory, version in cgroups("memory", read):
        yield f"{directory}/{'memory.events' if version == 2 else 'memory.oom_control'}"
    yield _MACHINE
