"""Names of segments that this process has made and not removed yet, and the record that they are its own.

With a session the supervisor removes what a process leaves behind, however it dies.  Without one, only the
process itself is there: the names it still has are removed when it exits.  After a ``kill -9`` without a
session, or of notebook and supervisor together, the names stay; the next session's sweep finds them, and the
owner record beside them (`wire.owners`) proves that no process needs them.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets

from nbparallel.wire import owners
from nbparallel.wire.identity import Process, process_of, this_process, this_world
from nbparallel.wire.owners import Owner
from nbparallel.wire.segments import NAME_PREFIX

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_TOKEN_LETTERS = 10
"""Length of a process's part of a name: 50 random bits."""


class OwnedNames:
    """Paths that one process has to remove, and the owner records beside them.

    Notes
    -----
    Thread-safe without a lock: finalizers remove names, and they may run within any other method.
    """

    def __init__(self) -> None:
        self._named: dict[str, set[str]] = {}
        """Owner record -> the names that it speaks for."""
        self._plain: set[str] = set()
        """Names of another form than ours: a user's own strategy made them."""
        self._token = ""
        self._serials = itertools.count(1)
        self._session: tuple[Process, Process] | None = None
        """The notebook and the supervisor, on a rank."""
        self._owner: Owner | None = None
        self._text = ""
        """The owner as its records spell it; empty until the first one is written."""

    def join_session(self, notebook: Process, supervisor: int) -> None:
        """Make names of a rank: the supervisor removes them as long as it or the notebook lives.

        Call it before the first name is made.
        """
        self._session, self._owner, self._text = (notebook, process_of(supervisor)), None, ""

    def draw(self) -> str:
        """Return an unused file name of at most 25 characters, which macOS allows.

        >>> len(process_names.draw()) <= 25, process_names.draw() == process_names.draw()
        (True, False)
        """
        if not self._token:
            self._token = "".join(secrets.choice(_ALPHABET) for _ in range(_TOKEN_LETTERS))
        token, number, letters = self._token, next(self._serials), ""
        while number:
            number, digit = divmod(number, 32)
            letters = _ALPHABET[digit] + letters
        return f"{NAME_PREFIX}{token}_{letters}"

    def change_token(self) -> None:
        """Draw later names anew: a session that ends removes the record of those it knows."""
        self._token = ""

    def claim(self, path: str) -> None:
        """Record a name that is about to be made: it is removed at exit, and its owner record is written.

        Raises
        ------
        FileExistsError
            Another program's file has the record's name; the next `draw` returns a name with another record.
        OSError
            The directory cannot be written to.
        """
        record = owners.record_path(path)
        if not record:
            self._plain.add(path)
            return
        # Before the record is read: a thread that removes the last other name finds this one, and keeps it.
        names = self._named.setdefault(record, set())
        names.add(path)
        try:
            if not self._is_written(record):
                owners.write(record, self._this_owner())
        except FileExistsError:
            if self._is_written(record):
                return  # a child that was forked just before has written it for us
            names.discard(path)  # and leave the record alone: it is not ours
            self.change_token()
            raise
        except BaseException:
            self.disclaim(path)
            raise

    def disclaim(self, path: str) -> None:
        """Leave a name alone from now on: it belongs to another program, or was never made (idempotent)."""
        self._plain.discard(path)
        record = owners.record_path(path)
        names = self._named.get(record)
        if names is None or path not in names:
            return
        names.discard(path)
        if names:
            return
        owners.remove(record)
        if names:
            # Another thread has made a name in between.
            try:
                owners.write(record, self._this_owner())
            except OSError:
                pass  # the name is still removed by all but a sweep

    def remove(self, path: str) -> None:
        """Remove a name and its claim (idempotent); the name need not exist."""
        try:
            os.unlink(path)
        except OSError:
            pass  # the supervisor or another program was quicker, or the directory was removed with it
        self.disclaim(path)

    def remove_all(self) -> None:
        """Remove every name of this process: it exits."""
        for path in [*self._plain, *(path for names in self._named.values() for path in names)]:
            self.remove(path)

    def disclaim_all(self) -> None:
        """Leave all names to the parent of a forked child, and draw none that could equal one of them."""
        self._named.clear()
        self._plain.clear()
        self._token, self._session, self._owner, self._text = "", None, None, ""

    def _is_written(self, record: str) -> bool:
        """Return whether our record exists, as it nearly always does; called for every name."""
        try:
            return bool(self._text) and os.readlink(record) == self._text
        except OSError:
            return False

    def _this_owner(self) -> Owner:
        owner = self._owner
        if owner is None:
            me = this_process()
            if self._session is None:
                owner = Owner(this_world(), me, (me,))
            else:
                notebook, supervisor = self._session
                owner = Owner(this_world(), notebook, (me, supervisor))
            self._owner, self._text = owner, owner.text()
        return owner


process_names = OwnedNames()
"""The names of this process."""
atexit.register(process_names.remove_all)
os.register_at_fork(after_in_child=process_names.disclaim_all)
