"""Turns: a test that measures time runs while no other worker runs a test.

Some facts about locks on files (flock(2)):

* a lock belongs to the open file, which a forked child shares: it ends with ``LOCK_UN``, also
  while that child lives;
* the kernel promises no order: one that waits for a lock of its own could wait as long as others share it.
  So every process passes a second lock, the gate, which the one that waits keeps closed.
"""

from __future__ import annotations

import fcntl
import os
import tempfile


class Turns:
    """Lets tests of several workers run side by side, and some alone.

    Parameters
    ----------
    run : str
        What all workers of one run have in common.
    """

    def __init__(self, run: str) -> None:
        stem = f"{tempfile.gettempdir()}/nbp-turns-{os.getuid()}-{run}"
        self._paths = (f"{stem}.gate", f"{stem}.lock")
        self._gate, self._lock = (os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for path in self._paths)

    def begin(self, *, alone: bool) -> None:
        """Wait for this test's turn."""
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        fcntl.flock(self._lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def end(self) -> None:
        """Make way."""
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
