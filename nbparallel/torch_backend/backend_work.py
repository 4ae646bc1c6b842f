"""What the operations of the backend return to torch.

A collective with ``async_op=True`` is *deferred*: it runs when it is waited for, before the next operation
that blocks, or when the cell ends, in the order in which the program has begun them.  So all ranks run them
alike, whichever of them waits first, and by the algorithms of operations that block; no thread makes progress
behind the user's back.  torch's DistributedDataParallel asks for a future of each bucket of gradients, which
runs its reduction there, in the middle of the backward pass.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from torch.distributed import Work
from torch.futures import Future

from nbparallel.distributed import Communicator
from nbparallel.distributed.work import Work as Operation
from nbparallel.errors import StaleWorkError

NO_TIME = datetime.timedelta(0)
"""What torch's C++ code passes for no time-out."""


class BackendWork(Work):
    """An operation that has ended; the base of those that have not.

    Parameters
    ----------
    value : list of tensors
        What it fills.
    """

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self._value = value

    def wait(self, timeout: datetime.timedelta = NO_TIME) -> bool:
        """Return True when the operation has ended; it can be called again."""
        return True

    def synchronize(self) -> None:
        """Do the same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, immediately."""
        return True

    def is_success(self) -> bool:
        """Return whether the operation has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of an operation that has failed, else None."""
        return None

    def result(self) -> Any:
        """Wait, and return the tensors that were filled."""
        self.wait()
        return self._value

    def source_rank(self) -> int:
        """Return the place in the group of a message's sender; -1 for anything but a receive."""
        return -1

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """Return a future of the tensors; it is completed.

        torch's futures wait in C++ code, where nothing could make progress, and no interrupt would end it.
        """
        future: Any = Future()
        future.set_result(self.result())
        return future


DONE = BackendWork()
"""Of an operation that has filled what the caller has."""


class MessageWork(BackendWork):
    """A message under way.

    Parameters
    ----------
    operation : Work of nbparallel.distributed
        What was begun.
    timeout : float or None
        The group's, in seconds.
    place : callable
        Returns a rank's place in the group.
    """

    def __init__(
        self, operation: Operation, value: Any, timeout: float | None, place: Callable[[int], int]
    ) -> None:
        super().__init__(value)
        self._operation, self._timeout, self._place = operation, timeout, place

    def wait(self, timeout: datetime.timedelta = NO_TIME) -> bool:
        """Return True when it has arrived.

        Raises
        ------
        NbParallelError
            As `nbparallel.distributed.recv`; after a time-out it can be called again.
        """
        if not self._operation.done:
            Deferred.run_all()
        return self._operation.wait(timeout.total_seconds() if timeout > NO_TIME else self._timeout)

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, immediately."""
        return self._operation.is_completed()

    def exception(self) -> BaseException | None:
        """Return its error, if it has failed."""
        return self._operation.exception()

    def source_rank(self) -> int:
        """Wait, and return the place of the sender in the group."""
        self.wait()
        return self._place(self._operation.source_rank())


deferred: deque[Deferred] = deque()
"""Collectives of this process that were begun and have not run, in the order in which they were begun."""


class Deferred(BackendWork):
    """A collective that was begun, and runs later."""

    _turn: ClassVar[threading.RLock] = threading.RLock()
    """Of the thread that runs them: another one that waits for the same work waits for it."""

    def __init__(self, run: Callable[[], None], value: Any, communicator: Communicator) -> None:
        super().__init__(value)
        self._run: Callable[[], None] | None = run
        self._error: BaseException | None = None
        if not deferred:
            communicator.at_end(Deferred.run_all, Deferred.drop_all)
        deferred.append(self)

    def wait(self, timeout: datetime.timedelta = NO_TIME) -> bool:
        """Run what was begun up to this operation; return True.

        Raises
        ------
        NbParallelError
            As the operation itself, of `nbparallel.distributed`.
        """
        if self._run is not None:
            with self._turn:
                while self._run is not None:
                    self._run_next()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Run what was begun up to this operation; return True: nothing goes on behind the user's back."""
        try:
            self.wait()
        except Exception:  # noqa: BLE001  `wait` raises it again
            return True
        return True

    def exception(self) -> BaseException | None:
        """Return its error, if it has failed."""
        return self._error

    @classmethod
    def run_all(cls) -> None:
        """Run what was begun."""
        if deferred:
            with cls._turn:
                while deferred:
                    cls._run_next()

    @classmethod
    def drop_all(cls) -> None:
        """Forget what was begun: its cell has failed."""
        while deferred:
            work = deferred.popleft()
            work._run, work._error = None, StaleWorkError("it was begun in a cell that has failed since")

    @classmethod
    def _run_next(cls) -> None:
        work = deferred.popleft()
        assert work._run is not None, "what is in the queue has not run"
        try:
            work._run()
        except Exception as error:
            work._error = error
            raise
        except BaseException:  # an interrupt: of that cell, not of one that waits later
            work._error = StaleWorkError("its cell was interrupted while it ran")
            raise
        finally:
            work._run = None  # after it: `wait` of another thread looks here
