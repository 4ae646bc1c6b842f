"""Ranks that call different things: all of them are told, before any array is touched (F31, F32)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.errors import CollectiveMismatchError, DeadlockError, PeerFailedError

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


@pytest.mark.parametrize("size", [2, 3000, 200_000])
@pytest.mark.fault("F32")
@pytest.mark.time_limit(60)
def test_every_pair_of_calls(outcomes: Any, size: int) -> None:
    """Two different calls raise a table on every rank, and every array keeps its bytes, shared or not."""
    names = list(calls(size))
    pairs = list(itertools.combinations(names, 2))
    for shared, (one, other) in itertools.product((False, True), pairs if size == 2 else pairs[::4]):

        def work(
            c: Communicator, shared: bool = shared, one: str = one, other: str = other
        ) -> tuple[str, bool]:
            call, array = calls(size)[one if c.rank == 0 else other]
            array = c._member.store.share(array) if shared else array
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
            assert all(row[1:] == ["has", "not", "called", "it", "yet"] or int(row[-1]) > 0 for row in rows)


def test_the_table(outcomes: Any) -> None:
    """The table has a line for every rank: operation, dtype, shape, root, operator, line of the cell."""

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
            "  rank  operation   dtype    shape   root  operator  line\n"
            f"  0     all_reduce  float32  (3, 4)  -     sum       {first + 5}\n"
            f"  1     broadcast   float32  (3, 4)  1     -         {first + 3}\n"
            f"  2     all_reduce  float32  (3, 4)  -     sum       {first + 5}"
        )


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


@pytest.mark.fault("F31")
@pytest.mark.parametrize("n", [2, 4])
def test_a_forgotten_call(outcomes: Any, n: int) -> None:
    """A rank that finished the cell is named to those who wait in a collective, in 0.3 s."""

    def work(c: Communicator) -> float:
        c.barrier()
        begin = time.monotonic()
        if c.rank == n - 1:
            return 0.0
        with pytest.raises(CollectiveMismatchError, match=rf"(?s)rank {n - 1} finished the cell.*all_reduce"):
            c.all_reduce(np.ones(3))
        with pytest.raises(CollectiveMismatchError, match="until the next cell"):
            c.barrier()
        return time.monotonic() - begin

    for outcome in outcomes(n, work):
        assert outcome.error is None, outcome
        assert outcome.value < 0.3 * 3  # three times the promise: other processes share this machine


def test_a_source_that_finished(outcomes: Any) -> None:
    """Recv from a rank that has finished the cell is a deadlock that names it, and what did arrive."""

    def work(c: Communicator) -> None:
        if c.rank == 1:
            c.send(1, 0, tag=5)
            return
        with pytest.raises(DeadlockError, match=r"rank 1 finished the cell.*tag 5 from rank 1"):
            c.recv(src=1)

    for outcome in outcomes(2, work):
        assert outcome.error is None, outcome


@pytest.mark.fault("F30")
@pytest.mark.parametrize("n", [2, 4])
def test_an_exception_frees_everybody(outcomes: Any, n: int) -> None:
    """An exception on one rank frees all who wait, whatever in, within 0.2 s, and tells its type and line."""
    waits: list[Callable[[Communicator, int], Any]] = [
        lambda c, origin: c.barrier(),
        lambda c, origin: c.all_reduce(np.ones(3)),
        lambda c, origin: c.all_reduce(np.ones(300_000)),
        lambda c, origin: c.broadcast(None, src=origin),
        lambda c, origin: c.recv(src=origin),
        lambda c, origin: c.recv(),
    ]
    for wait, origin in itertools.product(waits, (0, n - 1)):

        def work(c: Communicator, wait: Any = wait, origin: int = origin) -> None:
            if c.rank == origin:
                time.sleep(0.02)
                raise ZeroDivisionError("division by zero")
            wait(c, origin)

        found = outcomes(n, work)
        for outcome in found:
            if outcome.rank == origin:
                assert isinstance(outcome.error, ZeroDivisionError)
                continue
            assert isinstance(outcome.error, PeerFailedError), outcome
            assert outcome.error.rank == origin
            assert "ZeroDivisionError on line" in str(outcome.error)
            assert outcome.error_ns - found[origin].error_ns < 3 * 0.2e9


def test_the_root_cause_wins(outcomes: Any) -> None:
    """Ranks that only follow a failure do not hide it: everybody names the first."""

    def work(c: Communicator) -> None:
        if c.rank == 0:
            raise KeyError("first")
        if c.rank == 1:
            c.recv(src=0)
        time.sleep(0.3)
        c.barrier()

    for outcome in outcomes(4, work)[1:]:
        assert isinstance(outcome.error, PeerFailedError)
        assert outcome.error.rank == 0
        assert "KeyError" in str(outcome.error)
