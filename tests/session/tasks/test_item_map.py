"""A function mapped over items: order, who takes which, what travels, what goes wrong."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import BusyError, FileDescriptorLimitError, ParallelError, UnpicklableError
from nbparallel.session import Session, running_sessions
from nbparallel.testing.waiting import wait_until
from nbparallel.transfer import pickling

LARGE = 100_000
"""Numbers in an array that is not pickled with what it lies in."""


@pytest.fixture(scope="module")
def two() -> Iterator[Session]:
    """Give two ranks to all tests of this module, and a first use of what stays."""
    with Session(2) as session:
        session.map(abs, [0])
        yield session


def test_two_iterables_are_for_zip(two: Session) -> None:
    """As the builtin `map` takes them: the error says what to write."""
    with pytest.raises(TypeError, match=r"not 2: .* `map\(lambda pair: f\(\*pair\), zip\(xs, ys\)\)`"):
        two.map(max, [1, 2], [2, 1])
    assert two.map(lambda pair: max(*pair), zip([1, 2], [2, 1], strict=True)) == [2, 2]


@pytest.mark.slow
def test_results_are_in_order_and_a_free_rank_takes_the_next_item(two: Session) -> None:
    """While one rank is at the first item the other one does all the rest; the results are in order."""
    done = nbp.zeros(10)

    def work(item: int) -> tuple[int, int]:
        wait_until(lambda: item or done.sum() == 9)
        done[item] = 1
        return item, os.getpid()

    found = two.map(work, range(10))
    assert [item for item, _ in found] == list(range(10))
    assert sorted(Counter(process for _, process in found).values()) == [1, 9]


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize(
    "items",
    [
        [3, 1, 2],
        ("a", "bb"),
        {"k": 1, "l": 2},
        "text",
        [OrderedDict(a=1), [1, [2]], None, 1.5, b"x" * 5000],
        range(0, 50, 7),
        [],
        range(0),
    ],
    ids=repr,
)
def test_any_iterable_has_items(two: Session, items: Any) -> None:
    """Lists, tuples, keys, characters, objects, ranges, nothing at all."""
    assert two.map(lambda item: item, items) == list(items)
    assert two.map(lambda item: item, (item for item in items)) == list(items)


def test_rows_of_an_array_are_its_items(two: Session) -> None:
    """A private array's rows are copied, a shared one's are the same memory, with its rights."""
    private = np.arange(12.0).reshape(4, 3)
    assert two.map(lambda row: row.sum(), private) == [3.0, 12.0, 21.0, 30.0]
    shared = nbp.share(private)

    def double(row: np.ndarray[Any, Any]) -> bool:
        row *= 2
        return nbp.is_shared(row)

    assert two.map(double, shared) == [True] * 4
    assert np.array_equal(shared, 2 * private)
    assert two.map(nbp.is_shared, [shared, private]) == [True, False]


def test_a_result_is_what_was_returned_then(two: Session) -> None:
    """A function that fills and returns one array again and again gives as many different results."""
    for size in (3, LARGE):
        buffer = np.empty(size)

        def fill(item: int, buffer: np.ndarray[Any, Any] = buffer) -> np.ndarray[Any, Any]:
            buffer[:] = item
            return buffer

        found = two.map(fill, range(6))
        assert [set(result) for result in found] == [{float(item)} for item in range(6)]
        assert all(result.flags.writeable for result in found)
    shared = nbp.zeros(3)
    assert not any(nbp.is_shared(result) for result in two.map(lambda item: shared, range(4)))


def test_large_arrays_travel_in_lists(two: Session) -> None:
    """Items and results with large arrays inside arrive whole, each its own."""
    items = [{"n": n, "x": np.full(LARGE, n)} for n in range(5)]
    found = two.map(lambda item: (item["n"], item["x"] + 1), items)
    assert [n for n, _ in found] == list(range(5))
    assert all(np.array_equal(x, items[n]["x"] + 1) for n, x in found)


def test_many_items_are_taken_some_at_a_time(two: Session) -> None:
    """Some thousand small items: every one once, in order; from a list as from a range."""
    count = 10_000
    for items in (range(count), list(range(count))):
        assert two.map(lambda item: item + 1, items, progress=False) == list(range(1, count + 1))


def test_the_first_failure_names_its_item(two: Session) -> None:
    """Rank, number and text of the item are in the message, and no rank begins another item."""
    begun = nbp.zeros(100)

    def work(item: int) -> float:
        begun[item] = 1
        wait_until(lambda: not item or begun[0])
        time.sleep(0.02)
        return 1 / item

    with pytest.raises(ParallelError, match=r"ZeroDivisionError on rank [01], item 0 \(0\)"):
        two.map(work, range(100))
    assert begun.sum() < 50
    assert two.map(abs, [-1]) == [1]


def test_arrays_that_cannot_be_sent_back_do_not_end_the_notebook(two: Session) -> None:
    """The error's traceback holds the items' memory in a cycle, which the collector takes apart."""
    for _ in range(3):
        with pytest.raises(ParallelError, match="lock"):
            two.map(lambda x: threading.Lock(), [np.zeros(40_000)] * 4)
        gc.collect()


def test_errors_are_results(two: Session) -> None:
    """With ``errors="return"`` an exception stands in its item's place, or its text if it cannot travel."""
    found = two.map(lambda x: 12 // x, [4, 0, 3, 0], errors="return")
    assert found[0::2] == [3, 4]
    for index in (1, 3):
        assert isinstance(found[index], ZeroDivisionError)

    class OddError(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("not this one")

    def fail(x: int) -> None:
        raise OddError("odd", x)

    (told,) = two.map(fail, [7], errors="return")
    assert type(told) is RuntimeError
    assert str(told) == "OddError: ('odd', 7)"
    assert two.map(len, ["a"], errors="return") == [1]
    with pytest.raises(ValueError, match="errors must be 'raise' or 'return', not 'skip'"):
        two.map(len, ["a"], errors="skip")
    with pytest.raises(ParallelError, match="item 1"):
        two.map(lambda x: 12 // x, [4, 0])


def test_a_long_item_is_named_in_short(two: Session) -> None:
    """The text of an item is cut, an array's is its shape; if it raises, the class is named."""

    class Silent:
        def __repr__(self) -> str:
            raise SystemExit

    def fail(item: object) -> None:
        raise LookupError("here")

    for item, words in (
        ("x" * 5000, r"\('xxx\S*\.\.\.x+'\)"),
        (np.zeros((3, 100)), r"\(array of 3 × 100 float64\)"),
        (Silent(), r"\(of type Silent\)"),
    ):
        with pytest.raises(ParallelError, match=f"item 0 {words}"):
            two.map(fail, [item])


def test_a_death_names_the_item(two: Session) -> None:
    """A rank that is killed: the error names the item that it was at; the next map has all ranks."""

    def work(item: str) -> None:
        if item == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ParallelError, match=r"rank [01] .*at item 2 \('deadly'\).*SIGKILL"):
        two.map(work, ["a", "b", "deadly", "c"])
    assert two.map(abs, range(-3, 0)) == [3, 2, 1]


def test_what_cannot_travel_is_named(two: Session) -> None:
    """An item: before anything starts.  A result: when it is returned, not after the last item."""
    ran = nbp.zeros(50)

    def count(item: Any) -> Any:
        ran[item] = 1
        time.sleep(0.01)
        return (n for n in range(3)) if item == 1 else item

    with pytest.raises(UnpicklableError, match=r"item 1: .*generator"):
        two.map(count, [0, (n for n in "ab"), 2])
    assert ran.sum() == 0
    with pytest.raises(ParallelError, match=r"item 1 \(1\).*the result of item 1: .*generator"):
        two.map(count, range(50))
    assert ran.sum() < 25


def test_wrong_arguments_say_what_to_pass(two: Session) -> None:
    """No function, nothing to iterate over."""
    for function, items, words in (
        ([1, 2], abs, "map needs a function to call, not list"),
        (abs, 3, "map needs items .* not int"),
        (abs, np.array(1.0), "an array without axes"),
    ):
        with pytest.raises(TypeError, match=words):
            two.map(function, items)  # type: ignore[arg-type, type-var]


def test_busy_ranks_refuse(two: Session) -> None:
    """While a cell runs in the background no map begins, and the cell is not disturbed."""
    pending = two.submit("import time\ntime.sleep(0.5)\nrank")
    with pytest.raises(BusyError):
        two.map(abs, [1])
    assert pending.result().values == [0, 1]


@pytest.mark.slow
def test_nbp_map_takes_the_session_that_runs(two: Session) -> None:
    """In a script `nbp.map` uses the one session there is; of several none is chosen."""
    pids = two.call(os.getpid)
    assert set(nbp.map(lambda item: os.getpid(), range(8))) <= set(pids)
    with Session(1), pytest.raises(RuntimeError, match="2 sessions are running here"):
        nbp.map(abs, [1])
    nbp.map(abs, [1])


@pytest.mark.slow
def test_nbp_map_starts_ranks_for_itself(two: Session) -> None:
    """Without a session it starts ranks, and none of them is left (the leak check looks)."""
    running_sessions.RUNNING.discard(two)
    try:
        assert nbp.map(abs, [-1, 2]) == [1, 2]
        assert running_sessions.current() == (None, None)
    finally:
        running_sessions.RUNNING.add(two)


@pytest.mark.parametrize("operation", ["all_reduce(1)", "barrier()", "broadcast(1, group=new_group([0, 1]))"])
def test_operations_between_ranks_are_refused(two: Session, operation: str) -> None:
    """Whether others call them too depends on who takes which item; locks wait for no item."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "def works(item):\n from nbparallel.distributed import all_reduce, barrier, broadcast, new_group, "
        f"lock\n with lock('item'): pass\n return {operation}",
        names,
    )
    with pytest.raises(ParallelError, match="return a value for each item"):
        two.map(names["works"], [0, 1])
    assert two.run("all_reduce(1)", namespace={}).values[0] == 2


def test_a_rank_is_told_what_to_use(two: Session) -> None:
    """On a rank `nbp.map` is refused with what does it there."""
    with pytest.raises(ParallelError, match=r"on a rank take a part of the items.*dist\.shard\(items\)"):
        two.run("nbp.map(abs, [1])")


def test_what_a_function_prints_is_shown(two: Session, capsys: pytest.CaptureFixture[str]) -> None:
    """It stands behind the rank that printed it."""
    two.map(lambda item: print("I have", item), [7], progress=False)
    assert capsys.readouterr().out in ("[rank 0] I have 7\n", "[rank 1] I have 7\n")


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("leaves", [True, False])
def test_a_forked_child_takes_no_items(leaves: bool) -> None:
    """A child that the function forked and that comes back, or raises, leaves every item to the rank."""

    def fork(item: int) -> int:
        if item == 3:
            child = os.fork()
            if child == 0 and leaves:
                sys.exit(0)
            if child == 0:
                return -1
            os.waitpid(child, 0)
        return item

    with Session(1) as session:
        assert session.map(fork, range(20)) == list(range(20))


def test_no_descriptor_for_a_map(two: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the limit when it begins, and when the results come."""
    full = FileDescriptorLimitError(24, "too many open files")

    def refuse(error: Exception, *_: object, **__: object) -> None:
        raise error

    for place, name, error in ((os, "pipe2", OSError(24, "Too many")), (pickling, "loads", full)):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, partial(refuse, error))
            with pytest.raises(FileDescriptorLimitError, match="open files"):
                two.map(abs, [1])
    assert two.map(abs, [-1]) == [1]


def test_an_operation_in_a_function_that_is_sent(two: Session) -> None:
    """Its names are predefined in cells alone: the error says what to import."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def sums(item): return all_reduce(item)", names)
    with pytest.raises(ParallelError, match=r"from nbparallel\.distributed import all_reduce"):
        two.call(names["sums"], 1)
    for name, right in (
        ("rank", "value in (0, 1)"),
        ("world_size", "value == 2"),
        ("rng", "0 <= value.random() < 1"),
        ("dist", "value.get_world_size() == 2"),
        ("nbp", "value.distributed.get_world_size() == 2"),
    ):
        exec(f"def missed(item): return {name}", names)
        with pytest.raises(ParallelError, match=r"is sent to ranks: write `.*` in it") as caught:
            two.map(names["missed"], [1])
        advised = str(caught.value).split("write `")[1].split("` in it")[0]
        exec(f"def follows(item):\n    {advised}\n    value = {name}\n    return {right}", names)
        assert two.map(names["follows"], [1]) == [True], "what the error says to write, and nothing else"


def test_an_error_has_what_was_done(two: Session) -> None:
    """Errors and interrupts hold finished results by index, also those of a chunk, and say how many."""

    def work(item: int) -> int:
        if item == 2:
            wait_until(lambda: go_on[0])
            raise LookupError("two")
        go_on[0] = item >= 7
        return item * item

    for count in (10, 2000):  # one by one; several at a time
        go_on = nbp.zeros(1)
        with pytest.raises(ParallelError, match="LookupError") as caught:
            two.map(work, range(count), progress=False)
        done = caught.value.result
        assert {0: 0, 1: 1, 7: 49}.items() <= done.items()
        assert 2 not in done
        assert caught.value.__notes__[0].startswith(f"{len(done)} of {count} items are done")
        assert caught.value.__notes__[0] in caught.value.rendering

    begun = nbp.zeros(1)

    def press() -> None:
        wait_until(lambda: begun[0])
        two.interrupt()

    def stay(item: int) -> int:
        if item == 3:
            begun[0] = 1
            time.sleep(30)
        return -item

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(
        KeyboardInterrupt, match=r"map was interrupted when \d+ of 9 items were done"
    ) as stopped:
        two.map(stay, range(9), progress=False)
    presser.join()
    result = stopped.value.result  # type: ignore[attr-defined]
    assert {0: 0, 1: -1, 2: -2}.items() <= result.items()
    assert 3 not in result
    assert two.map(abs, [-1]) == [1]


def test_an_item_has_a_time_out(two: Session) -> None:
    """It is interrupted where it is, its rank goes on with the next; code that swallows it is hit again."""

    def work(item: int) -> int:
        deaf = item == 4
        while item >= 3:
            try:
                time.sleep(0.01)
            except KeyboardInterrupt:
                if not deaf:
                    raise
                deaf = False
        return item

    found = two.map(work, range(5), errors="return", timeout=0.1, progress=False)
    assert found[:3] == [0, 1, 2]
    assert [type(error) for error in found[3:]] == [TimeoutError] * 2
    with pytest.raises(
        ParallelError, match=r"TimeoutError on rank [01], item 3 \(3\), line \d+.* of 0\.1 s"
    ) as c:
        two.map(work, range(4), timeout=0.1, progress=False)
    assert c.value.result == {0: 0, 1: 1, 2: 2}
    with pytest.raises(ValueError, match="timeout must be seconds for an item, not -1"):
        two.map(abs, [1], timeout=-1)
    for wrong in (float("inf"), 1e300, "3"):
        with pytest.raises(ValueError, match="timeout must be seconds"):
            two.map(abs, [1], timeout=wrong)  # type: ignore[arg-type]
    handlers = two.call(lambda: __import__("signal").getsignal(14))
    assert handlers == [signal.SIG_DFL] * 2, "the alarm is the user's again"


@pytest.mark.slow
def test_an_item_that_cannot_be_interrupted_ends_with_its_rank(two: Session) -> None:
    """C code that does not return: its rank is ended, the item is named; if asked to, others do the rest."""
    items = [1, 2, 10**12, 4, 5]
    with pytest.raises(
        ParallelError, match=r"rank [01] .*at item 2 \(1000000000000\).*time-out had"
    ) as caught:
        two.map(lambda item: sum(range(item)), items, timeout=0.2)
    assert 2 not in caught.value.result
    found = two.map(lambda item: sum(range(item)), items, errors="return", timeout=0.2)
    assert [*found[:2], *found[3:]] == [0, 1, 6, 10]
    assert isinstance(found[2], TimeoutError)
    assert "was ended: the item's time-out had passed" in str(found[2])
    with pytest.raises(ParallelError) as none_left:
        two.map(lambda item: sum(range(item)), [10**12] * 3, errors="return", timeout=0.2)
    assert len(none_left.value.errors) == 2
    assert two.map(abs, [-1, -2]) == [1, 2]


@pytest.mark.parametrize("ordered", [True, False])
def test_results_come_one_after_the_other(two: Session, ordered: bool) -> None:
    """`imap` yields a result when it is there, in the order of the items or as they come."""
    go_on = nbp.zeros(1)

    def work(item: int) -> int:
        wait_until(lambda: item or go_on[0])
        return item

    found = two.imap(work, range(4), ordered=ordered, progress=False)
    if not ordered:
        assert [next(found) for _ in range(3)] == [1, 2, 3]
    go_on[0] = 1
    assert list(found) == (list(range(4)) if ordered else [0])
    assert two.map(abs, [-1]) == [1], "the ranks are free"


def test_who_leaves_the_loop_ends_the_map(two: Session) -> None:
    """After `break` the ranks are free; an error comes behind the results before it."""
    begun = nbp.zeros(50)

    def work(item: int) -> int:
        begun[item] = 1
        time.sleep(0.02)
        return 6 // (3 - item)

    for found in two.imap(work, range(50), errors="return", progress=False):
        assert found == 2
        break
    assert two.map(abs, [-1]) == [1]
    assert begun.sum() < 25
    results = two.imap(work, range(50), progress=False)
    assert [next(results) for _ in range(3)] == [2, 3, 6]
    with pytest.raises(ParallelError, match=r"ZeroDivisionError.*item 3"):
        next(results)


def test_an_interrupt_ends_an_imap(two: Session) -> None:
    """In the wait for a result it raises KeyboardInterrupt, with what was not yielded; the ranks are free.

    It ends a look at endless items too: `list` sees no signal while it takes them from C code.
    """
    begun = nbp.zeros(2)

    def work(item: int) -> int:
        if item == 1:
            wait_until(lambda: begun.all())
            time.sleep(0.3)  # the test waits by then
            os.kill(parent, signal.SIGINT)
            time.sleep(30)
        begun[0] = begun[0] or item == 2
        return item

    parent = os.getpid()
    results = two.imap(work, range(3), progress=False)
    assert next(results) == 0
    begun[1] = True
    with pytest.raises(KeyboardInterrupt, match=r"2 of 3 items were done: .*not yielded") as caught:
        next(results)
    assert caught.value.result == {2: 2}  # type: ignore[attr-defined]
    numbers, late = iter(range(10**8)), f"sleep 0.2; kill -INT {parent}"
    with pytest.raises(KeyboardInterrupt), subprocess.Popen(["sh", "-c", late]):
        two.map(abs, numbers)
    assert next(numbers) < 10**8
    assert two.map(abs, [-1]) == [1]
