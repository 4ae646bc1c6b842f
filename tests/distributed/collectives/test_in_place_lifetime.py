"""What is read in place lives until it has been read."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from nbparallel.distributed import Communicator
from nbparallel.distributed.collectives.in_place import LEAST_MOVED
from tests.harness.ranks import context_of

SIZE = LEAST_MOVED // 4 + 11
"""Elements of an array that is large enough to be read in place."""


def content(number: int) -> np.ndarray[Any, Any]:
    """Return an array that differs from those of other numbers."""
    return np.arange(SIZE, dtype="f4") + number


class Exported:
    """Gives away a copy of its content, as torch does of a conjugated tensor; one that is freed is wiped."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self._memory: list[bytearray] = []

    def __dlpack__(self, **options: Any) -> Any:
        """Return a new copy, which nothing else refers to."""
        memory = bytearray(self._array.tobytes())
        self._memory.append(memory)
        copy = np.frombuffer(memory, self._array.dtype)
        weakref.finalize(copy, memory.__setitem__, slice(None), bytes(len(memory)))
        return copy.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the processor's memory."""
        return 1, 0


def test_a_copy_that_stands_for_a_value_lives_until_it_is_read(ranks: Any) -> None:
    """What numpy sees of a value may be a copy: it is not freed while others read it."""

    def work(c: Communicator) -> int:
        me, n, reads = c.rank, c.world_size, [0]
        memory = context_of(c).peers.memory
        read = memory.read

        def counted(blocks: Any) -> Any:
            reads[0] += 1
            return read(blocks)

        memory.read = counted  # type: ignore[method-assign]
        out = [np.empty(SIZE, "f4") for _ in range(n)]

        def check(first: int, count: int = n) -> None:
            assert [a.tobytes() for a in out[:count]] == [content(first + i).tobytes() for i in range(count)]

        for _ in range(3):
            c.all_gather(out, Exported(content(me)))
            check(0)
            c.gather(Exported(content(me + 1)), out if me == 0 else None)
            check(0 if me else 1)
            c.scatter(out[0], [Exported(content(i)) for i in range(n)] if me == 0 else None)
            check(me, 1)
            c.all_to_all(out, [Exported(content(me + i)) for i in range(n)])
            check(me)
            c.broadcast(out[0] if me else Exported(content(7)))
            check(7 if me else 0, 1)
        return reads[0]

    assert all(ranks(3, work))
