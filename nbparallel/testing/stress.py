"""Options of the plugin that make tests harder: many times, and on one core that is busy already.

A test that passes once shows little about a race; ``make sweep`` runs the fault tests with both.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BUSY_LIMIT_FACTOR = 3.0
"""On a busy core everything takes at least twice as long; limits grow by this."""
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10_000))"


def add_options(parser: pytest.Parser) -> None:
    """Add ``--repeat`` and ``--busy-core``."""
    group = parser.getgroup("nbparallel")
    group.addoption("--repeat", type=int, default=1, metavar="N", help="run every selected test N times")
    group.addoption(
        "--busy-core", action="store_true", help="pin everything to one core, beside a process that spins"
    )


class BusyCore:
    """Pins this process, and so all that it starts, to one core, and keeps that core busy."""

    def __init__(self) -> None:
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        self._spinner = subprocess.Popen([sys.executable, "-I", "-S", "-c", _SPIN])

    def close(self) -> None:
        """End the spinning process; the pinning stays."""
        self._spinner.kill()
        self._spinner.wait()
