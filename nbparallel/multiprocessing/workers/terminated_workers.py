"""Workers of a pool that is terminated: what does not end at SIGTERM is killed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

GRACE_SECONDS = 5.0
"""From SIGTERM to SIGKILL, as a rank has after an interrupt."""


class TerminatedWorkers(Sequence[Any]):
    """A pool's workers, as the library's `Pool` ends them, with a limit on each wait.

    A worker can miss its SIGTERM: a handler that was inherited from the parent ignores it, or raises where
    Python drops exceptions (in a callback after fork).  The library would wait for its end forever.

    Parameters
    ----------
    workers : list of Process
        The pool's own list, which changes until no worker is replaced any more.
    """

    def __init__(self, workers: list[Any]) -> None:
        self._workers = workers

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return one as it is ended, or several."""
        if isinstance(index, slice):
            return TerminatedWorkers(self._workers[index])
        return _Terminated(self._workers[index])

    def __len__(self) -> int:
        """Return their number."""
        return len(self._workers)


class _Terminated:
    """One of them: what the library uses of it."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid, self.terminate, self.is_alive = process.pid, process.terminate, process.is_alive

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def join(self) -> None:
        """Wait for its end, and kill it after a time."""
        self._process.join(GRACE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
