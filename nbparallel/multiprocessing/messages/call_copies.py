"""One copy for a private array that many tasks of one call hold.

A task that is the only one to hold an array gets a copy of its own, which is shared memory from then on.
What several may hold is copied once, and each maps that copy copy-on-write: what a task writes stays there.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

_CONTAINERS = (tuple, list, dict)
_TWICE = 2
"""How often what a container holds is counted, however many places it is in: more is the same."""


class CallCopies:
    """The copies of one call's arrays; each lives until its array or this object does not.

    Parameters
    ----------
    tasks : sequence
        Arguments of the call's tasks.  An array that is in just one place there, however deep in tuples,
        lists and dictionaries, is one task's only.
    """

    def __init__(self, tasks: Sequence[Any]) -> None:
        self._tasks = tasks
        self._single: frozenset[int] | None = None
        self._copies: dict[int, tuple[Any, Any]] = {}

    def copy(self, array: Any, store: Any) -> Any | None:
        """Return the shared copy of a private array; None if just one task holds it."""
        key = id(array)
        if self._single is None:
            self._single = _single_places(self._tasks)
        if key in self._single:
            return None
        if key not in self._copies:
            own = weakref.ref(self)  # a cycle would keep the copies until the garbage collector runs

            def drop(_: object) -> None:
                living = own()
                if living is not None:
                    living._copies.pop(key, None)

            # what a `__reduce__` makes for one message only goes with it
            self._copies[key] = weakref.ref(array, drop), store.share(array, for_all=True)
        return self._copies[key][1]


def _single_places(tasks: Sequence[Any]) -> frozenset[int]:
    """Return the identities of the arrays that are in one place only."""
    array_class = sys.modules["numpy"].ndarray
    arrays: Counter[int] = Counter()
    visits: Counter[int] = Counter()
    waiting: list[Any] = [tasks]
    while waiting:
        container = waiting.pop()
        for part in container.values() if type(container) is dict else container:
            if type(part) is array_class:
                arrays[id(part)] += 1
            elif type(part) in _CONTAINERS and visits[id(part)] < _TWICE:
                visits[id(part)] += 1
                waiting.append(part)
    return frozenset(identity for identity, count in arrays.items() if count == 1)
