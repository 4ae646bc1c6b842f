"""Modules that a rank has imported, and whose files the user has edited since."""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType

from nbparallel.distributed.runtime.call_site import is_library

_AUTORELOAD = "IPython.extensions.autoreload"


class EditedModules:
    """The user's modules that this rank has imported, of which it says when their files were edited since.

    Parameters
    ----------
    share : float
        The part of all time that looks at files may take: each task has one with a few files, with hundreds
        the next is some tenths of a second away.
    """

    def __init__(self, share: float = 0.02) -> None:
        self._share, self._next_look = share, 0.0
        self._looked_at: set[str] = set()
        self._seen: dict[str, tuple[object, str, tuple[int, int] | None]] = {}
        """By name: the module's spec, which reloading replaces, its file, and what an edit changes of it."""

    def describe(self, *, magics: bool) -> tuple[str, ...]:
        """Return a line about modules that were edited, once for each edit; `magics`: whether to advise them.

        The notebook may have reloaded such a module, by ``%autoreload`` too, which ranks do not follow.
        """
        now = time.monotonic()
        if now < self._next_look or _AUTORELOAD in sys.modules:  # it reloads here as well
            return ()
        if len(sys.modules) != len(self._looked_at):
            modules = sys.modules.copy()  # another thread may import
            for name in modules.keys() - self._looked_at:
                if file := _users_file(modules[name]):
                    self._seen[name] = (_spec(modules[name]), file, _stamp(file))
            self._looked_at = set(modules)
        if not self._seen:  # as for most: an empty cell's processor time is 1 % less
            return ()
        edited, began = [], time.thread_time()
        for name, (spec, file, stamp) in self._seen.items():
            seen = _spec(sys.modules.get(name)), file, _stamp(file)
            if (seen[2] is not None and seen[2] != stamp) or seen[0] is not spec:
                self._seen[name] = seen
                if seen[0] is spec:
                    edited.append(name)
        self._next_look = now + (time.thread_time() - began) / self._share
        if not edited:
            return ()
        names, (be, them) = ", ".join(edited), ("is", "it") if len(edited) == 1 else ("are", "them")
        code = "; ".join([f"import importlib, {names}", *(f"importlib.reload({name})" for name in edited)])
        restart = "`%parallel_restart`" if magics else "`restart()` of the session"
        return (
            f"{names} {be} still the old code on this rank, which imported {them} before the last edit: "
            f"`{code}` in a cell for ranks brings the new code; {restart} does for what was imported from "
            f"{them}, too",
        )


def _spec(module: object) -> object:
    return vars(module).get("__spec__") if type(module) is ModuleType else None


def _users_file(module: object) -> str:
    """Return the file of a module that is neither Python's, nor installed, nor this package's; or nothing."""
    if type(module) is not ModuleType or module.__name__.partition(".")[0].startswith("nbparallel"):
        return ""
    file = vars(module).get("__file__")
    if type(file) is not str or not file.endswith(".py") or is_library(file):
        return ""
    return file


def _stamp(file: str) -> tuple[int, int] | None:
    """Return what an edit changes, whatever the clock says; None of a file that is not there."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
