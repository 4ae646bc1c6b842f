"""The process tree of a test run, read from ``/proc``; found by lineage and mark, never by name.

Some facts about finding processes (proc(5), pid_namespaces(7)):

* an orphan's parent is the nearest subreaper or init, so lineage alone loses it: every process that the
  run starts also inherits `MARK` in its environment;
* ``/proc/PID/environ`` is what ``execve`` was given: a forked child shows its parent's, a zombie nothing;
* a pid may be used again: a process is the pair of pid and start time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nbparallel.supervisor.children import environment, kill_where
from nbparallel.wire.identity import process_state

MARK = "NBP_TEST_RUN"
"""Environment variable that names the test run which a process belongs to."""
SESSION = "NBP_SESSION"
"""Environment variable that names the nbparallel session which a process belongs to."""
MOST_PATIENCE = 5.0
"""What a busy machine multiplies a bound of the tests by, at most."""


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What ``/proc`` says of one process at one moment."""

    pid: int
    """Process number."""
    parent: int
    """Its parent's number."""
    state: str
    """One letter: R running, S sleeping, D in the kernel, T stopped, Z zombie."""
    started: int
    """Start time in clock ticks since boot; with `pid` it names the process and no later one."""
    command: str
    """Command line, or the short name in brackets if there is none."""
    session: str
    """The nbparallel session in its environment; empty if there is none or it cannot be read."""
    mark: str
    """The test run in its environment; empty if there is none or it cannot be read."""

    def __str__(self) -> str:
        of_session = f", session {self.session}" if self.session else ""
        return f"pid {self.pid} (state {self.state}, parent {self.parent}{of_session}): {self.command}"


def patience() -> float:
    """Return how much longer things take here than on a machine that does nothing else."""
    return min(MOST_PATIENCE, max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))))


def pids() -> frozenset[int]:
    """Return the numbers of all processes."""
    return frozenset(int(name) for name in os.listdir("/proc") if name.isdigit())


def read(pid: int) -> ProcessRecord | None:
    """Return what ``/proc`` says of `pid`, None if it is gone or not ours to read."""
    state, folder = process_state(pid), Path(f"/proc/{pid}")
    try:
        name = (folder / "comm").read_text(errors="replace").strip()
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    if state is None:
        return None
    variables = dict(os.fsdecode(entry).partition("=")[::2] for entry in environment(pid))
    return ProcessRecord(
        pid=pid,
        parent=state.parent,
        state=state.letter,
        started=state.started,
        command=command or f"[{name}]",
        session=variables.get(SESSION, ""),
        mark=variables.get(MARK, ""),
    )


def family(
    root: int, mark: str = "", *, among: Iterable[int] | None = None, adopted: Iterable[int] = ()
) -> Iterator[ProcessRecord]:
    """Yield the descendants of `root` and every process that bears `mark`, zombies included.

    Parameters
    ----------
    root : int
        Not itself yielded.
    mark : str
        Value of `MARK`; empty: lineage only.
    among : iterable of int, optional
        Look only at these; by default at every process.
    adopted : iterable of int
        Processes whose descendants are left out (a longer-lived fixture answers for them).
    """
    records = {pid: record for pid in (pids() if among is None else among) if (record := read(pid))}
    excused = frozenset(adopted)
    for record in records.values():
        lineage = list(_lineage(record, records))
        if record.pid == root or excused.intersection(lineage):
            continue
        if root in lineage or (mark and record.mark == mark):
            yield record


def _lineage(record: ProcessRecord, known: dict[int, ProcessRecord]) -> Iterator[int]:
    seen = {record.pid}
    parent = record.parent
    while parent > 0 and parent not in seen:
        yield parent
        seen.add(parent)
        above = known.get(parent) or read(parent)
        parent = above.parent if above else 0


def kill(records: Iterable[ProcessRecord], *, wait_seconds: float = 2.0) -> list[ProcessRecord]:
    """Kill these processes, and only these: none that has the number of one that has ended.

    Returns
    -------
    list of ProcessRecord
        Those that did not end within `wait_seconds`.
    """
    started = {record.pid: record for record in records}

    def lives(pid: int) -> bool:
        now = read(pid) if pid in started else None
        return now is not None and now.started == started[pid].started and now.state != "Z"

    kill_where(lives)
    deadline = time.monotonic() + wait_seconds
    while (left := [*filter(lives, started)]) and time.monotonic() < deadline:
        time.sleep(0.005)
    return [started[pid] for pid in left]


def reap(records: Iterable[ProcessRecord]) -> None:
    """Take the exit status of zombies among our own children, so that they do not count twice."""
    for record in records:
        with contextlib.suppress(ChildProcessError):  # another process's child, or reaped by its owner
            os.waitpid(record.pid, os.WNOHANG)
