"""The sessions of this process: all of them stop at its end, and one of them is meant where none is named."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from typing import Any

from nbparallel.wire.system import do_all

RUNNING: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those whose ranks run."""
_notebook: Callable[[], tuple[Any, Any]] | None = None


@atexit.register
def _stop_all() -> None:
    """Stop sessions that the program left running; in a forked child `stop` does nothing."""
    do_all(*(session.stop for session in list(RUNNING)))


def use_notebook(notebook: Callable[[], tuple[Any, Any]] | None) -> None:
    """Have `current` return what this returns, which may make a session; None: there is no notebook."""
    global _notebook
    _notebook = notebook


def current() -> tuple[Any, Any]:
    """Return the notebook's `Session` with a new `OutputSink`, or the only one whose ranks run and None.

    Without a session both are None.

    Raises
    ------
    RuntimeError
        There are several.
    """
    if _notebook is not None:
        return _notebook()
    found = list(RUNNING)
    if len(found) > 1:
        raise RuntimeError(
            f"{len(found)} sessions are running here, and any of them could be meant: call the method of "
            "one, as in session.map(function, items)"
        )
    return found[0] if found else None, None
