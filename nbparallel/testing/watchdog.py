"""The hang watchdog: a test that does not end is dumped, its own process tree killed, and it fails.

A timer, not a thread: tests fork, and `fork` in a process of several threads is asking for trouble.  The
timer's handler runs in the main thread between two bytecodes and raises there.  If the main thread is in
C code that never comes back, `faulthandler` (a thread of C, armed later) prints its stacks and ends the
run: loud, and nothing of ours survives, because ranks follow their kernel.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from nbparallel.testing import processes
from nbparallel.testing.processes import ProcessRecord

LIMIT_SECONDS = 20.0
"""A test that takes longer hangs, unless it said so."""
REPEAT_SECONDS = 2.0
"""Code that swallowed the exception gets it again after this."""
LAST_RESORT_SECONDS = 20.0
"""After this much more `faulthandler` ends the whole run."""
DUMP_SECONDS = 1.0
"""How long the processes of the tree may take to write their stacks."""


class Watchdog:
    """Runs one test under a limit; `expired` shows afterwards whether it hung.

    Parameters
    ----------
    fail : callable
        Given the report; raises what the test runner takes for a failure.
    stream : file
        Where stacks go; needs a descriptor.

    Notes
    -----
    Main thread only.  `setitimer` counts real time by the monotonic clock (setitimer(2)), and a forked
    child does not inherit it.
    """

    def __init__(self, fail: Callable[[str], None], stream: TextIO) -> None:
        self._fail = fail
        self._stream = stream
        self._limit = LIMIT_SECONDS
        self._previous: object = None
        self._owner = os.getpid()
        self.expired = ""
        self.name = ""

    def arm(self, name: str, limit_seconds: float = LIMIT_SECONDS) -> None:
        """Start counting for the test called `name`."""
        self.expired, self.name, self._limit = "", name, limit_seconds
        self._owner = os.getpid()
        self._previous = signal.signal(signal.SIGALRM, self._on_alarm)
        self._count()

    def disarm(self) -> None:
        """Stop counting."""
        self._pause()
        signal.signal(signal.SIGALRM, self._previous)  # type: ignore[arg-type]  # what signal() returned

    def _count(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._limit, REPEAT_SECONDS)
        last = self._limit + LAST_RESORT_SECONDS
        faulthandler.dump_traceback_later(last, exit=True, file=self._stream.fileno())

    def _pause(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for another worker's test, which has a limit of its own; then start to count anew.

        The handler stays: one that changes is a leak for the check that waits.
        """
        self._pause()
        try:
            yield
        finally:
            self._count()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Raise nothing while the runner describes a test; after a hang nothing again until `resume`.

        An exception outside of a test's own code would end the run.
        """
        left, repeat = signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            yield
        finally:
            if not self.expired:
                signal.setitimer(signal.ITIMER_REAL, left, repeat)

    def resume(self) -> None:
        """Watch a test that hung further, in its teardown."""
        if self.expired:
            signal.setitimer(signal.ITIMER_REAL, REPEAT_SECONDS, REPEAT_SECONDS)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return  # a forked child that set a timer of its own
        if not self.expired:
            self.expired = f"{self.name} hung: not finished after {self._limit:g} s"
            self._stream.write(f"\n\n=== {self.expired} ===\n")
            self._stream.flush()
            dump_and_kill(processes.family(os.getpid(), os.environ.get(processes.MARK, "")), self._stream)
            self._stream.write(f"--- this process, {os.getpid()} ---\n")
            self._stream.flush()
            faulthandler.dump_traceback(self._stream.fileno(), all_threads=True)
        self._fail(f"{self.expired}; its processes were dumped (above) and killed")


def dump_and_kill(records: Iterable[ProcessRecord], stream: TextIO) -> None:
    """Write where each process is, let those with a faulthandler print their stacks, then kill all."""
    tree = list(records)
    for record in tree:
        stream.write(f"--- {record}\n    {_whereabouts(record.pid)}\n")
    stream.flush()
    asked = [record for record in tree if _prints_stacks(record.pid)]
    for record in asked:
        _abort(record)
    _wait_until_gone(asked, DUMP_SECONDS)
    left = processes.kill(tree)
    for record in left:
        stream.write(f"    did not end: {record}\n")
    processes.reap(tree)
    stream.flush()


def _whereabouts(pid: int) -> str:
    parts = []
    for name in ("wchan", "syscall"):
        try:
            parts.append(f"{name}: {Path(f'/proc/{pid}/{name}').read_text().strip() or '-'}")
        except OSError as error:
            parts.append(f"{name}: {error.strerror}")
    return ", ".join(parts)


def _prints_stacks(pid: int) -> bool:
    """Return whether SIGABRT is caught, as `faulthandler.enable` does: then it prints stacks first."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGABRT - 1) & 1)


def _abort(record: ProcessRecord) -> None:
    now = processes.read(record.pid)
    if now is not None and now.started == record.started:
        try:
            os.kill(record.pid, signal.SIGABRT)
        except ProcessLookupError:
            return  # it has ended


def _wait_until_gone(records: Iterable[ProcessRecord], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for record in records:
        try:
            pidfd = os.pidfd_open(record.pid)
        except OSError:
            continue
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        finally:
            os.close(pidfd)


def original_stderr() -> TextIO:
    """Return a file on a copy of descriptor 2, which output capture does not swallow."""
    sys.stderr.flush()
    return os.fdopen(os.dup(2), "w", buffering=1)
