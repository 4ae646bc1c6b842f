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
        self._paths: dict[str, str] = {}
        """Name -> the pointer to its directory; empty: it needs none."""
        self._named: dict[str, set[str]] = {}
        """Pointer -> the names in the directory that it leads to."""
        self._locks: dict[str, int] = {}
        """Pointer -> the descriptor that holds its lock; -1: it could not be made."""
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
        pointer = self._paths[path] = locked_names.pointer_path(path)
        if pointer:
            self._named.setdefault(pointer, set()).add(path)
            self._point(pointer, os.path.dirname(path))

    def _point(self, pointer: str, directory: str) -> None:
        if pointer not in self._locks:
            self._locks[pointer] = locked_names.make_pointer(pointer, directory)

    def disclaim(self, path: str) -> None:
        """Leave a name alone from now on: it belongs to another program, or was never made (idempotent)."""
        pointer = self._paths.pop(path, "")
        names = self._named.get(pointer)
        if names is None:
            return
        names.discard(path)
        if not names and self._unlock(pointer):
            _unlink(pointer)
            if names:  # another thread has made a name in between
                self._point(pointer, os.path.dirname(path))

    def _unlock(self, pointer: str) -> bool:
        fd = self._locks.pop(pointer, -1)
        if fd >= 0:
            os.close(fd)
        return fd >= 0

    def remove(self, path: str) -> None:
        """Remove a name and its claim (idempotent); the name need not exist."""
        _unlink(path)
        self.disclaim(path)

    def remove_all(self) -> None:
        """Remove every name of this process: it exits."""
        for path in [*self._paths]:
            self.remove(path)

    def disclaim_all(self) -> None:
        """Leave all names to the parent of a forked child, and draw none that could equal one of them."""
        self._paths.clear()
        self._stem, self._notebook = "", 0
        self._named.clear()
        for pointer in [*self._locks]:
            self._unlock(pointer)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # the supervisor or another program was quicker, or the directory was removed with it


process_names = OwnedNames()
"""The names of this process."""
atexit.register(process_names.remove_all)
os.register_at_fork(after_in_child=process_names.disclaim_all)
