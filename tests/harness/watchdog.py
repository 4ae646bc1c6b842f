"""The hang watchdog: a test that does not end is dumped, its own process tree killed, and it fails.

A timer, not a thread: tests fork, and `fork` in a process of several threads is asking for trouble.  The
timer's handler runs in the main thread between two bytecodes and raises there.  If the main thread is in
C code that never comes back, `faulthandler` (a thread of C, armed later) prints its stacks and ends the
run: loud, and nothing of ours survives, because ranks follow their kernel.

The marker ``time_limit(seconds)`` says that a test may take longer than `LIMIT_SECONDS`; it never passes by
running into the limit.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import pytest

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
        signal.setitimer(signal.ITIMER_REAL, limit_seconds, REPEAT_SECONDS)
        last = limit_seconds + LAST_RESORT_SECONDS
        faulthandler.dump_traceback_later(last, exit=True, file=self._stream.fileno())

    def disarm(self) -> None:
        """Stop counting."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, self._previous)  # type: ignore[arg-type]  # what signal() returned

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


WATCHDOG = pytest.StashKey[Watchdog]()
_hung = pytest.StashKey[str]()
LIMIT_FACTOR = pytest.StashKey[float]()
"""Set in a configuration's stash: what multiplies the limit of every test, whatever the machine's load."""
_left_by_workers = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the watchdog of this run."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by a shell that started this run behind "&"
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[WATCHDOG] = Watchdog(_fail, original_stderr())
    config.stash[_left_by_workers] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt what is there before the first test from garbage collections: tests make thousands of them."""
    gc.collect()
    gc.freeze()


def _fail(text: str) -> None:
    pytest.fail(text, pytrace=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Set up, call and tear down under one limit."""
    watchdog = item.config.stash[WATCHDOG]
    marker = item.get_closest_marker("time_limit")
    limit = float(marker.args[0]) if marker else LIMIT_SECONDS
    factor = item.config.stash.get(LIMIT_FACTOR, processes.patience())
    watchdog.arm(item.nodeid, limit * factor)
    try:
        return (yield)
    finally:
        watchdog.disarm()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Watch what a test that hung does at its end."""
    item.config.stash[WATCHDOG].resume()
    return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that swallowed the watchdog's exception."""
    watchdog = item.config.stash[WATCHDOG]
    with watchdog.paused():
        report = yield
    if watchdog.expired and watchdog.name == item.nodeid:
        if report.passed and not item.stash.get(_hung, ""):
            report.outcome, report.longrepr = "failed", watchdog.expired
        item.stash[_hung] = watchdog.expired
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a process of it is still there when all fixtures are gone."""
    left = list(processes.family(os.getpid(), os.environ[processes.MARK]))
    processes.kill(left)
    processes.reap(left)
    texts: list[str] = [str(record) for record in left]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = texts
    of_workers: list[str] = session.config.stash[_left_by_workers]
    texts += of_workers
    if texts:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            lines = "\n".join(f"  {text}" for text in texts)
            reporter.write_line(f"\nprocesses of this run were still there (now killed):\n{lines}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Note which processes a worker of pytest-xdist left behind."""
    node.config.stash[_left_by_workers] += getattr(node, "workeroutput", {}).get("left", [])
