"""Event loop: the one thread of a session, which reads everything that ranks and supervisor send."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from nbparallel.session.processes.refusals import as_start_error
from nbparallel.wire.system import ready


class EventLoop:
    """A poll loop in a daemon thread.

    Notes
    -----
    `watch` and `call_soon` may be called from any thread, the others only from callbacks, which run in the
    loop's thread.  While nothing is due it sleeps without a time-out: an idle session costs no CPU.
    """

    def __init__(self, name: str, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._poll = select.poll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: dict[Callable[[], None], float] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        with as_start_error("an eventfd"):
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.POLLIN)

    def start(self) -> None:
        """Start the thread; `StartError` if the system refuses it."""
        with as_start_error("a thread"):
            self._thread.start()

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `fd` is readable or at its end, instead of an earlier one."""
        self.call_soon(lambda: self._register(fd, callback))

    def _register(self, fd: int, callback: Callable[[], None]) -> None:
        self._callbacks[fd] = callback
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`; only from a callback (idempotent)."""
        if self._callbacks.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run `function` in the loop's thread, after the callbacks that are due."""
        self._calls.append(function)
        os.eventfd_write(self._wake, 1)

    def call_at(self, due: float, function: Callable[[], None]) -> None:
        """Run `function` at `due` (`time.monotonic`), or earlier if it was due earlier."""
        self._timers[function] = min(due, self._timers.get(function, due))

    def _run(self) -> None:
        while not self._stopping:
            timeout = None
            if self._timers:
                timeout = max(0.0, (min(self._timers.values()) - time.monotonic()) * 1000)
            for fd, _ in ready(self._poll, timeout):
                if fd == self._wake:
                    self._drain_wake()
                else:
                    callback = self._callbacks.get(fd)
                    if callback is not None:
                        self._guard(callback)
            while self._calls:
                self._guard(self._calls.popleft())
            now = time.monotonic()
            for function in [function for function, due in self._timers.items() if due <= now]:
                del self._timers[function]
                self._guard(function)

    def _guard(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:  # noqa: BLE001  one bad callback must not end the thread: all would hang
            self._on_error(error)

    def _drain_wake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass

    def stop(self) -> None:
        """End the thread and wait for it (idempotent)."""
        if self._stopping:
            return

        def end() -> None:
            self._stopping = True

        if self._thread.is_alive():
            self.call_soon(end)
            if threading.current_thread() is not self._thread:
                self._thread.join()
        self._stopping = True
        os.close(self._wake)
