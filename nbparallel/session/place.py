"""Where this process looks for files and modules; ranks follow it with their next task."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from nbparallel.session.processes.rank_handle import RankHandle
from nbparallel.wire.frames import Kind
from nbparallel.wire.messages import Place


def place_here() -> Place:
    """Return this process's working directory, or the root if that was removed, and search path."""
    return Place(_directory() or "/", _path())


def tell_place(handles: Iterable[RankHandle]) -> None:
    """Tell ranks where this process is now, if it has moved since they heard of it."""
    directory, path = _directory(), _path()
    for handle in handles:
        told = handle.told_place
        # A directory that was removed is nowhere to go: who was there as well stays there as well.
        here = Place(directory or (told.cwd if told is not None else "/"), path)
        if told != here:
            handle.told_place = here
            handle.send(Kind.PLACE, here)


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _path() -> tuple[str, ...]:
    return tuple(str(entry) for entry in sys.path)  # some put a `Path` there
