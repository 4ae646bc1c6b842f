"""Waits of tests: for a condition, bounded; and for a promised time, which is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import pytest

WAIT_SECONDS = 15.0
"""How long a test waits for what happens soon on any machine."""
POLL_SECONDS = 0.002
"""Between two evaluations of a condition; arbitrary."""
GENEROUS_SECONDS = 4.0
"""What a shared machine may add to a promised time by scheduling alone."""
_T = TypeVar("_T")
Promised = Callable[[float], AbstractContextManager[None]]


def wait_until(condition: Callable[[], _T], what: object = None, *, seconds: float = WAIT_SECONDS) -> _T:
    """Evaluate `condition` until it holds, and return what it returned; fail the test if it takes too long.

    Parameters
    ----------
    condition : callable
        Holds when it returns something true.
    what : object, optional
        Shown by the failure; a callable is called for that.
    seconds : float
        The bound.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            shown = what() if callable(what) else what
            pytest.fail(f"not within {seconds:g} s" + ("" if shown is None else f": {shown}"))
        time.sleep(POLL_SECONDS)
    return found


@pytest.fixture
def promised(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Promised:
    """Return a context manager that measures what the library promises to do in time: ``promised(1.0)``.

    The measured time is a property of the test's report.  Repetitions (``--repeat``), but for those on a busy
    core, fail at the promise; a single run fails `GENEROUS_SECONDS` later.
    """
    options = request.config.option
    strict = options.repeat > 1 and not options.busy_core

    @contextmanager
    def within(seconds: float) -> Iterator[None]:
        begun = time.monotonic()
        yield
        took = time.monotonic() - begun
        record_property(f"seconds of {seconds:g} promised", round(took, 3))
        limit = seconds if strict else seconds + GENEROUS_SECONDS
        assert took < limit, f"took {took:.3f} s; {seconds:g} s are promised"

    return within
