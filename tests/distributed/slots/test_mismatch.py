"""Ranks that call different things: all of them are told, before any array is touched (F32)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.slots import mismatch, slot_protocol
from nbparallel.errors import CollectiveMismatchError
from tests.harness.ranks import context_of

Call = Callable[[Communicator, np.ndarray[Any, Any]], Any]


@pytest.mark.fault("F32")
def test_one_operation_for_another(outcomes: Any) -> None:
    """Two different operations, view= on some, and a list of another length raise on every rank."""
    calls: list[Call] = [
        lambda c, a: c.all_gather(a),
        lambda c, a: c.all_gather(a, view=True),
        lambda c, a: c.gather(a, dst=0),
        lambda c, a: c.reduce(a, 0),
        lambda c, a: c.scatter([a, a, a] if c.rank == 0 else None),
        lambda c, a: c.all_to_all([a, a, a]),
        lambda c, a: c.reduce_scatter(a),
        lambda c, a: c.reduce_scatter([1, 2, 3]),
        lambda c, a: c.reduce(1, 0),
        lambda c, a: c.scan(a),
        lambda c, a: c.exscan(a),
        lambda c, a: c.maxloc(a),
        lambda c, a: c.minloc(a),
        lambda c, a: c.minloc(1),
        lambda c, a: c.broadcast(a if c.rank == 0 else None, view=True),
        lambda c, a: c.barrier(),
    ]
    for one, other in itertools.pairwise([*calls, calls[0]]):

        def work(c: Communicator, one: Call = one, other: Call = other) -> str:
            a = context_of(c).store.share(np.ones(3))
            try:
                (one if c.rank == 1 else other)(c, a)
            except CollectiveMismatchError as error:
                assert (a == 1).all()
                return str(error)
            return ""

        for outcome in outcomes(3, work):
            assert outcome.error is None, outcome
            assert "different operations" in outcome.value, outcome


def test_the_table(outcomes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has a line for every rank: operation, dtype, shape, root, operator, cell's line, calls."""
    # Otherwise those who have come are told after a tenth of a second, in which a busy machine may let the
    # third one wait: `test_those_who_are_here_are_told_soon` is about that.
    monkeypatch.setattr(slot_protocol, "EARLY_NS", 10_000_000_000)

    def work(c: Communicator) -> None:
        x = np.zeros((3, 4), "f4")
        if c.rank == 1:
            c.broadcast(x, src=1)
        else:
            c.all_reduce(x)

    first = work.__code__.co_firstlineno
    for outcome in outcomes(3, work):
        assert str(outcome.error) == (
            "ranks called different operations, or the same with different arguments:\n"
            "  rank  operation   dtype    shape   root  operator  line  calls\n"
            f"  0     all_reduce  float32  (3, 4)  -     sum       {first + 5:<4}  1\n"
            f"  1     broadcast   float32  (3, 4)  1     -         {first + 3:<4}  1\n"
            f"  2     all_reduce  float32  (3, 4)  -     sum       {first + 5:<4}  1"
        )


def test_another_source_than_the_one_meant(outcomes: Any) -> None:
    """A broadcast without `src` from another rank than 0: the error names the source, and the cure."""

    def work(c: Communicator) -> None:
        c.broadcast(np.zeros(3) if c.rank == 2 else None)

    for outcome in outcomes(3, work):
        assert type(outcome.error) is CollectiveMismatchError
        assert str(outcome.error).startswith(
            "rank 0 is the source, and what it passed does not fit the array that rank 2 passed to be filled"
        )
        assert "src=2 on all ranks makes rank 2 the source:\n  rank  operation" in str(outcome.error)


@pytest.mark.slow
@pytest.mark.fault("F32")
def test_those_who_are_here_are_told_soon(outcomes: Any) -> None:
    """Ranks that differ do not wait for one who takes long; the table says that it has not come."""

    def work(c: Communicator) -> int:
        x = np.zeros(3)
        if c.rank == 2:
            time.sleep(3.0)
            came = time.monotonic_ns()
            with pytest.raises(CollectiveMismatchError):
                c.all_reduce(x)
            return came
        return c.broadcast(x, src=1) if c.rank else c.all_reduce(x)

    early, other, late = outcomes(3, work)
    for outcome in (early, other):
        assert outcome.error_ns < late.value
        *_, last = str(outcome.error).splitlines()
        assert last.split() == ["2", "has", "not", "called", "it", "yet", *"-----", "0"]


def test_the_table_counts_the_calls_of_this_cell(outcomes: Any) -> None:
    """Every row has the same columns, and says how many calls of the group the rank has made in this cell."""

    def work(c: Communicator) -> str:
        for _ in range(5):
            c.barrier()
        c.finish_cell()
        c.end_cell(None)
        c.begin_cell(2, (0, 1, 2), __file__)
        c.barrier()
        if c.rank == 0:
            return ""
        c.all_reduce(1)
        raise AssertionError("rank 0 calls no all_reduce")

    found = outcomes(3, work)
    table = next(str(outcome.error) for outcome in found if outcome.error is not None).splitlines()[1:]
    assert table[0].split() == ["rank", "operation", "dtype", "operator", "line", "calls"]
    starts = [table[0].index(name) for name in table[0].split()]
    for line in table[1:]:
        assert all(line[start - 1] == " " and line[start] != " " for start in starts[1:]), table
    for line in table[1:]:  # a rank that is late "has not called it yet"
        assert line.split()[-1] == ("2" if "all_reduce" in line else "1"), table
    assert sum("all_reduce" in line for line in table[1:]) >= 1


def test_the_table_waits_for_ranks_that_are_on_their_way(
    outcomes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that calls, or leaves the cell, a moment after the first one stands in the table of all."""
    monkeypatch.setattr(mismatch, "SETTLE_NS", 20 * mismatch.SETTLE_NS)  # enough for a busy machine

    def work(c: Communicator) -> str:
        if c.rank == 0:
            return ""  # has left when the others look
        time.sleep(0.02 * c.rank)
        if c.rank != 3:
            c.barrier()
            raise AssertionError("ranks 0 and 3 call no barrier")
        return ""

    errors = [str(outcome.error) for outcome in outcomes(4, work) if outcome.error is not None]
    text = next(error for error in errors if "without calling" in error)
    head, _, *rows = text.splitlines()
    assert head.startswith("ranks 0, 3 finished the cell without calling barrier"), text
    assert [row.split()[1] for row in rows] == ["finished", "barrier", "barrier", "finished"], text


def test_broadcast_contents(outcomes: Any) -> None:
    """An array to fill must have the root's shape and dtype; an object fits none; None always does."""
    for value in (np.zeros(4), np.zeros(3, "f4"), [1]):

        def work(c: Communicator, value: Any = value) -> str:
            x = np.ones(3)
            try:
                c.broadcast(value if c.rank == 0 else None if c.rank == 1 else x)
            except CollectiveMismatchError as error:
                assert (x == 1).all()
                return str(error)
            return ""

        for outcome in outcomes(3, work):
            assert outcome.error is None, outcome
            assert "broadcast" in outcome.value
