"""Locks between ranks: parts of the program that one rank at a time runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Self

from nbparallel.distributed.api.operation_base import OperationBase, Timeout, untraced
from nbparallel.distributed.arguments import deadline
from nbparallel.distributed.slots.lock_table import TOKENS, LockTable


class NamedLock:
    """A lock that all ranks know by its name; `lock` returns one.

    Attributes
    ----------
    name : str
        Locks of one name are the same lock.
    abandoned : tuple of int
        The ranks that died with the lock held before this rank took it; usually empty.  What the lock
        protects may be half changed by them.  Only the next holder gets them, with a `RuntimeWarning`.

    Notes
    -----
    An object can be kept and used again, in later cells too.  A signal handler that raises in a block, or
    while the lock is taken or released, leaves it free; Python cannot guard the first instruction of
    `__exit__`, and then a lock whose object was kept is released at the end of the cell.
    """

    name: str

    __slots__ = ("_find", "_timeout", "_token", "abandoned", "name")

    def __init__(self, name: str, timeout: Timeout, find: Callable[[], LockTable]) -> None:
        self._token = 0
        if not isinstance(name, str):
            raise TypeError(f"name must be a string that names the lock, not {type(name).__name__}")
        if not name:
            raise ValueError(
                'a lock needs a name, which its ranks have in common: `with dist.lock("counter"):`'
            )
        deadline(timeout)  # raises if it is none
        self.name, self._timeout, self._find = name, timeout, find
        self.abandoned: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<NamedLock {self.name!r}>"

    def acquire(self) -> bool:
        """Wait until no other rank holds the lock, and take it; returns True.

        Ranks get it in the order in which they call.

        Raises
        ------
        CollectiveTimeoutError
            The call timed out; the message names the holder.  Other operations work afterwards.
        DeadlockError
            The holder waits for this rank.
        RuntimeError
            This rank holds it already, or holds ten others.
        PeerFailedError
            A rank of the cell failed or died.
        """
        token = next(TOKENS)
        try:
            self._take(token)
        except BaseException:
            self._find().withdraw(token)  # a signal handler may raise when the lock is taken already
            raise
        return True

    def _take(self, token: int) -> None:
        abandoned = self._find().acquire(self.name, deadline(self._timeout), token)
        self.abandoned = tuple(lock.rank for lock in abandoned)
        if abandoned:  # a filter of the user's may make the warning an error
            self._warn([f"rank {lock.rank}, which took it on line {lock.line}" for lock in abandoned])

    def _warn(self, holders: list[str]) -> None:
        filename, line = self._find().call_place()
        warnings.warn_explicit(
            f"the lock {self.name!r} was held by {' and by '.join(holders)}, and died with it held: what the "
            "lock protects may be half changed",
            RuntimeWarning,
            filename,
            line,
        )

    def release(self) -> None:
        """Release the lock; the rank that has waited longest gets it.

        Raises
        ------
        RuntimeError
            This rank does not hold it.
        """
        self._find().release(self.name)

    def __enter__(self) -> Self:
        token = next(TOKENS)
        try:
            self._take(token)
            self._token = token
        except BaseException:
            self._find().withdraw(token)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.release()
        except BaseException:  # a handler may raise before it is released
            self._find().withdraw(self._token)
            raise
        self._token = 0

    def __del__(self) -> None:
        if self._token:  # a signal handler raised right before `__exit__`
            self._find().withdraw(self._token)


class Locks(OperationBase):
    """Operations in which ranks take turns."""

    locks: LockTable

    @untraced
    def lock(self, name: str = "", timeout: Timeout = None) -> NamedLock:
        """Return the lock of this name: ``with dist.lock("counter"): counter[0] += 1``.

        One rank at a time is inside the ``with`` block; the others wait in the order of their calls.  No
        other rank has to call it, and cells on some of the ranks can use it.

        Parameters
        ----------
        name : str
            Locks of one name are the same lock, for all ranks of the world.
        timeout : float or timedelta, optional
            Seconds to wait for it; by default without a limit.

        Returns
        -------
        NamedLock
            With `acquire` and `release`, and as a context manager.

        Raises
        ------
        CollectiveTimeoutError
            From the ``with`` statement: the call timed out; the message names the holder.
        DeadlockError
            From the ``with`` statement: the holder waits for this rank, in whatever operation.
        RuntimeError
            From the ``with`` statement: this rank holds the lock already.

        Notes
        -----
        A lock is released when its holder dies.  If the cell goes on, the next rank gets it; else the first
        that takes it in a later cell.  That rank gets a `RuntimeWarning`, and `NamedLock.abandoned` names the
        dead rank: what the lock protects may be half changed.  The next holder of a robust POSIX mutex gets
        the same (``pthread_mutexattr_setrobust(3)``).  A lock that is held at the end of its cell is
        released, and a line under the cell names it.

        Examples
        --------
        >>> with dist.lock("counter"):  # doctest: +SKIP
        ...     counter[0] += 1
        """
        return NamedLock(name, timeout, lambda: self.locks)
