"""The supervisor under which this process is, as far as messages need it.

A process takes part from its start by a `Process` of ours; a notebook, a script or a rank from its first
message or process.  One that was forked or started in another way takes no part: what it sends is copied.
"""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from typing import Any

_carried = threading.local()


def join_household() -> Any | None:
    """Return this process's membership, which begins now if need be; None where it cannot have one."""
    from nbparallel.errors import ForkedRankError
    from nbparallel.multiprocessing import household  # importing this package is cheap

    try:
        return household.membership()
    except ForkedRankError:
        return None


def current_membership() -> Any | None:
    """Return this process's membership, if it has one."""
    household = sys.modules.get("nbparallel.multiprocessing.household")
    return None if household is None else household.current_membership()


def supervised() -> AbstractContextManager[None]:
    """Return a context in which a lost channel is a `SupervisorDiedError`."""
    from nbparallel.multiprocessing import household

    return household.supervised()


class CarriedMailboxes:
    """Collects the mailboxes whose reading ends are pickled in this thread while it is in use."""

    def __enter__(self) -> list[int]:
        self._outer = getattr(_carried, "mailboxes", None)
        found: list[int] = []
        _carried.mailboxes = found
        return found

    def __exit__(self, *_: object) -> None:
        _carried.mailboxes = self._outer


def note_carried(mailbox: int) -> None:
    """Note that the reading end of a mailbox was pickled."""
    found: list[int] | None = getattr(_carried, "mailboxes", None)
    if found is not None:
        found.append(mailbox)


class PrivateStore:
    """What to pickle with where no array is shared: every array is copied into the message."""

    rights_changes = 0

    def handle(self, x: Any, *, broker: Any = None, writable: bool | None = False) -> None:
        """Return None: no array can be sent by handle."""

    def location(self, x: object) -> None:
        """Return None: no array is shared."""


def introduce_guest(*, daemon: bool) -> Any | None:
    """Return what a process that is about to be started is given; None where this one takes no part."""
    from nbparallel.errors import ForkedRankError
    from nbparallel.multiprocessing import household

    try:
        return household.introduce_guest(daemon=daemon)
    except ForkedRankError:
        return None
