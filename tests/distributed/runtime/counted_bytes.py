"""An observer of cells that counts the bytes of arrays that each operation was passed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from nbparallel.distributed import OPERATIONS
from nbparallel.distributed.runtime.observers import ObservedCell


class CountedBytes:
    """What one rank's operations were passed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Count, then call."""

        def counted(*args: Any, **options: Any) -> Any:
            self.counts[name] += sum(getattr(x, "nbytes", 0) for x in (*args, *options.values()))
            return call(*args, **options)

        return counted

    def value(self, value: Any) -> Any:
        """Leave the value of the cell as it is."""
        return value

    def log(self) -> dict[str, int]:
        """Return the bytes by operation."""
        return dict(self.counts)


@contextmanager
def observe(cell: ObservedCell) -> Iterator[CountedBytes]:
    """Count while the cell runs."""
    counted = CountedBytes()
    cell.communicator.observers.add(counted, OPERATIONS)
    try:
        yield counted
    finally:
        cell.communicator.observers.remove(counted)


def conclude(logs: list[dict[str, int]], lost: Collection[int]) -> dict[str, int]:
    """Return the bytes of all ranks."""
    assert not lost
    return dict(sum(map(Counter, logs), Counter()))
