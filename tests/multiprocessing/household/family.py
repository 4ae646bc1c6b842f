"""Processes that a test starts as guests, and pipes with mailboxes between them."""

from __future__ import annotations

import os
import signal
import sys

from nbparallel.multiprocessing import household
from nbparallel.testing import processes
from nbparallel.testing.waiting import wait_until


class Child:
    """A forked guest that runs a function; the function may stop at a point, and go on.

    Parameters
    ----------
    function : callable
        Called with `point`, which reports its argument and waits until the parent lets it go on.
    """

    def __init__(self, function, *, daemon=True):
        ours, theirs = os.pipe(), os.pipe()
        fork = household.membership().fork(daemon=daemon)
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                signal.alarm(30)
                fork.child()

                def point(name):
                    os.write(ours[1], name.encode().ljust(16))
                    if not os.read(theirs[0], 1):
                        os._exit(3)

                function(point)
                code = 0
            except BaseException:  # noqa: BLE001  it must not return into the test
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        fork.parent()
        os.close(ours[1])
        os.close(theirs[0])
        self._reports, self._go = ours[0], theirs[1]

    def await_point(self, name):
        """Wait until it stops there."""
        assert os.read(self._reports, 16).decode().strip() == name

    def go_on(self):
        """Let it go on."""
        os.write(self._go, b"x")

    def kill(self):
        """Kill it and wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self):
        """Wait for its end and return its exit code."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._reports)
        os.close(self._go)
        return code


def is_gone(pid):
    """Return whether a process has ended."""
    record = processes.read(pid)
    return record is None or record.state == "Z"


def held():
    """Return the segments that processes or messages hold, as the supervisor says."""
    report = wait_until(household.report)  # None while its process starts, on a busy machine
    return [row for row in report.segments if row.holders or row.messages]


def await_held(condition, *what):
    """Wait until `condition` is true of `held`; this process's own store acts on its notices meanwhile."""

    def holds():
        household.membership().store.drain()
        return condition(held())

    wait_until(holds, lambda: (*what, held()))
