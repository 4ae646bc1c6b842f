"""Collectives with async_op=True: the same results, later."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.errors import (
    CollectiveTimeoutError,
    StaleWorkError,
)
from nbparallel.testing.waiting import wait_until
from tests.harness.ranks import context_of, parts_of


def begin_all(c: Communicator, x: np.ndarray[Any, Any], **options: Any) -> dict[str, tuple[Any, Any]]:
    """Begin every collective with small and with filled arguments; return works and their sync twins."""
    n, me = c.world_size, c.rank
    root = n - 1
    mine = me == root
    parts = np.array_split(x, n)

    def rooted(values: Any) -> Any:
        return values if mine else None

    calls: dict[str, Callable[..., Any]] = {
        "barrier": lambda **o: c.barrier(**o),
        "broadcast": lambda **o: c.broadcast(rooted(x), src=root, **o),
        "broadcast into": lambda **o: c.broadcast(x.copy() if mine else np.zeros_like(x), src=root, **o),
        "all_reduce": lambda **o: c.all_reduce(x.copy(), "max", **o),
        "all_reduce number": lambda **o: c.all_reduce(me + 1, **o),
        "scan": lambda **o: c.scan(x.copy(), "max", **o),
        "scan number": lambda **o: c.scan(me + 0.5, "avg", **o),
        "exscan": lambda **o: c.exscan(x.copy(), **o),
        "exscan number": lambda **o: c.exscan(me + 1, **o),
        "maxloc": lambda **o: c.maxloc(x, **o),
        "minloc number": lambda **o: c.minloc(n - me, location=7 * me, **o),
        "reduce": lambda **o: c.reduce(x.copy(), root, **o),
        "reduce number": lambda **o: c.reduce(me + 0.5, 0, "avg", **o),
        "reduce_scatter": lambda **o: c.reduce_scatter(x, **o),
        "reduce_scatter into": lambda **o: c.reduce_scatter(np.zeros_like(parts[me]), parts, **o),
        "all_gather": lambda **o: c.all_gather(x, **o),
        "all_gather into": lambda **o: c.all_gather([np.zeros_like(x) for _ in range(n)], x, **o),
        "all_gather object": lambda **o: c.all_gather({"rank": me}, **o),
        "all_gather_into_tensor": lambda **o: c.all_gather_into_tensor(
            np.zeros((n, len(x)), x.dtype), x, **o
        ),
        "gather": lambda **o: c.gather(x, dst=root, **o),
        "scatter": lambda **o: c.scatter(rooted(x), src=root, **o),
        "scatter into": lambda **o: c.scatter(np.zeros_like(parts[me]), rooted(parts), src=root, **o),
        "all_to_all": lambda **o: c.all_to_all(x, **o),
        "all_to_all_single": lambda **o: c.all_to_all_single(np.zeros(n), np.arange(n * 1.0), **o),
    }
    works = {name: call(async_op=True) for name, call in calls.items()}
    return {name: (works[name], calls[name]) for name in calls}


def equal(a: Any, b: Any) -> bool:
    """Whether two results are the same."""
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(equal, a, b))
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_collective(ranks: Any, n: int) -> None:
    """All are begun, then waited for in any order, and give what the calls without async_op give."""

    def work(c: Communicator) -> None:
        for size, make in itertools.product((5, 50_000), (np.array, context_of(c).store.share)):
            x = make(np.arange(size * 1.0) * (c.rank + 1))
            begun = begin_all(c, x)
            order = np.random.default_rng(c.rank).permutation(list(begun))
            results = {name: begun[name][0].result() for name in order}
            assert all(begun[name][0].wait() and begun[name][0].is_completed() for name in begun)
            for name, (_, call) in begun.items():
                assert equal(results[name], call()), (name, size)

    ranks(n, work)


def test_arguments_may_change_at_once(ranks: Any) -> None:
    """What was brought is copied when the call is begun, so that later changes reach nobody."""

    def work(c: Communicator) -> None:
        for size, make in itertools.product((4, 50_000), (np.array, context_of(c).store.share)):
            x = make(np.full(size, float(c.rank)))
            works = []
            for i in range(6):
                works.append(c.all_gather(x, async_op=True))
                x += 10
                assert x[0] == c.rank + 10 * (i + 1)
            for i, w in enumerate(works):
                assert [float(v[-1]) for v in w.result()] == [r + 10.0 * i for r in range(3)]

    ranks(3, work)


def test_progress_in_other_waits(ranks: Any) -> None:
    """A rank that waits for a message takes part in what it has begun, and so does one in another group."""

    def work(c: Communicator) -> None:
        pair, me = c.new_group([0, 1]), c.rank
        if me == 0:
            works = [c.all_reduce(1, async_op=True) for _ in range(10)]  # more than there are slots
            assert c.recv(src=1) == "now"
            assert c.all_reduce(5, group=pair) == 10
            assert [w.result() for w in works] == [3] * 10
        elif me == 1:
            works = [c.all_reduce(1, async_op=True) for _ in range(10)]
            assert [w.result() for w in works] == [3] * 10
            c.send("now", 0)
            assert c.all_reduce(5, group=pair) == 10
        else:
            assert [c.all_reduce(1, async_op=True).result() for _ in range(10)] == [3] * 10
        assert c.all_reduce(1) == 3

    ranks(3, work)


def test_collectives_without_come_after(ranks: Any) -> None:
    """A call without async_op finishes what was begun before it: a barrier completes everything."""

    def work(c: Communicator) -> None:
        x = np.ones(3)
        w = c.all_reduce(x, async_op=True)
        c.barrier()
        assert w.is_completed()
        assert (x == 3).all()
        works = [c.all_reduce(np.full(2, i), async_op=True) for i in range(7)]
        assert c.all_gather(c.rank) == [0, 1, 2]
        assert all(w.is_completed() for w in works)
        assert [int(w.result()[0]) for w in works] == [3 * i for i in range(7)]

    ranks(3, work)


def test_time_outs_and_asking(ranks: Any) -> None:
    """wait(timeout) names who is missing and can be called again; is_completed never waits."""

    def work(c: Communicator) -> None:
        if c.rank == 0:
            w = c.all_reduce(1, async_op=True)
            begin = time.monotonic()
            assert not w.is_completed()
            with pytest.raises(CollectiveTimeoutError, match=r"all_reduce.*rank 1 did not arrive"):
                w.wait(timeout=0.1)
            assert time.monotonic() - begin < 5
            c.send("go", 1)
            assert w.result() == 2
        else:
            c.recv(src=0)
            w = c.all_reduce(1, async_op=True)
            wait_until(w.is_completed)
            assert w.result() == 2

    ranks(2, work)


@pytest.mark.fault("F36")
def test_the_end_of_a_cell(ranks: Any) -> None:
    """What was begun is finished at the end of its cell, named if nobody waited, and usable no more."""

    def work(c: Communicator) -> None:
        line = work.__code__.co_firstlineno
        x = np.ones(2)
        kept, _ = c.all_reduce(x, async_op=True), c.barrier(async_op=True)
        if c.rank == 0:
            time.sleep(0.2)
        c.finish_cell()
        assert (x == 2).all()
        c.end_cell(None)
        assert c.forgotten == [
            f"{name}(async_op=True) on line {line + 3} was not waited for"
            for name in ("all_reduce", "barrier")
        ]
        assert kept.wait()
        c.begin_cell(2, (0, 1), work.__code__.co_filename)
        w = c.all_reduce(1, async_op=True) if c.rank == 0 else None
        assert context_of(c).open == 0
        if w is not None:
            for collectives in parts_of(c).groups.opened():
                collectives.pending.drop()
            with pytest.raises(StaleWorkError, match="ended since"):
                w.wait()
        c.end_cell(RuntimeError("the cell failed"))

    ranks(2, work)
