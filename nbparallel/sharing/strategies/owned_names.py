"""Names of segments that this process has made and not removed yet, and the record that they are its own.

With a session the supervisor removes what a process leaves behind, however it dies.  Without one, nobody
but the process itself is there: what it still has goes when it exits.  After a ``kill -9`` without a session,
or of notebook and supervisor at once, the names stay; the next session's sweep finds them, and the owner
record beside them (`wire.owners`) proves that nobody needs them.

Nothing here locks: a name is removed by finalizers, which may run within anything else here.
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
"""50 random bits tell this process's names from all others'."""

_named: dict[str, set[str]] = {}
"""Owner record -> the names that it speaks for."""
_plain: set[str] = set()
"""Names that are not made as ours are: a user's own strategy."""
_token = ""
_serials = itertools.count(1)
_session: tuple[Process, Process] | None = None
_owner: Owner | None = None
_text = ""


def belong_to(notebook: Process, supervisor: int) -> None:
    """Say that this process is a rank: the supervisor takes care of its names, as long as one of them lives.

    Call it before the first name is made.
    """
    global _session, _owner, _text
    _session, _owner, _text = (notebook, process_of(supervisor)), None, ""


def fresh() -> str:
    """Return a file name that nobody has used: at most 25 characters, which macOS allows.

    >>> len(fresh()) <= 25, fresh() == fresh()
    (True, False)
    """
    global _token
    if not _token:
        _token = "".join(secrets.choice(_ALPHABET) for _ in range(_TOKEN_LETTERS))
    number, letters = next(_serials), ""
    while number:
        number, digit = divmod(number, 32)
        letters = _ALPHABET[digit] + letters
    return f"{NAME_PREFIX}{_token}_{letters}"


def renew() -> None:
    """Call later names differently: a session that ends removes the record of those it knows."""
    global _token
    _token = ""


def remember(path: str) -> None:
    """Have a name removed when this process exits, and its record lie beside it; then make it.

    Raises
    ------
    FileExistsError
        Somebody else's file is where the record should be; the next `fresh` name has another one.
    OSError
        The directory cannot be written to.
    """
    record = owners.record_path(path)
    if not record:
        _plain.add(path)
        return
    # Before the record is looked at: who removes the last other name sees this one, and leaves the record.
    names = _named.setdefault(record, set())
    names.add(path)
    try:
        if not _lies_at(record):
            owners.write(record, _this_owner())
    except FileExistsError:
        if _lies_at(record):
            return  # a child that was forked just before has written it for us
        names.discard(path)  # and leave the record alone: it is not ours
        renew()
        raise
    except BaseException:
        forget(path)
        raise


def forget(path: str) -> None:
    """Leave a name alone from now on: it turned out to be another's, or was never made."""
    _plain.discard(path)
    record = owners.record_path(path)
    names = _named.get(record)
    if names is None or path not in names:
        return
    names.discard(path)
    if names:
        return
    owners.remove(record)
    if names:
        # Another thread has made a name meanwhile.
        try:
            owners.write(record, _this_owner())
        except OSError:
            pass  # the name is still removed by everybody but a sweep


def remove(path: str) -> None:
    """Remove a name; one that is gone, or was never made, is fine."""
    try:
        os.unlink(path)
    except OSError:
        pass  # the supervisor or somebody else was quicker, or the directory went away with it
    forget(path)


def _lies_at(record: str) -> bool:
    """Return whether the record is there, as it nearly always is; asked for every name, so it is quick."""
    try:
        return bool(_text) and os.readlink(record) == _text
    except OSError:
        return False


def _this_owner() -> Owner:
    global _owner, _text
    if _owner is None:
        me = this_process()
        head, processes = (me, (me,)) if _session is None else (_session[0], (me, _session[1]))
        _owner = Owner(this_world(), head, processes)
        _text = _owner.text()
    return _owner


def _remove_all() -> None:
    for path in [*_plain, *(path for names in _named.values() for path in names)]:
        remove(path)


def _forget_in_child() -> None:
    """Leave the parent's names alone, and make none that could meet them."""
    global _token, _session, _owner, _text
    _named.clear()
    _plain.clear()
    _token, _session, _owner, _text = "", None, None, ""


atexit.register(_remove_all)
os.register_at_fork(after_in_child=_forget_in_child)
