"""Tests that measure time: each runs while no other worker runs a test, and what is promised is recorded.

The marker ``alone`` says so of a test.

Some facts about locks on files (flock(2)):

* a lock belongs to the open file, which a forked child shares: it ends with ``LOCK_UN``, also
  while that child lives;
* the kernel promises no order: one that waits for a lock of its own could wait as long as others share it.
  So every process passes a second lock, the gate, which the one that waits keeps closed.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

GENEROUS_SECONDS = 4.0
"""What a shared machine may add to a promised time by scheduling alone."""
Promised = Callable[[float], AbstractContextManager[None]]


class Turns:
    """Lets tests of several workers run side by side, and some alone.

    Parameters
    ----------
    run : str
        What all workers of one run have in common.
    """

    def __init__(self, run: str) -> None:
        stem = f"{os.environ['PYTEST_DEBUG_TEMPROOT']}/nbp-turns-{os.getuid()}-{run}"  # of all workers
        self._paths = (f"{stem}.gate", f"{stem}.lock")
        self._gate, self._lock = (os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for path in self._paths)

    def begin(self, *, alone: bool) -> None:
        """Wait for this test's turn."""
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        fcntl.flock(self._lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def end(self) -> None:
        """Let the next test begin."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the files and remove their names: the other workers have opened theirs long ago."""
        for fd in (self._gate, self._lock):
            os.close(fd)
        for path in self._paths:
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue  # another worker was first


_turns = pytest.StashKey[Turns]()


def pytest_configure(config: pytest.Config) -> None:
    """Announce the marker; a worker of pytest-xdist takes turns with the others."""
    config.addinivalue_line("markers", "alone: measures time; no other worker runs a test beside it")
    if hasattr(config, "workerinput"):
        config.stash[_turns] = Turns(config.workerinput["testrunuid"])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test when its turn has come; the watchdog counts from there."""
    turns = item.config.stash.get(_turns, None)
    if turns is None:
        return (yield)
    turns.begin(alone=item.get_closest_marker("alone") is not None)
    try:
        return (yield)
    finally:
        turns.end()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the files of turns."""
    if _turns in config.stash:
        config.stash[_turns].close()


@pytest.fixture
def promised(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Promised:
    """Return a context manager that measures what the library promises to do in time: ``promised(1.0)``.

    The measured time is a property of the test's report.  Repetitions (``--repeat``), but for those on a busy
    core, fail at the promise; a single run fails `GENEROUS_SECONDS` later.
    """
    options = request.config.option
    strict = options.repeat > 1 and not options.busy_core

    @contextmanager
    def within(seconds: float) -> Iterator[None]:
        begun = time.monotonic()
        yield
        took = time.monotonic() - begun
        record_property(f"seconds of {seconds:g} promised", round(took, 3))
        limit = seconds if strict else seconds + GENEROUS_SECONDS
        assert took < limit, f"took {took:.3f} s; {seconds:g} s are promised"

    return within
