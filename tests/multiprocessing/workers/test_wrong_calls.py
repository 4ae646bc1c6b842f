"""What a first hour with pools gets wrong is an error that says what to write, and no wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

RAISES = """
def raises(kind, *words):
    def check(call):
        try:
            call()
        except kind as error:
            for word in words:
                assert word in str(error), (word, error)
        else:
            raise AssertionError(f"nothing was raised instead of {words}")
    return check

def square(x):
    return x**2
"""


def test_arguments_that_are_no_tuple(tmp_path: Path) -> None:
    """The comma that was forgotten is named by processes, pools and `spawn`, before anything starts."""
    run_program(
        RAISES
        + """
comma = raises(TypeError, "args must be a tuple, not int", "args=(x,)")
comma(lambda: ctx.Process(target=square, args=(3)))
comma(lambda: mp.spawn(square, args=(3), nprocs=1))
with ctx.Pool(1) as pool:
    comma(lambda: pool.apply(square, 3))
    comma(lambda: pool.apply_async(square, 3))
    assert pool.apply(square, [3]) == pool.apply(square, (3,), {}) == 9
    assert pool.apply(square, kwds={"x": 3}) == 9
assert not mp.active_children()
""",
        tmp_path,
    )


@pytest.mark.slow
def test_a_pool_that_does_not_run(tmp_path: Path) -> None:
    """The library's words, and what to do."""
    run_program(
        RAISES
        + """
with ctx.Pool(1) as pool:
    raises(ValueError, "Pool is still running", "close()")(pool.join)
for call in (lambda: pool.map(square, [1]), lambda: pool.apply(square, (1,)), lambda: pool.imap(square, [1])):
    raises(ValueError, "Pool not running", "make a new one")(call)
""",
        tmp_path,
    )


@pytest.mark.slow
def test_a_callback_that_raises_ends_no_pool(tmp_path: Path) -> None:
    """It is shown as what a thread raises, the result is there, and the pool goes on."""
    run_program(
        RAISES
        + """
import threading
shown = []
threading.excepthook = lambda args: shown.append(args.exc_value)

def fails(_):
    raise KeyError("mine")

with ctx.Pool(2) as pool:
    assert pool.apply_async(square, (3,), callback=fails).get(30) == 9
    assert pool.map_async(square, [1, 2], callback=fails).get(30) == [1, 4]
    failed = pool.apply_async(fails, (1,), error_callback=fails)
    raises(KeyError, "mine")(lambda: failed.get(30))
    assert pool.map_async(square, range(3)).get(30) == [0, 1, 4]
assert [type(error) for error in shown] == [KeyError] * 3, shown
""",
        tmp_path,
    )


@pytest.mark.slow
def test_what_a_task_lost_and_read(tmp_path: Path) -> None:
    """A death names the call and the task; a lock that a task reads as a global, where it is to be given."""
    run_program(
        RAISES
        + """
def end(n):
    if n == 5:
        os._exit(1)

lock = ctx.Lock()

def locked(n):
    with lock:
        return n

with mp.get_context("forkserver").Pool(1) as pool:
    raises(UnpicklableError, "'lock'", "Lock", "initargs=", "inheritance")(lambda: pool.apply(locked, (1,)))
    for call, words in (
        (lambda: pool.map(end, range(8), chunksize=1), "task 5 of a call of map"),
        (lambda: pool.map(end, range(8), chunksize=4), "a chunk of 4 tasks, from task 4 of a call of map"),
        (lambda: pool.apply(end, (5,)), "task 0 of a call of apply"),
        (lambda: list(pool.imap(end, range(8))), "task 5 of a call of imap"),
    ):
        raises(WorkerDiedError, words, "exit code 1 (an exception, which it has printed")(call)
""",
        tmp_path,
    )


@pytest.mark.slow
def test_keywords_of_any_name(tmp_path: Path) -> None:
    """Also one that a wrapper of ours has for itself: it is the task's."""
    run_program(
        """
def names(**given):
    return given

taken = dict.fromkeys(("self", "function", "fn", "func", "args", "kwargs", "task", "x"), 1)
with ctx.Pool(1) as pool, mp.Executor(1, ctx) as executor, ctx.Manager() as manager:
    assert pool.apply(names, (), taken) == taken == pool.apply_async(names, (), taken).get(30)
    assert executor.submit(names, **taken).result(30) == taken
    assert dict(manager.dict(**taken)) == taken
queue = ctx.SimpleQueue()
process = ctx.Process(target=lambda **given: queue.put(given), kwargs=taken)
process.start()
assert queue.get() == taken
process.join()
""",
        tmp_path,
    )
