"""A session in a script: cells, calls, values, output."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import ParallelError, RankExitError
from nbparallel.session import Session
from nbparallel.testing.waiting import wait_until


@pytest.fixture(scope="module")
def four() -> Iterator[Session]:
    """Give four ranks to all tests of this module."""
    with Session(4) as session:
        session.run("pass")  # the first epoch's control segment is there before the first leak check
        yield session


class TextSink:
    """Keeps the text of a rank."""

    def __init__(self) -> None:
        self.text = ""

    def stream(self, rank: int, name: str, text: str) -> None:
        """Take text."""
        self.text += text

    def note(self, text: str) -> None:
        """Take no note."""

    def finish(self) -> None:
        """Do nothing."""

    display: Any = None
    result: Any = None
    clear: Any = None


def test_a_cell_runs_on_every_rank_and_keeps_its_variables(four: Session) -> None:
    """What a cell assigns is there in the next one, on each rank its own."""
    four.run("kept = rank * 10")
    result = four.run("kept + world_size")
    assert result.values == [4, 14, 24, 34]
    assert four.pull("kept") == [0, 10, 20, 30]


def test_text_and_streams_are_complete_and_in_order(four: Session) -> None:
    """What was printed before the cell ended is in the result, also by C code and child processes."""
    result = four.run(
        "import os, sys, ctypes\n"
        "print('python', rank)\n"
        "os.system('echo child')\n"
        "ctypes.CDLL(None).puts(b'from C')\n"
        "print('err', file=sys.stderr)\n"
        "os.write(1, b'raw \\xff\\n')\n"
    )
    for rank in range(4):
        assert result.ranks[rank].stdout == f"python {rank}\nchild\nfrom C\nraw \\xff\n"
        assert result.ranks[rank].stderr == "err\n"


def test_both_streams_and_displays_arrive_in_the_order_in_which_they_were_made(four: Session) -> None:
    """A sink sees stdout, stderr and displays as the rank made them."""
    seen: list[tuple[str, str]] = []

    class Sink(TextSink):
        def stream(self, rank: int, name: str, text: str) -> None:
            seen.append((name, text))

        def display(self, rank: int, data: dict[str, str], *_: object) -> None:
            seen.append(("display", data["text/plain"]))

        def result(self, rank: int, data: dict[str, str], metadata: object) -> None:
            seen.append(("result", data["text/plain"]))

    four.run(
        "import sys\n"
        "for i in range(20):\n"
        "    print('out', i)\n"
        "    display({'text/plain': f'rich {i}'}, raw=True)\n"
        "    print('err', i, file=sys.stderr)\n"
        "'value'",
        sink=Sink(),  # type: ignore[arg-type]
        ranks=[0],
    )
    wanted = [
        part
        for i in range(20)
        for part in [("stdout", f"out {i}\n"), ("display", f"rich {i}"), ("stderr", f"err {i}\n")]
    ]
    assert seen == [*wanted, ("result", "'value'")]


def test_a_thread_of_an_earlier_cell_prints_into_the_cell_that_runs(four: Session) -> None:
    """While none runs, its text is that of the cell that started it."""
    early, late = TextSink(), TextSink()
    four.run(
        "import threading\n"
        "go, done, last, ended = [threading.Event() for _ in range(4)]\n"
        "def later():\n"
        "    go.wait(10); print('while a cell runs'); done.set()\n"
        "    last.wait(10); print('while none runs'); ended.set()\n"
        "thread = threading.Thread(target=later); thread.start()",
        sink=early,  # type: ignore[arg-type]
        ranks=[1],
    )
    four.run(
        "print('now'); go.set(); _ = done.wait(10); threading.Timer(0.3, last.set).start()",
        sink=late,  # type: ignore[arg-type]
        ranks=[1],
    )
    wait_until(lambda: early.text.endswith("\n"), "the text of the thread")
    assert early.text == "while none runs\n"
    assert late.text == "now\nwhile a cell runs\n"
    four.run("thread.join()", ranks=[1])


KEPT_THREADS = {
    "bash": ("", "%%bash\necho {}"),
    "executor": (
        "from concurrent.futures import ThreadPoolExecutor\nkept = ThreadPoolExecutor(1)",
        "kept.submit(print, '{}').result()",
    ),
    "dummy": (
        "import multiprocessing.dummy\nkept = multiprocessing.dummy.Pool(1)",
        "kept.apply(print, ('{}',))",
    ),
    "queue": (
        "import queue, threading\nq = queue.Queue()\ndef work():\n    while True:\n"
        "        print(q.get()); q.task_done()\nthreading.Thread(target=work, daemon=True).start()",
        "q.put('{}'); q.join()",
    ),
    "listener": (
        "import logging, logging.handlers, queue, threading\n"
        "q = queue.SimpleQueue(); said = threading.Semaphore(0)\n"
        "class Printing(logging.Handler):\n"
        "    def emit(self, record): print(record.getMessage()); said.release()\n"
        "listener = logging.handlers.QueueListener(q, Printing()); log = logging.Logger('kept')\n"
        "log.addHandler(logging.handlers.QueueHandler(q)); listener.start()",
        "log.warning('{}'); _ = said.acquire()",
    ),
    "loop": (
        "import asyncio, threading\nloop = asyncio.new_event_loop()\n"
        "threading.Thread(target=loop.run_forever, daemon=True).start()\nasync def say(x): print(x)",
        "asyncio.run_coroutine_threadsafe(say('{}'), loop).result()",
    ),
}
"""What starts a thread, and a cell that has it print."""


@pytest.mark.parametrize("kind", KEPT_THREADS)
def test_what_a_kept_thread_prints_for_a_cell_is_that_cells(four: Session, kind: str) -> None:
    """Scripts of IPython, pools of threads, listeners and loops keep one thread for all cells."""
    before, cell = KEPT_THREADS[kind]
    four.run(before, ranks=[1])
    for word in ("one", "two", "three"):
        assert four.run(cell.format(word), ranks=[1])[1].stdout == f"{word}\n"


@pytest.mark.slow
def test_call_sends_functions_of_main_and_returns_results_in_rank_order(four: Session) -> None:
    """`call` takes a lambda with a closure, keywords of any name, and gives a list."""
    offset = 7
    assert four.call(lambda a, b: (a + b, offset), 1, 2) == [(3, 7)] * 4
    assert four.call(dict, [("a", 1)], self=2, function=3) == [{"a": 1, "self": 2, "function": 3}] * 4
    assert four.call(os.getpid) == [rank.pid for rank in four.statistics().ranks]


def test_a_function_open_that_is_replaced_hurts_nobody(four: Session) -> None:
    """In the notebook, as a test of the user's does; a large result comes through a file."""
    with mock.patch("builtins.open", mock.mock_open()):
        assert four.run("'y' * 100_000").values == ["y" * 100_000] * 4


