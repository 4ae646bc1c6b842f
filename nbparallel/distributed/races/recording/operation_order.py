"""Events of a rank in a checked cell: what it publishes and acquires, in program order; its locks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from nbparallel.distributed.races.access_log import (
    READ,
    WRITE,
    Acquire,
    BroadcastArray,
    Key,
    MemoryAccess,
    Publish,
)
from nbparallel.distributed.slots.lock_table import LockTable

Event = Publish | Acquire


class AccessObserver(Protocol):
    """What the recorder of accesses offers to operations."""

    def read(self, array: Any) -> None:
        """Record that all elements are read."""

    def write(self, array: Any) -> None:
        """Record that all elements are written."""

    def next_interval(self) -> None:
        """Have what follows belong to the next interval of this rank."""

    def access_to(self, array: Any, kind: int) -> MemoryAccess | None:
        """Return an access to all elements, which is not recorded; None: the memory is private."""


class OperationOrder:
    """The events of one rank in a checked cell, and the arrays that operations under way fill.

    Attributes
    ----------
    events : list of Publish and Acquire
        In program order; each ends an interval.
    broadcasts : list of BroadcastArray
        Arrays in shared memory that were passed to one.
    interval_ended : callable
        Called at the end of each interval.
    """

    def __init__(self, recorder: AccessObserver) -> None:
        self.recorder = recorder
        self.events: list[Event] = []
        self.broadcasts: list[BroadcastArray] = []
        self.interval_ended: Callable[[], None] = _nothing
        self._pending: list[list[Any]] = []

    def publish(self, key: Key) -> None:
        """End an interval: those that acquire the key come after it."""
        self._add(Publish(key))

    def acquire(self, keys: Iterable[Key]) -> None:
        """End an interval: what follows is after all that was published under the keys."""
        self._add(Acquire(tuple(keys)))

    def _add(self, event: Event) -> None:
        self._touch()
        self.events.append(event)
        self.recorder.next_interval()
        self.interval_ended()
        self._touch()

    def _touch(self) -> None:
        """Record what operations under way fill: they may, in each interval until they were waited for."""
        for arrays in self._pending:
            for array in arrays:
                self.recorder.write(array)

    def broadcast(self, key: Key, array: Any, *, is_root: bool) -> None:
        """Record an array that is passed to a broadcast; the kernel knows whether it is the root's."""
        access = self.recorder.access_to(array, READ if is_root else WRITE)
        if access is not None:
            self.broadcasts.append(BroadcastArray(key, is_root, access))

    def begin_filling(self, arrays: list[Any]) -> Callable[[], None]:
        """Record writes of arrays from now on, until the function that is returned is called."""
        self._pending.append(arrays)

        def end() -> None:
            self._touch()
            self._pending[:] = [other for other in self._pending if other is not arrays]

        return end


class OrderedLocks:
    """A rank's locks for the time of a checked cell: a release comes before the next acquisition.

    Whose turn came after whose the kernel finds by the times of the acquisitions, which are of one clock for
    all ranks: between two of them lies a release, so that they cannot be out of order.
    """

    def __init__(self, table: LockTable, order: OperationOrder, rank: int) -> None:
        self._table, self._order, self._rank = table, order, rank
        self._turns: Counter[str] = Counter()
        self._held: dict[str, int] = {}
        """Name -> the token of the call that took it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def acquire(self, name: str, deadline_ns: int | None, token: int) -> Any:
        """As `LockTable.acquire`."""
        abandoned = self._table.acquire(name, deadline_ns, token)
        self._turns[name] += 1
        turn = ("lock", name, self._rank, self._turns[name])
        self._order.acquire([("turn", *turn, time.monotonic_ns())])
        self._held[name] = token
        return abandoned

    def release(self, name: str) -> None:
        """As `LockTable.release`."""
        self._publish(name)
        self._table.release(name)

    def withdraw(self, token: int) -> None:
        """As `LockTable.withdraw`: a release, of what that call has taken."""
        for name in [name for name, held in self._held.items() if held == token]:
            self._publish(name)
        self._table.withdraw(token)

    def _publish(self, name: str) -> None:
        if self._held.pop(name, None) is not None:
            self._order.publish(("lock", name, self._rank, self._turns[name]))


def _nothing() -> None:
    """Do nothing."""
