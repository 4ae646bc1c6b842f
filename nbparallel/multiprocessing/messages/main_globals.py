"""Globals of ``__main__`` that travel with its functions, and which of them the receiver takes.

A function of ``__main__`` is rebuilt over the receiver's own ``__main__``: an initializer and the tasks after
it see the same globals, as in a forked child.  What the function reads comes along.  The receiver

* binds a name that it lacks;
* binds it again when the sender's value has changed since it last came: a function that was defined anew;
* else keeps what it has: what an initializer has assigned stays.

A forked child has inherited everything, and nothing has come yet: there the sender's value is taken first if
what was inherited is still bound and cannot have been changed in place, as a function, a class or a number;
lists, dictionaries and arrays may have been filled by an initializer.  The process in which ``__main__`` was
run itself takes nothing that it has.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from nbparallel.errors import ProtocolError, UnpicklableError

_ORIGIN = {"fresh": False}
"""Whether this process began with an empty ``__main__``."""
_came: dict[str, bytes | int] = {}
"""Digest of the value that last came, by name."""
_UNCHANGING = (
    types.FunctionType, type, types.NoneType, bool, int, float, complex, str, bytes, tuple, frozenset, range
)  # fmt: skip
_inherited: list[Mapping[str, Any]] = []
"""What of these a forked child found in its ``__main__``, by name: at most one."""


def unchanging_globals() -> dict[str, Any]:
    """Return those of ``__main__`` that a child which is forked now inherits, and nothing changes in place.

    To be called in the parent: in the child it would copy the page of each value that it looks at.
    """
    found = vars(sys.modules["__main__"]).copy()  # in one step: other threads bind names
    return {name: value for name, value in found.items() if isinstance(value, _UNCHANGING)}


def mark_forked(inherited: Mapping[str, Any]) -> None:
    """Note that this process was forked from another, whose `unchanging_globals` it has."""
    _inherited[:] = [inherited]


def mark_fresh() -> None:
    """Note that this process was started by another, with an empty ``__main__``."""
    _ORIGIN["fresh"] = True


def join_message(body: bytes, parts: Mapping[str, bytes | str], digests: Mapping[str, bytes]) -> bytes:
    """Return one message of an object's and those of globals, with what their values are known by."""
    return pickle.dumps((body, dict(parts), dict(digests)), 5)


def split_message(data: bytes) -> tuple[bytes, dict[str, bytes | str], dict[str, bytes]]:
    """Return what `join_message` joined."""
    try:
        body, parts, digests = pickle.loads(data)
    except Exception as error:
        raise ProtocolError(f"a message between processes is damaged: {error}") from error
    return body, parts, digests


def bind_globals(
    parts: Mapping[str, bytes | str],
    digests: Mapping[str, bytes],
    main_globals: dict[str, Any],
    load: Callable[[str, bytes], Any],
) -> None:
    """Bind what this process takes of the globals that came along, all or none."""
    values: dict[str, Any] = {}
    came: dict[str, bytes | int] = {}
    for name, part in parts.items():
        if isinstance(part, str):
            if name not in main_globals:
                raise UnpicklableError(
                    f"a function that came here reads the global {name!r}, which cannot be sent: {part}; "
                    "give locks and queues to the process when it starts (args=, or initargs= and an "
                    f"initializer that assigns {name!r}), or create {name!r} there"
                )
            continue
        digest = digests.get(name) or hash(part)
        if _takes(name, digest, main_globals):
            values[name] = load(name, part)
        came[name] = digest
    main_globals.update(values)
    _came.update(came)


def _takes(name: str, digest: bytes | int, main_globals: dict[str, Any]) -> bool:
    if name not in main_globals:
        return True
    if name in _came:
        return _came[name] != digest
    if _inherited:
        return name in _inherited[0] and main_globals[name] is _inherited[0][name]
    return _ORIGIN["fresh"]


def bind_free_name(thing: Any, main_globals: dict[str, Any]) -> None:
    """Bind what came from ``__main__`` under its name if that is free, so that `pickle` finds it."""
    if _ORIGIN["fresh"] and getattr(thing, "__module__", None) == "__main__":
        name = getattr(thing, "__qualname__", ".")
        if "." not in name:
            main_globals.setdefault(name, thing)
