"""Locking: how every operation of a store begins and ends."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from nbparallel.errors import ForkedRankError

P = ParamSpec("P")
R = TypeVar("R")


class Repairable(Protocol):
    """State that an interrupted operation may leave inconsistent."""

    doubtful: bool
    """Whether an operation was interrupted since the last `repair`."""

    def repair(self) -> None:
        """Complete what interrupted operations left undone."""


class Lockable(Protocol):
    """What `locked` needs of the object whose methods it wraps."""

    _depth: int
    """How many operations are under way, one within another."""

    @property
    def _pid(self) -> int: ...

    @property
    def _lock(self) -> AbstractContextManager[bool]: ...

    @property
    def _table(self) -> Repairable: ...


L = TypeVar("L", bound=Lockable)


def forked_error(owner: int) -> ForkedRankError:
    """Return the error of a child that was forked from process `owner`."""
    return ForkedRankError(
        f"this process ({os.getpid()}) was forked from {owner}, which alone may share arrays; "
        "arrays that exist can be read here, results go back through a pipe or a file"
    )


def locked(method: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R]:
    """Refuse forked children, hold the lock, and repair what an interrupt left undone before."""

    @functools.wraps(method)
    def wrapper(self: L, /, *args: P.args, **keywords: P.kwargs) -> R:
        if os.getpid() != self._pid:
            raise forked_error(self._pid)
        with self._lock:
            # Not within another operation (a user's __del__ may call us there): it is half done.
            if self._table.doubtful and not self._depth:
                self._table.repair()
            self._depth += 1
            try:
                return method(self, *args, **keywords)
            except BaseException:
                self._table.doubtful = True
                raise
            finally:
                self._depth -= 1

    return wrapper