def test_push_and_pull_carry_arrays(four: Session) -> None:
    """A pushed array is a copy on every rank; a pulled one a snapshot."""
    x = np.arange(100_000.0)
    four.push(pushed=x, small=[1, 2], self=3)
    assert four.pull("self") == [3] * 4
    four.run("pushed += rank")
    for rank, got in enumerate(four.pull("pushed")):
        np.testing.assert_array_equal(got, x + rank)
    assert four.pull("small")[3] == [1, 2]
    four.run("del pushed")
    with pytest.raises(ParallelError, match="'missing' is not defined"):
        four.pull("missing")
    with pytest.raises(ValueError, match=r"'x\[0\]' is no variable's name"):
        four.pull("x[0]")


def test_a_call_writes_to_a_mapped_file_and_a_cell_does_not(four: Session, tmp_path: Path) -> None:
    """Values of both are those of that moment, also inside of a list."""
    x = np.memmap(tmp_path / "file", "f8", "w+", shape=50_000)

    def write(k: int) -> list[np.ndarray]:
        x[k] = k + 1
        return [x, np.asarray(x)]

    found = [*four.call(write, 3), *four.map(write, [4])]
    four.push(pushed=[x])
    found += four.run("x[5] = pushed[0][5] = 6; [x, *pushed]", namespace={"x": x}).values
    for values in found:
        for value in values:
            assert value[3] == 4
            value[3] = 0
    assert x[:7].tolist() == [0, 0, 0, 4, 5, 0, 0]
    four.run("del x, pushed", namespace={})  # the session refers to the last cell's namespace


def test_a_shared_array_in_a_call_is_the_same_memory(four: Session) -> None:
    """Ranks write into a shared array of this process, and this process sees it."""
    shared = nbp.zeros(4, dtype=np.int64)

    def fill(x: np.ndarray) -> None:
        import nbparallel.distributed as dist

        x[dist.get_rank()] = dist.get_rank() + 1

    four.call(fill, shared)
    assert shared.tolist() == [1, 2, 3, 4]


def test_some_ranks_may_run_a_cell(four: Session) -> None:
    """`ranks` chooses who runs it; wrong ones are refused with the valid ones."""
    assert four.run("rank", ranks=[1, 3]).values.ranks == (1, 3)
    with pytest.raises(KeyError, match="rank 0 has no value"):
        four.run("rank", ranks=[1, 3]).values[0]
    with pytest.raises(ValueError, match="ranks 0-3"):
        four.run("rank", ranks=[4])
    for wrong in (1, ["a"], [True], [1.0], "01"):
        with pytest.raises(TypeError, match="ranks must be a sequence of integers"):
            four.run("1", ranks=wrong)  # type: ignore[arg-type]


