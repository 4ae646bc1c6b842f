"""Names of segments that this process has made and not removed yet.

With a session the supervisor removes what a process leaves behind, however it dies.  Without one, only the
process itself is there: the names it still has are removed when it exits.  After a ``kill -9`` without a
session, or of notebook and supervisor together, the names stay; the next session's sweep finds them, and
that no process has them locked (`wire.locked_names`) proves that none needs them.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets

from nbparallel.wire import locked_names


class OwnedNames:
    """Paths that one process has to remove.

    Notes
    -----
    Thread-safe without a lock: finalizers remove names, and they may run within any other method.
    """

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._stem = ""
        self._serials = itertools.count(1)
        self._notebook = 0

    def join_session(self, notebook: int) -> None:
        """Make names of a rank in the session of the process `notebook`; before the first name is made."""
        self._notebook = notebook

    def draw(self) -> str:
        """Return an unused file name of at most 25 characters, which macOS allows.

        >>> len(process_names.draw()) <= 25, process_names.draw() == process_names.draw()
        (True, False)
        """
        if not self._stem:
            self._stem = locked_names.stem(self._notebook or os.getpid(), secrets.randbits(25))
        number, letters = next(self._serials), ""
        while number:
            number, digit = divmod(number, 32)
            letters = locked_names.LETTERS[digit] + letters
        return f"{self._stem}_{letters}"

    def change_stem(self) -> None:
        """Draw later names anew: a program that saw ours can guess the next."""
        self._stem = ""

    def claim(self, path: str) -> None:
        """Record a name that is about to be made: it is removed at exit."""
        self._paths.add(path)

    def disclaim(self, path: str) -> None:
        """Leave a name alone from now on: it belongs to another program, or was never made (idempotent)."""
        self._paths.discard(path)

    def remove(self, path: str) -> None:
        """Remove a name and its claim (idempotent); the name need not exist."""
        try:
            os.unlink(path)
        except OSError:
            pass  # the supervisor or another program was quicker, or the directory was removed with it
        self.disclaim(path)

    def remove_all(self) -> None:
        """Remove every name of this process: it exits."""
        for path in [*self._paths]:
            self.remove(path)

    def disclaim_all(self) -> None:
        """Leave all names to the parent of a forked child, and draw none that could equal one of them."""
        self._paths.clear()
        self._stem, self._notebook = "", 0


process_names = OwnedNames()
"""The names of this process."""
atexit.register(process_names.remove_all)
os.register_at_fork(after_in_child=process_names.disclaim_all)
