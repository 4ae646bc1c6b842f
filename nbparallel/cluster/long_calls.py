"""Calls that take long, side by side, which an interrupt does not wait for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping

from nbparallel.errors import StartError
from nbparallel.session.interrupts import InterruptCounter

MOST_SECONDS = 180.0
"""Bound for all of them; each has shorter ones, unless its host has stopped."""
SLICE_SECONDS = 0.1
"""Between two looks whether the user has interrupted."""


def perform_calls(
    calls: Mapping[str, Callable[[], object]],
    interrupts: InterruptCounter,
    abandoned: threading.Event,
    seconds: float | None = None,
) -> None:
    """Perform calls, each in a thread; return when all have, or raise what the first one raised.

    An interrupt raises soon.  Then `abandoned` is set: what a call makes afterwards it has to end itself.
    `StartError` names those that have not returned in time: the names are what each waits for.
    """
    done: queue.SimpleQueue[tuple[str, BaseException | None]] = queue.SimpleQueue()

    def perform(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  the caller raises it
            done.put((name, error))
        else:
            done.put((name, None))

    seconds = MOST_SECONDS if seconds is None else seconds
    left, deadline = set(calls), time.monotonic() + seconds
    try:
        for job in calls.items():
            threading.Thread(target=perform, args=job, name="nbparallel-call", daemon=True).start()
        while left:
            interrupts.check()
            try:
                name, error = done.get(timeout=SLICE_SECONDS)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise StartError(f"no answer for {seconds:g} s: {', '.join(sorted(left))}") from None
                continue
            if error is not None:
                raise error
            left.remove(name)
    except BaseException:
        abandoned.set()
        raise
