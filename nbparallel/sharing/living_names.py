"""Names of segments that this process has made and not removed yet.

With a session the supervisor removes what a process leaves behind, however it dies.  Without one, nobody
but the process itself is there: what it still has goes when it exits.  (After a ``kill -9`` without a session
the names stay; the next sweep finds them.)
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets

from nbparallel.wire.segments import NAME_PREFIX

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_TOKEN_LETTERS = 10
"""50 random bits tell this process's names from all others'."""

_paths: set[str] = set()
_token = ""
_serials = itertools.count(1)


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


def remember(path: str) -> None:
    """Have a name removed when this process exits."""
    _paths.add(path)


def forget(path: str) -> None:
    """Leave a name alone from now on: it turned out to be another's."""
    _paths.discard(path)


def remove(path: str) -> None:
    """Remove a name; one that is gone, or was never made, is fine."""
    try:
        os.unlink(path)
    except OSError:
        pass  # the supervisor or somebody else was quicker, or the directory went away with it
    _paths.discard(path)


def _remove_all() -> None:
    for path in list(_paths):
        remove(path)


def _forget_in_child() -> None:
    """Leave the parent's names alone, and make none that could meet them."""
    global _token
    _paths.clear()
    _token = ""


atexit.register(_remove_all)
os.register_at_fork(after_in_child=_forget_in_child)
