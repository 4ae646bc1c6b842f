"""Work: the handle of an operation that was begun, to be waited for later.

The operation progresses whenever this rank waits in any operation, when it is polled (`is_completed`), and
when its cell ends; never in between, since a rank has one thread.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nbparallel.distributed.arguments import deadline
from nbparallel.distributed.runtime.call_site import CallSite
from nbparallel.errors import StaleWorkError


class Ticket:
    """A record of one work until the cell ends, without its value.

    Attributes
    ----------
    waited : bool
        Whether the user has waited for it, or polled it when it was completed.
    """

    call: str
    line: int
    site: CallSite
    waited: bool

    __slots__ = ("call", "line", "site", "waited")

    def __init__(self, call: str, line: int, site: CallSite) -> None:
        self.call, self.line, self.site, self.waited = call, line, site, False

    def __str__(self) -> str:
        return f"{self.call}{self.site.place(self.line)} was not waited for"


class Tickets:
    """The works that were begun in a cell, to report those that were not waited for."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self._limit = 256

    def add(self, work: Work) -> None:
        """Record a work."""
        self._tickets.append(work.ticket)
        if len(self._tickets) > self._limit:
            self._tickets = [ticket for ticket in self._tickets if not ticket.waited]
            self._limit = 2 * len(self._tickets) + 256

    def report(self) -> list[str]:
        """Forget all works; return a sentence for each that was not waited for."""
        tickets, self._tickets = self._tickets, []
        return [str(ticket) for ticket in tickets if not ticket.waited]


class Work:
    """One operation under way; `isend` and `irecv` return it, and collectives with ``async_op=True``.

    Notes
    -----
    Buffers belong to the operation until it is completed.  Work that was never waited for is reported at the
    end of the cell.
    """

    call: str
    line: int
    ticket: Ticket
    done: bool

    def __init__(self, call: str, site: CallSite) -> None:
        self.call, self.line = call, site.line()
        self.ticket = Ticket(call, self.line, site)
        self.done = False
        self._value: Any = None
        self._source = -1
        self._error: BaseException | None = None
        self._push: Callable[[int | None, bool], None] = _nothing

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "completed" if self.done else "under way"
        return f"<Work {self.call}{self.ticket.site.place(self.line)}: {state}>"

    # -- what users call -------------------------------------------------------------------------------

    def wait(self, timeout: float | datetime.timedelta | None = None) -> bool:
        """Return True when the operation is completed (idempotent).

        Raises
        ------
        CollectiveTimeoutError
            The wait timed out; it can be repeated.
        StaleWorkError
            The cell in which it was begun has ended.
        CollectiveMismatchError, DeadlockError, PeerFailedError
            As the operation itself.
        """
        self.ticket.waited = True
        if not self.done:
            self._push(deadline(timeout), True)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, immediately."""
        if not self.done:
            self._push(None, False)
        self.ticket.waited = self.ticket.waited or self.done
        return self.done

    def result(self) -> Any:
        """Wait, and return what the operation itself would have returned; None for `isend`."""
        self.wait()
        return self._value

    def is_success(self) -> bool:
        """Return whether the operation is completed, and without an error."""
        return self.is_completed() and self._error is None

    def synchronize(self) -> None:
        """Wait, as `wait` does; torch's name for work on another device."""
        self.wait()

    def get_future(self) -> Any:
        """Wait, and return a completed ``torch.futures.Future`` with the list of what was filled.

        It waits because the operation progresses only then: a future that something waits for elsewhere
        would never be completed.  It raises what `wait` raises.  torch must have been imported.
        """
        torch = sys.modules.get("torch")
        if torch is None:
            raise RuntimeError(
                "get_future returns a torch.futures.Future, and torch is not imported: use result()"
            )
        value, future = self.result(), torch.futures.Future()
        future.set_result(value if isinstance(value, list) else [value])
        return future

    def source_rank(self) -> int:
        """Wait, and return the rank whose message was received; -1 for anything but `irecv`."""
        self.wait()
        return self._source

    def exception(self) -> BaseException | None:
        """Return the error of an operation that failed, None of one that did not or is under way."""
        return self._error

    # -- what operations call --------------------------------------------------------------------------

    def begin(self, push: Callable[[int | None, bool], None]) -> Work:
        """Set how the operation progresses, ``push(deadline_ns, wait)``; returns this."""
        self._push = push
        return self

    def finish(self, value: Any = None, source: int = -1) -> None:
        """Complete it."""
        self._value, self._source, self.done = value, source, True
        self._push = _nothing

    def fail(self, error: BaseException) -> None:
        """Complete it by an error."""
        if not self.done:
            self._error = error
            self.finish()

    def drop(self) -> None:
        """End it with its cell."""
        place = self.ticket.site.place(self.line)
        self.fail(StaleWorkError(f"{self.call}{place} was begun in a cell that has ended since"))


def combined_work(works: Sequence[Work], call: str, site: CallSite) -> Work:
    """Return one work for several that were begun; its result is the list of theirs."""
    whole = Work(call, site)
    for work in works:
        work.ticket.waited = True  # `whole` is reported instead

    def push(deadline_ns: int | None, wait: bool) -> None:
        for work in works:
            work._push(deadline_ns, wait)
        errors = [work._error for work in works if work._error is not None]
        if errors:
            whole.fail(errors[0])
        elif all(work.done for work in works):
            whole.finish([work._value for work in works])

    return whole.begin(push)


def _nothing(deadline_ns: int | None, wait: bool) -> None:
    """Do nothing: the operation is completed."""
