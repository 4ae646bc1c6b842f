"""Locking: what every operation of a store begins and ends with."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from nbparallel.errors import ForkedRankError

if TYPE_CHECKING:
    from nbparallel.sharing.store import Store

P = ParamSpec("P")
R = TypeVar("R")


def forked_error(owner: int) -> ForkedRankError:
    """Return what a child that was forked from process `owner` is told."""
    return ForkedRankError(
        f"this process ({os.getpid()}) was forked from {owner}, which alone may share arrays; "
        "arrays that exist can be read here, results go back through a pipe or a file"
    )


def locked(
    method: Callable[Concatenate[Store, P], R],
) -> Callable[Concatenate[Store, P], R]:
    """Refuse a forked child, lock, and have the next operation repair what an interrupt left undone."""

    @functools.wraps(method)
    def wrapper(self: Store, /, *args: P.args, **keywords: P.kwargs) -> R:
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
