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


def calls(size: int) -> dict[str, tuple[Call, np.ndarray[Any, Any]]]:
    """Return calls that differ pairwise in one field or more, each with its array."""
    x = np.arange(size, dtype="f8")
    return {
        "sum": (lambda c, a: c.all_reduce(a), x),
        "max": (lambda c, a: c.all_reduce(a, "max"), x),
        "avg": (lambda c, a: c.all_reduce(a, "avg"), x),
        "dtype": (lambda c, a: c.all_reduce(a), x.astype("i8")),
        "order of bytes": (lambda c, a: c.all_reduce(a), x.astype(">f8")),
        "shape": (lambda c, a: c.all_reduce(a), x.reshape(-1, 1)),
        "count": (lambda c, a: c.all_reduce(a), np.arange(size + 1.0)),
        "number": (lambda c, a: c.all_reduce(1), x),
        "broadcast": (lambda c, a: c.broadcast(a), x),
        "other root": (lambda c, a: c.broadcast(a, src=1), x),
        "barrier": (lambda c, a: c.barrier(), x),
    }


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("size", [2, 3000, 200_000])
@pytest.mark.fault("F32")
@pytest.mark.time_limit(60)
def test_every_pair_of_calls(outcomes: Any, size: int, sampled: Any) -> None:
    """Two different calls raise a table on every rank, and every array keeps its bytes, shared or not."""
    names = list(calls(size))
    pairs = list(itertools.combinations(names, 2))
    cases = list(itertools.product((False, True), pairs if size == 2 else pairs[::4]))
    for shared, (one, other) in sampled(cases, one_in=4):

        def work(
            c: Communicator, shared: bool = shared, one: str = one, other: str = other
        ) -> tuple[str, bool]:
            call, array = calls(size)[one if c.rank == 0 else other]
            array = context_of(c).store.share(array) if shared else array
            before = array.tobytes()
            try:
                call(c, array)
            except CollectiveMismatchError as error:
                return str(error), array.tobytes() == before
            return "", True

        for outcome in outcomes(3, work):
            assert outcome.error is None, (one, other, outcome)
            text, untouched = outcome.value
            assert untouched, (one, other)
            assert "different operations" in text, (one, other, text)
            rows = [line.split() for line in text.splitlines()[2:]]
            assert [row[0] for row in rows] == ["0", "1", "2"]
            # On a busy machine the third rank may still be on its way when the two others differ already.
            assert all(row[1:6] == ["has", "not", "called", "it", "yet"] or int(row[-2]) > 0 for row in rows)


def altered(c: Communicator, size: int, operation: str, change: str) -> tuple[Callable[[], Any], list[Any]]:
    """Return a call with one argument changed, and every array that it may touch."""
    n, me = c.world_size, c.rank
    dtype = "i8" if change == "dtype" else "f8"
    shape = (size + n,) if change == "count" else (size, 1) if change == "shape" else (size,)
    root = 1 if change == "root" else 0
    op = "max" if change == "operator" else "sum"
    make = context_of(c).store.share if change == "shared" else np.array
    x = make(np.arange(shape[0], dtype=dtype).reshape(shape))
    outputs = [make(np.full(shape, -1, dtype)) for _ in range(n)]
    lists = [make(np.full(shape, r, dtype)) for r in range(n)]
    single = np.full(shape, -1, dtype)
    mine = me == root
    calls: dict[str, Callable[[], Any]] = {
        "scan": lambda: c.scan(x, op),
        "exscan": lambda: c.exscan(x, op),
        "maxloc": lambda: c.maxloc(x),
        "reduce": lambda: c.reduce(x, root, op),
        "reduce_scatter": lambda: c.reduce_scatter(x, op=op),
        "reduce_scatter list": lambda: c.reduce_scatter(single, lists, op),
        "all_gather list": lambda: c.all_gather(outputs, x),
        "gather list": lambda: c.gather(x, outputs if mine else None, dst=root),
        "gather": lambda: c.gather(x, dst=root),
        "scatter list": lambda: c.scatter(single, lists if mine else None, src=root),
        "scatter": lambda: c.scatter(lists if mine else None, src=root),
        "all_to_all list": lambda: c.all_to_all(outputs, lists),
    }
    return calls[operation], [x, single, *outputs, *lists]


CHANGES = {
    "scan": ("dtype", "count", "shape", "operator"),
    "exscan": ("dtype", "count", "shape", "operator"),
    "maxloc": ("dtype", "count", "shape"),
    "reduce": ("dtype", "count", "shape", "root", "operator"),
    "reduce_scatter": ("dtype", "count", "shape", "operator"),
    "reduce_scatter list": ("dtype", "count", "shape", "operator"),
    "all_gather list": ("dtype", "count", "shape"),
    "gather list": ("dtype", "count", "shape", "root"),
    "gather": ("root",),
    "scatter list": ("dtype", "count", "shape", "root"),
    "scatter": ("root",),
    "all_to_all list": ("dtype", "count", "shape"),
}
"""What must be the same on all ranks; `gather`, `scatter` and the others without lists move anything."""


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.fault("F32")
@pytest.mark.time_limit(90)
@pytest.mark.parametrize("size", [2, 40_000])
def test_every_argument_of_every_collective(outcomes: Any, size: int, sampled: Any) -> None:
    """One argument altered on one rank: an error with a table on all, and every array keeps its bytes."""
    for operation, changes in sampled(list(CHANGES.items()), one_in=3):
        for change, other in itertools.product(changes, (0, 2) if size == 2 else (2,)):

            def work(
                c: Communicator, operation: str = operation, change: str = change, other: int = other
            ) -> tuple[str, bool]:
                call, arrays = altered(c, size, operation, change if c.rank == other else "shared")
                before = [array.tobytes() for array in arrays]
                try:
                    call()
                except CollectiveMismatchError as error:
                    return str(error), [array.tobytes() for array in arrays] == before
                return "", True

            for outcome in outcomes(3, work):
                assert outcome.error is None, (operation, change, outcome)
                text, untouched = outcome.value
                assert untouched, (operation, change)
                assert "rank  operation" in text, (operation, change, other, text)
                rows = [line.split() for line in text.splitlines()[2:]]
                assert [row[0] for row in rows] == ["0", "1", "2"]
                named = {row[1] for row in rows if row[1:3] != ["has", "not"]}  # who comes late reads as such
                assert named == {operation.split()[0]}


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


@pytest.mark.slow
def test_early_answer(outcomes: Any) -> None:
    """Two ranks that differ are told while the third still computes, and so is the third when it comes."""

    def work(c: Communicator) -> float:
        begin = time.monotonic()
        try:
            if c.rank == 2:
                time.sleep(1.0)
                c.barrier()
            elif c.rank == 1:
                c.all_reduce(1)
            else:
                c.barrier()
        except CollectiveMismatchError:
            return time.monotonic() - begin
        return -1

    found = outcomes(3, work)
    assert all(outcome.error is None and outcome.value > 0 for outcome in found), found
    assert found[0].value < 0.7
    assert found[1].value < 0.7
