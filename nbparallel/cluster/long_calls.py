"""Calls that take long, side by side, which an interrupt does not wait for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Self

from nbparallel.errors import StartError
from nbparallel.session.interrupts import InterruptCounter

MOST_SECONDS = 180.0
"""Bound for all of them; each has shorter ones, unless its host has stopped."""
SLICE_SECONDS = 0.1
"""Between two looks whether the user has interrupted."""


class LongCalls:
    """Calls that take long, each in a thread; the block ends with them, or raises what the first one raised.

    An interrupt raises soon; what a call makes afterwards it has to end itself.
    """

    def __init__(self, interrupts: InterruptCounter) -> None:
        self._interrupts = interrupts
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._count, self._deadline = 0, time.monotonic() + MOST_SECONDS
        self.abandoned = False
        """Whether no caller waits for the calls any more."""

    def begin(self, call: Callable[[], object]) -> None:
        """Begin a call."""
        self._count += 1
        threading.Thread(target=self._perform, args=(call,), name="nbparallel-call", daemon=True).start()

    def _perform(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  the block raises it
            self._done.put(error)
        else:
            self._done.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for _call in range(self._count):
                if (error := self._await_one()) is not None:
                    raise error
        except BaseException:
            self.abandoned = True
            raise

    def _await_one(self) -> BaseException | None:
        while time.monotonic() < self._deadline:
            self._interrupts.check()
            try:
                return self._done.get(timeout=SLICE_SECONDS)
            except queue.Empty:
                continue
        raise StartError(f"a host has not answered for {MOST_SECONDS:.0f} s while its ranks were to start")
