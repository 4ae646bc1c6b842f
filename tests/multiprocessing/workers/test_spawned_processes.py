"""`spawn` and `start_processes`: processes that succeed or fail together, by torch's own cases and more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import nbparallel.multiprocessing as mp
from nbparallel.testing.waiting import wait_until
from tests.harness.kernel import Kernel
from tests.multiprocessing.household.family import is_gone
from tests.multiprocessing.programs import HEAD, run_program

START = """
def start(function, *args, nprocs=2, **options):
    return mp.start_processes(function, args, nprocs, start_method={method!r}, **options)
"""


def run(body: str, folder: Path, method: str) -> str:
    """Run a script that has `start`."""
    return run_program(START.format(method=method) + textwrap.dedent(body), folder, method)


@pytest.mark.slow
def test_success_and_order(tmp_path: Path, method: str) -> None:
    """Each gets its index first, shared arrays arrive as the same memory, `join` is torch's."""
    run(
        """
        x = nbp.zeros(2)
        def fill(index, array, add):
            array[index] = index + add
        assert start(fill, x, 10) is None
        assert x.tolist() == [10, 11], x
        go = ctx.Event()
        context = start(lambda index, event: event.wait(), go, join=False)
        assert context.join(timeout=0.01) is False
        assert context.pids() == [p.pid for p in context.processes] and len(set(context.pids())) == 2
        go.set()
        while not context.join():
            pass
        assert context.join() is True
        assert [p.exitcode for p in context.processes] == [0, 0]
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_failures(tmp_path: Path, method: str) -> None:
    """The error has torch's words and attributes, and the exception as cause; the others are ended."""
    run(
        """
        class Mine(ValueError):
            def __init__(self, text, code):
                super().__init__(text, code)
                self.code = code

        def inner():
            raise Mine("here it is", 7)

        def fails(index, which):
            if index == which:
                inner()
            time.sleep(60)

        def caught(*args, **options):
            try:
                start(*args, **options)
            except mp.ProcessException as error:
                assert not mp.active_children()
                return error
            raise AssertionError("nothing was raised")

        began = time.monotonic()
        error = caught(fails, 1)
        assert time.monotonic() - began < 20
        assert type(error) is mp.ProcessRaisedException
        assert (error.error_index, error.error_pid > 0) == (1, True)
        head = "\\n\\n-- Process 1 terminated with the following error:\\nTraceback"
        assert error.msg.startswith(head), error.msg
        assert "in inner" in error.msg and "spawned_processes" not in error.msg, error.msg
        cause = error.__cause__
        assert isinstance(cause, Mine) and cause.code == 7, cause
        assert "in inner" in str(cause.__cause__)

        def hard(index):
            {0: os.abort, 1: lambda: time.sleep(60)}[index]()
        error = caught(hard)
        assert type(error) is mp.ProcessExitedException
        assert str(error) == "process 0 terminated with signal SIGABRT", error
        assert (error.exit_code, error.signal_name) == (-signal.SIGABRT, "SIGABRT")

        error = caught(lambda index: os._exit(123))
        assert str(error) == f"process {error.error_index} terminated with exit code 123", error
        assert (error.exit_code, error.signal_name) == (123, None)

        error = caught(lambda index: sys.exit(0 if index else 5))
        assert (error.error_index, error.exit_code) == (0, 5)

        # one succeeds first, then the other one fails: the second call of join reports it
        def late(index):
            if index:
                time.sleep(0.2)
                raise Mine("late", 1)
        context = start(late, join=False)
        try:
            while not context.join():
                pass
        except mp.ProcessRaisedException as error:
            assert error.error_index == 1
        else:
            raise AssertionError("nothing was raised")

        # more than a pipe holds, and what cannot be sent
        error = caught(lambda index: 1 / 0 if index else exec("raise ValueError('x' * 300_000)"))
        assert len(str(error)) > 200_000 or "division" in str(error)
        def unpicklable(index):
            import threading
            raise Mine("a lock", threading.Lock())
        error = caught(unpicklable, nprocs=1)
        assert isinstance(error.__cause__, RemoteError) and "a lock" in str(error.__cause__)

        import pickle
        copy = pickle.loads(pickle.dumps(caught(hard)))
        assert (copy.error_index, copy.exit_code, copy.signal_name) == (0, -6, "SIGABRT")
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_grace_period(tmp_path: Path, method: str) -> None:
    """The others may end by themselves when one has failed; one that ignores SIGTERM is killed."""
    run(
        """
        def work(index, ready):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ready.wait()  # the grace is none for what has not begun
            if index == 0:
                raise ValueError("first")
            time.sleep(0.3 if index == 1 else 60)
            os._exit(9)
        ready = ctx.Barrier(3)  # kept: the others open it by its name
        context = start(work, ready, nprocs=3, join=False)
        try:
            while not context.join(grace_period=1):
                pass
        except mp.ProcessRaisedException as error:
            assert "first" in str(error)
        assert [p.exitcode for p in context.processes][1:] == [9, -signal.SIGKILL], context.processes
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_they_end_with_their_parent(
    tmp_path: Path, method: str, promised: Callable[[float], AbstractContextManager[None]]
) -> None:
    """They are not daemonic, and their parent, one of the same kind, is killed: torch's nested case."""
    body = """
        def inner(index):
            os.write(1, b"inner %d\\n" % os.getpid())
            time.sleep(60)
        def outer(index):
            os.write(1, b"outer %d\\n" % os.getpid())
            start(inner)
        start(outer, nprocs=1)
        """
    script = tmp_path / "script.py"
    head = HEAD.format(method=method) + START.format(method=method)
    script.write_text(head + textwrap.dedent(body))
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().split() for _ in range(3)]
        inner = [int(pid) for role, pid in lines if role == b"inner"]
        (outer,) = [int(pid) for role, pid in lines if role == b"outer"]
        os.kill(outer, signal.SIGKILL)
        with promised(1.0):
            wait_until(lambda: all(map(is_gone, [outer, *inner])))
        _, stderr = process.communicate()
        assert b"ProcessExitedException: process 0 terminated with signal SIGKILL" in stderr
    assert process.returncode == 1


def test_arguments_that_cannot_be_sent(tmp_path: Path) -> None:
    """The error names it, and no process is left."""
    run(
        """
        import threading
        try:
            start(print, threading.Lock())
        except UnpicklableError as error:
            assert "lock" in str(error)
        else:
            raise AssertionError("nothing was raised")
        assert not mp.active_children()
        """,
        tmp_path,
        "spawn",
    )


def test_spawn_has_one_start_method() -> None:
    """Another one is ignored with a warning, as in torch."""
    with pytest.warns(FutureWarning, match="call start_processes"):
        mp.spawn(print, nprocs=0, start_method="fork")


def test_strategies() -> None:
    """torch.multiprocessing's three functions are there, and are those of the package."""
    import nbparallel as nbp

    assert mp.get_sharing_strategy() == nbp.get_sharing_strategy()
    assert mp.get_sharing_strategy() in mp.get_all_sharing_strategies()
    assert mp.set_sharing_strategy is nbp.set_sharing_strategy


@pytest.mark.slow
def test_functions_of_cells_and_an_interrupt(kernel: Kernel, tmp_path: Path) -> None:
    """A function of a cell needs no module; an interrupt ends the processes silently; the next cell works."""
    setup = f"""
import time
import nbparallel as nbp, nbparallel.multiprocessing as mp
total = nbp.zeros(2)
def work(index, method, seconds):
    total[index] += 1
    if seconds:
        open({str(tmp_path)!r} + f"/{{method}}{{index}}", "w").close()
    time.sleep(seconds)
"""
    assert kernel.run(setup).status == "ok"
    for method in ("spawn", "fork", "forkserver"):
        start = f"mp.start_processes(work, ({method!r}, %d), 2, start_method={method!r})"
        cell = kernel.begin(start % 60)
        kernel.wait_until(lambda m=method: len(list(tmp_path.glob(f"{m}?"))) == 2, 20, "the functions run")
        kernel.interrupt()
        outcome = cell.wait(20)
        assert (outcome.status, outcome.ename) == ("error", "KeyboardInterrupt")
        assert "Traceback" not in outcome.stderr + kernel.log()
        assert kernel.run(f"print(mp.active_children())\n{start % 0}").stdout == "[]\n"
    assert kernel.run("print(total.tolist())").stdout == "[6.0, 6.0]\n"
