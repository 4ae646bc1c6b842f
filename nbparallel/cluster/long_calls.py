"""Calls that take long, side by side, which an interrupt does not wait for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable

from nbparallel.errors import StartError
from nbparallel.session.interrupts import InterruptCounter

MOST_SECONDS = 180.0
"""Bound for all of them; each has shorter ones, unless its host has stopped."""
SLICE_SECONDS = 0.1
"""Between two looks whether the user has interrupted."""


def perform_calls(
    calls: Iterable[Callable[[], object]],
    interrupts: InterruptCounter,
    abandoned: threading.Event,
    seconds: float = MOST_SECONDS,
) -> None:
    """Perform calls, each in a thread; return when all have, or raise what the first one raised.

    An interrupt raises soon.  Then `abandoned` is set: what a call makes afterwards it has to end itself.
    """
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def perform(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  the caller raises it
            done.put(error)
        else:
            done.put(None)

    left, deadline = 0, time.monotonic() + seconds
    try:
        for call in calls:
            threading.Thread(target=perform, args=(call,), name="nbparallel-call", daemon=True).start()
            left += 1
        while left:
            interrupts.check()
            try:
                error = done.get(timeout=SLICE_SECONDS)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise StartError(f"a host has not answered for {seconds:.0f} s") from None
                continue
            if error is not None:
                raise error
            left -= 1
    except BaseException:
        abandoned.set()
        raise
