"""Where a rank looks for files and modules: where the notebook does, and where its user sent it besides.

As with names: a rank keeps what a cell changed there until the notebook changes it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from nbparallel.wire.messages import Place


def enter(place: Place) -> None:
    """Go where the notebook is; stay where we are, with a line on stderr, if that cannot be entered."""
    _change_directory(place.cwd)
    sys.path[:] = place.sys_path


def follow(before: Place, now: Place) -> tuple[str, ...]:
    """Follow the notebook from one place to another; return a line if a cell had gone elsewhere meanwhile."""
    notes: tuple[str, ...] = ()
    if now.cwd != before.cwd:
        if _directory() not in (before.cwd, now.cwd):
            notes = (f"the working directory is the notebook's again: {now.cwd}",)
        _change_directory(now.cwd)
    if now.sys_path != before.sys_path:
        sys.path[:] = merged(sys.path, before.sys_path, now.sys_path)
    return notes


def merged(mine: Sequence[str], before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return the notebook's path `now`, with what is ours beyond `before` around it.

    >>> merged(["own", "a", "b", "late"], before=["a", "b"], now=["c", "a"])
    ['own', 'c', 'a', 'late']
    """
    first = next((index for index, entry in enumerate(mine) if entry in before), len(mine))
    own = [entry for entry in mine[:first] if entry not in now]
    late = [entry for entry in mine[first:] if entry not in before and entry not in now]
    return [*own, *now, *late]


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _change_directory(path: str) -> None:
    try:
        os.chdir(path)
    except OSError as error:
        sys.stderr.write(f"nbparallel: the notebook's directory cannot be entered: {error}\n")