def test_a_failure_carries_errors_and_result(four: Session) -> None:
    """`ParallelError` maps rank to exception and holds what there was."""
    with pytest.raises(ParallelError) as caught:
        four.run("print('before')\nif rank == 2:\n    1 / 0\nrank", execution_count=5)
    error = caught.value
    assert list(error.errors) == [2]
    assert isinstance(error.errors[2], ZeroDivisionError)
    assert "ZeroDivisionError on rank 2, line 3: division by zero" in str(error)
    assert error.result.ranks[2].stdout == "before\n"
    assert error.result.values.ranks == (0, 1, 3)
    assert four.run("rank").values == [0, 1, 2, 3]


def test_sys_exit_is_an_error_and_the_rank_lives(four: Session) -> None:
    """F7: SystemExit becomes RankExitError with its code; the process stays."""
    pids = [rank.pid for rank in four.statistics().ranks]
    with pytest.raises(ParallelError) as caught:
        four.run("import sys\nif rank == 1: sys.exit(3)")
    assert isinstance(caught.value.errors[1], RankExitError)
    assert caught.value.errors[1].code == 3
    with pytest.raises(ParallelError, match=r"sys\.exit\(\) was called"):
        four.run("exit()")
    assert four.call(os.getpid) == pids


def test_a_cell_that_does_not_compile_is_sent_to_nobody(four: Session) -> None:
    """One SyntaxError, with the line as the notebook counts it."""
    before = four.run("1").values
    assert before == [1, 1, 1, 1]
    task = four.statistics().ranks[0].task
    with pytest.raises(SyntaxError) as caught:
        four.run("x = 1\nx = = 2", line_offset=1, execution_count=9)
    assert caught.value.lineno == 3
    assert four.statistics().ranks[0].task == task


def test_unpicklable_results_stay_where_they_are(four: Session) -> None:
    """A value that cannot travel is shown as text and says why."""
    value = four.run("import threading; threading.Lock()").values[0]
    assert "lock" in repr(value)
    assert value.reason


def test_random_streams_differ_and_repeat(four: Session) -> None:
    """Ranks draw independently; the same seed gives the same again."""
    source = "import random, numpy as np; (random.random(), float(np.random.rand()), float(rng.random()))"
    first = list(four.run(source, seed=1).values)
    assert len(set(first)) == 4
    assert list(four.run(source, seed=1).values) == first
    assert list(four.run(source, seed=2).values) != first


def test_the_environment_of_torchrun_is_there(four: Session) -> None:
    """RANK, WORLD_SIZE and the others are set."""
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    got = four.run(f"import os; [os.environ[name] for name in {names.split()!r}][:2]").values
    assert got == [[str(rank), "4"] for rank in range(4)]


def test_a_default_name_is_never_forced_on_the_user(four: Session) -> None:
    """A user's own `rank` wins; deleted, the default comes back."""
    four.run("rank = 'mine'")
    assert four.run("rank").values == ["mine"] * 4
    four.run("del rank")
    assert four.run("rank").values == [0, 1, 2, 3]


def test_a_second_task_on_busy_ranks_is_refused(four: Session) -> None:
    """Another thread gets a RuntimeError instead of a mixed-up cell."""
    sink = TextSink()
    thread = threading.Thread(
        target=four.run, args=("import time; print('running'); time.sleep(0.5)",), kwargs={"sink": sink}
    )
    thread.start()
    wait_until(lambda: sink.text)
    with pytest.raises(RuntimeError, match="busy"):
        four.run("2")
    thread.join()


def test_a_rank_starts_no_session_of_its_own(four: Session) -> None:
    """It is told so, in a sentence that says what to do."""
    with pytest.raises(ParallelError, match="a rank or worker cannot start ranks: use") as caught:
        four.run("nbp.Session(2)")
    assert isinstance(caught.value.errors[0], RuntimeError)


def test_what_cannot_be_sent_is_named(four: Session) -> None:
    """The argument or the variable, not a path into our own tuple."""
    lock = threading.Lock()
    with pytest.raises(nbp.errors.UnpicklableError, match="argument 2"):
        four.call(print, 1, lock)
    with pytest.raises(nbp.errors.UnpicklableError, match="'held'"):
        four.push(fine=1, held=lock)
    with pytest.raises(TypeError, match="a cell is its source, a string"):
        four.run(3)  # type: ignore[arg-type]


def test_a_value_hidden_by_a_semicolon_still_travels(four: Session) -> None:
    """The semicolon is about showing."""
    result = four.run("rank * 2;")
    assert result.values == [0, 2, 4, 6]
    assert not result.ranks[1].displays
    quiet = four.run("rank * 3", show_values=False)
    assert quiet.values == [0, 3, 6, 9]
    assert not quiet.ranks[1].displays
