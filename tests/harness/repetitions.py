"""Options that make a run of tests harder: ``--repeat N`` and ``--busy-core``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from nbparallel.testing.processes import MARK
from tests.harness.watchdog import LIMIT_FACTOR

BUSY_LIMIT_FACTOR = 3.0
"""On a busy core everything takes at least twice as long; limits grow by this."""
_SPIN = """
import os, sys
if pid := os.fork():
    print(pid)
    sys.exit()
os.close(1)
while os.path.exists(f"/proc/{sys.argv[1]}"): sum(range(10_000))
"""


class BusyCore:
    """Pins this process, and so all that it starts, to one core, and keeps that core busy.

    The process that spins is no descendant and has no mark: tests look whether any is left of either.
    """

    def __init__(self) -> None:
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        unmarked = {name: value for name, value in os.environ.items() if name != MARK}
        command = [sys.executable, "-I", "-S", "-c", _SPIN, str(os.getpid())]
        started = subprocess.run(command, env=unmarked, stdout=subprocess.PIPE, check=True)
        self._spinner = os.pidfd_open(int(started.stdout))

    def close(self) -> None:
        """End the spinning process; the pinning stays."""
        signal.pidfd_send_signal(self._spinner, signal.SIGKILL)
        os.close(self._spinner)


_busy_core = pytest.StashKey[BusyCore]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--repeat`` and ``--busy-core``."""
    group = parser.getgroup("nbparallel")
    group.addoption("--repeat", type=int, default=1, metavar="N", help="run every selected test N times")
    group.addoption(
        "--busy-core", action="store_true", help="pin everything to one core, beside a process that spins"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Announce the marker; make the core busy, once for all workers."""
    config.addinivalue_line("markers", "once: is long by itself; --repeat leaves it alone")
    if config.getoption("--busy-core"):
        config.stash[LIMIT_FACTOR] = BUSY_LIMIT_FACTOR
        if not hasattr(config, "workerinput"):
            config.stash[_busy_core] = BusyCore()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process that spins."""
    if _busy_core in config.stash:
        config.stash[_busy_core].close()


@pytest.fixture
def repetition() -> int:
    """Return which of the ``--repeat`` runs of a test this is."""
    return 0


@pytest.hookimpl(tryfirst=True)  # before parametrised fixtures: the number stands first in a test's name
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test ``--repeat`` times, but for those that are marked ``once``."""
    count = metafunc.config.getoption("--repeat")
    if count > 1 and metafunc.definition.get_closest_marker("once") is None:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(count))
