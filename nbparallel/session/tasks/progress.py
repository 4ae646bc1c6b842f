"""ProgressBar: tqdm's own, in a notebook or a terminal; without tqdm a line that is written again."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from typing import Any

REFRESH_SECONDS = 1.0
"""After so long the time beside the bar moves on, though nothing else has."""


class ProgressBar:
    """How many of `total` items are done; owned by the thread that waits for them."""

    def __init__(self, total: int) -> None:
        self._shown, self._refreshed = 0, time.monotonic()
        self._bar: Any = None
        with self._warning():
            self._bar = make_bar(total)

    def show(self, done: int) -> None:
        """Show that so many are done, if it is more than before; what the front end raises ends the bar."""
        now = time.monotonic()
        with self._warning():
            if self._bar is not None and done > self._shown:
                self._bar.update(done - self._shown)
                self._shown, self._refreshed = done, now
            elif self._bar is not None and now - self._refreshed >= REFRESH_SECONDS:
                self._bar.refresh()
                self._refreshed = now

    def close(self) -> None:
        """Leave the bar as it is (idempotent)."""
        with self._warning():
            bar, self._bar = self._bar, None
            if bar is not None:
                bar.close()

    @contextlib.contextmanager
    def _warning(self) -> Any:
        try:
            yield
        except Exception as error:  # noqa: BLE001  a broken front end must not stop the ranks
            self._bar = None
            text = f"the progress is no longer shown ({type(error).__name__}: {error}); the ranks go on"
            warnings.warn(text, RuntimeWarning, stacklevel=4)


class _Line:
    """What stands where tqdm is not installed."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._written = total, 0, 0.0

    def update(self, more: int) -> None:
        self._done += more
        if self._done == self._total or time.monotonic() - self._written >= REFRESH_SECONDS:
            self._written = time.monotonic()
            sys.stderr.write(f"\r{self._done} of {self._total} items")
            sys.stderr.flush()

    def refresh(self) -> None:
        pass  # it shows no time

    def close(self) -> None:
        if self._written:
            sys.stderr.write("\n")


def make_bar(total: int) -> Any:
    """Return a bar of tqdm, or a line of text where that is not installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _Line(total)
    # tqdm's monitor is a thread that outlives the bar, and refreshes what `show` refreshes by itself
    kind: Any = type("MapBar", (tqdm,), {"monitor_interval": 0})
    if not hasattr(tqdm, "_lock"):  # tqdm's own would be a semaphore for several processes
        kind.set_lock(threading.RLock())
    return kind(total=total)
