"""Where this process looks for files and modules; ranks follow it with their next task."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from nbparallel.session.rank_handle import RankHandle
from nbparallel.wire.frames import Kind
from nbparallel.wire.messages import Place


def place_here() -> Place:
    """Return this process's working directory and search path."""
    try:
        directory = os.getcwd()
    except OSError:  # it was removed
        directory = "/"
    return Place(directory, tuple(str(entry) for entry in sys.path))  # some put a `Path` there


def tell_place(handles: Iterable[RankHandle]) -> None:
    """Tell ranks where this process is now, if it has moved since they heard of it."""
    here = place_here()
    for handle in handles:
        if handle.told_place != here:
            handle.told_place = here
            handle.send(Kind.PLACE, here)
