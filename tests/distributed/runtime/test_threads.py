"""F65: threads of one rank that all call operations: each gets its result or an error, never another's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator


@pytest.mark.matrix(cover=())
@pytest.mark.fault("F65")
@pytest.mark.time_limit(600)
@pytest.mark.parametrize("operation", ["all_reduce", "all_reduce of a group", "all_gather", "broadcast"])
def test_four_threads_hammer(ranks: Any, operation: str) -> None:
    """Operations of four threads take turns: refused at once with RuntimeError, or complete and right."""
    count = 60 if operation == "all_reduce" else 20

    def work(c: Communicator) -> tuple[int, int, list[str]]:
        guard, left, refused, wrong = threading.Lock(), count, 0, []
        group = c.new_group([0, 1, 2])
        calls: dict[str, Callable[[Any], Any]] = {
            "all_reduce": c.all_reduce,
            "all_reduce of a group": lambda x: c.all_reduce(x, group=group),
            "broadcast": lambda x: np.add(x, c.broadcast(np.full(300, 0.0 if c.rank else 2.0)), out=x),
            "all_gather": lambda x: np.add.reduce(c.all_gather(x), out=x),
        }

        def hammer(number: int) -> None:
            nonlocal left, refused
            while True:
                with guard:
                    if not left:
                        return
                    left -= 1
                while True:  # until it is its turn
                    x = np.full(300 if number % 2 else 3000, 1.0)[:300]
                    try:
                        calls[operation](x)
                    except RuntimeError as error:
                        if "another thread" not in str(error) or (x != 1).any():
                            wrong.append(f"refused: {error}, {x[0]}")
                        refused += 1
                        continue
                    except BaseException as error:  # noqa: BLE001 - the test says which
                        wrong.append(repr(error))
                        return
                    if (x != 3).any():
                        wrong.append(f"{x[0]} instead of 3")
                    break

        threads = [threading.Thread(target=hammer, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert c.all_reduce(c.rank) == 3
        return count - left, refused, wrong

    found = ranks(3, work, seconds=500)
    assert [(done, wrong) for done, _, wrong in found] == [(count, [])] * 3
    assert sum(refused for _, refused, _ in found) > 0, "they never met: the test shows nothing"
