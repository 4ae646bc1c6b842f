"""Waits for a condition, with a bound: of tests, and of the programs and cells that they run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

WAIT_SECONDS = 15.0
"""How long a test waits for what happens soon on any machine."""
POLL_SECONDS = 0.002
"""Between two evaluations of a condition; arbitrary."""
_T = TypeVar("_T")


def wait_until(condition: Callable[[], _T], what: object = None, *, seconds: float = WAIT_SECONDS) -> _T:
    """Evaluate `condition` until it holds, and return what it returned.

    Parameters
    ----------
    condition : callable
        Holds when it returns something true.
    what : object, optional
        Shown by the error; a callable is called for that.
    seconds : float
        The bound.

    Raises
    ------
    AssertionError
        It does not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            shown = what() if callable(what) else what
            raise AssertionError(f"not within {seconds:g} s" + ("" if shown is None else f": {shown}"))
        time.sleep(POLL_SECONDS)
    return found
