"""Interrupts of pools and executors: the wait raises, tasks stop, workers are silent and stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbparallel.testing.waiting import wait_until
from tests.harness.kernel import Kernel
from tests.multiprocessing.programs import run_program

PRESS = """
import threading
from concurrent.futures import CancelledError

def slow(x):
    with open("begun", "a") as file:
        print(x, file=file)
    time.sleep(60)

def pid_of(_):
    time.sleep(0.05)
    return os.getpid()

def press(group):
    def wait_and_press():
        while not os.path.exists("begun"):
            time.sleep(0.01)
        time.sleep(0.1)
        os.killpg(0, signal.SIGINT) if group else os.kill(os.getpid(), signal.SIGINT)

    if os.path.exists("begun"):
        os.unlink("begun")
    thread = threading.Thread(target=wait_and_press)
    thread.start()
    return thread

def interrupted(call, group):
    thread = press(group)
    began = time.monotonic()
    try:
        call()
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("no KeyboardInterrupt")
    finally:
        thread.join()
    assert time.monotonic() - began < 20
    with open("begun") as file:
        assert len(file.readlines()) <= 2, "tasks that waited do not begin"

os.setsid()  # the whole group is interrupted, as by a terminal or a front end
"""

pytestmark = pytest.mark.time_limit(60)


def test_the_same_workers_take_the_next_call(tmp_path: Path) -> None:
    """A call that a terminal or a front end interrupts, with all processes of its group."""
    run_program(
        PRESS
        + """
with ctx.Pool(2) as pool:
    pids = set()
    while len(pids) < 2:  # both have begun
        pids |= set(pool.map(pid_of, range(6), 1))
    interrupted(lambda: pool.map(slow, range(9), 1), True)
    assert set(pool.map(pid_of, range(6), 1)) <= pids
""",
        tmp_path,
        "fork",
    )


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.parametrize("group", [True, False])
def test_a_pool_goes_on(tmp_path: Path, method: str, group: bool) -> None:
    """Whichever wait is interrupted; the same workers take the next call."""
    run_program(
        PRESS
        + f"""
group = {group}
with ctx.Pool(2) as pool:
    pids = set()
    while len(pids) < 2:  # both have begun
        pids |= set(pool.map(pid_of, range(6), 1))
    for call in (
        lambda: pool.map(slow, range(9), 1),
        lambda: pool.apply(slow, (1,)),
        lambda: pool.apply_async(slow, (1,)).get(30),
        lambda: pool.starmap(slow, [(i,) for i in range(5)]),
        lambda: pool.map_async(slow, range(5), 1).wait(),
        lambda: next(pool.imap(slow, range(9))),
        lambda: list(pool.imap_unordered(slow, range(9))),
        lambda: list(pool.imap(slow, range(9), 3)),
    ):
        interrupted(call, group)
        assert set(pool.map(pid_of, range(6), 1)) <= pids
""",
        tmp_path,
        method,
    )


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=1)
def test_other_waits(tmp_path: Path, method: str) -> None:
    """Other jobs of the pool are cancelled; without a wait for it its tasks go on; `join` stops them."""
    run_program(
        PRESS
        + """
with ctx.Pool(2) as pool:
    pool.map(pid_of, range(6), 1)
    jobs = []
    interrupted(lambda: (jobs.append(pool.map_async(slow, range(5), 1)), pool.apply(slow, (1,))), True)
    (other,) = jobs
    try:
        other.get(20)
    except CancelledError as error:
        assert "was interrupted" in str(error)
    else:
        raise AssertionError
    job = pool.apply_async(time.sleep, (2,))
    open("begun", "w").close()
    thread = threading.Thread(target=lambda: (time.sleep(0.5), os.killpg(0, signal.SIGINT)))
    thread.start()
    try:
        time.sleep(30)
    except KeyboardInterrupt:
        thread.join()
    assert job.get(20) is None
pool = ctx.Pool(2)
pool.map(pid_of, range(6), 1)

def join():
    pool.map_async(slow, range(5), 1)
    pool.close()
    pool.join()

interrupted(join, True)
pool.join()
""",
        tmp_path,
        method,
    )


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.parametrize("group", [True, False])
def test_an_executor_goes_on(tmp_path: Path, method: str, group: bool) -> None:
    """It is not broken; leaving its block waits for no call that was interrupted."""
    run_program(
        PRESS
        + f"""
group = {group}
with mp.Executor(2, ctx) as executor:
    pids = set()
    while len(pids) < 2:  # both have begun
        pids |= set(executor.map(pid_of, range(6)))
    for call in (
        lambda: list(executor.map(slow, range(9))),
        lambda: list(executor.map(slow, range(9), chunksize=4)),
        lambda: executor.submit(slow, 1).result(30),
        lambda: executor.submit(slow, 1).exception(),
        lambda: [future.result() for future in [executor.submit(slow, i) for i in range(6)]],
    ):
        interrupted(call, group)
        assert set(executor.map(pid_of, range(6))) <= pids
        assert set(child.pid for child in mp.active_children()) == pids

def leave():
    with mp.Executor(2, ctx) as executor:
        list(executor.map(slow, range(9)))

interrupted(leave, group)
""",
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_what_is_not_an_interrupt_of_the_pool(tmp_path: Path) -> None:
    """A task's own KeyboardInterrupt ends its worker, as in the library; an initializer may ignore SIGINT."""
    run_program(
        PRESS
        + """
with mp.Pool(1) as pool:
    try:
        pool.apply(exec, ("import sys; sys.stderr = None; raise KeyboardInterrupt",))
    except WorkerDiedError as error:
        assert error.exit_code == 1, error
    else:
        raise AssertionError
with mp.Pool(1, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
    job = pool.apply_async(time.sleep, (1,))
    open("begun", "w").close()
    thread = threading.Thread(target=lambda: (time.sleep(0.3), os.killpg(0, signal.SIGINT)))
    thread.start()
    try:
        job.get(20)
    except KeyboardInterrupt:
        thread.join()
    else:
        raise AssertionError
    assert pool.apply(abs, (-1,)) == 1
""",
        tmp_path,
    )


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.parametrize(
    "wait",
    [
        "pool.map(slow, range(9), 1)",
        "pool.apply_async(slow, (1,)).get()",
        "pool.apply_async(slow, (1,)).get(50)",
        "next(pool.imap(slow, range(9)))",
        "list(pool.imap_unordered(slow, range(9)))",
        "executor.submit(slow, 1).result()",
        "executor.submit(slow, 1).exception(50)",
        "list(executor.map(slow, range(9)))",
        "child.join()",
        "child.join(50)",
        "mp.start_processes(slow, (), 2, start_method='fork')",
    ],
)
def test_an_interrupt_just_before_the_system_call(tmp_path: Path, wait: str) -> None:
    """Nothing wakes a wait then; another thread that takes the signal has the same effect, each time."""
    run_program(
        PRESS
        + f"""
executor = mp.Executor(2, ctx)
with ctx.Pool(2) as pool, executor:
    pids = set()
    while len(pids) < 4:  # all have begun
        pids |= set(pool.map(pid_of, range(6), 1)) | set(executor.map(pid_of, range(6)))
    child = ctx.Process(target=slow, args=(1,))

    def call():
        if "child" in {wait!r}:
            child.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # in this thread, which waits
        {wait}

    try:
        interrupted(call, False)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if "child" in {wait!r}:
        child.kill()
        child.join()
    assert set(pool.map(pid_of, range(6), 1)) | set(executor.map(pid_of, range(6))) <= pids
""",
        tmp_path,
        "fork",
    )


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.parametrize("of", ["pool.apply_async(loses_it, (1,)).get()", "[*executor.map(loses_it, [1])]"])
def test_a_task_misses_the_signal(tmp_path: Path, of: str) -> None:
    """As if it came just before the task's system call: no handler runs."""
    run_program(
        PRESS
        + f"""
def loses_it(x):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    with open("begun", "a") as file:
        print(x, file=file)
    signal.sigwait([signal.SIGINT])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    time.sleep(60)

executor = mp.Executor(1, ctx)
with ctx.Pool(1) as pool, executor:
    pids = pool.map(pid_of, [1]) + list(executor.map(pid_of, [1]))
    interrupted(lambda: {of}, False)
    began = time.monotonic()
    assert pool.map(pid_of, [1]) + list(executor.map(pid_of, [1])) == pids
    assert time.monotonic() - began < 20, "the tasks were not interrupted"
""",
        tmp_path,
        "fork",
    )


SETUP = """
import os, time
import nbparallel.multiprocessing as mp

def slow(x):
    open(begun, "w").close()
    time.sleep(60)

def pid_of(_):
    time.sleep(0.05)
    return os.getpid()

pool, executor = mp.Pool(2), mp.Executor(2)
pids = set()
while len(pids) < 4:  # all have begun
    pids |= set(pool.map(pid_of, range(6), 1)) | set(executor.map(pid_of, range(6)))
"""


@pytest.mark.slow
def test_in_a_notebook(any_kernel: Kernel, tmp_path: Path) -> None:
    """The stop button: only `KeyboardInterrupt` is shown, and the next cell works with the same workers."""
    begun = tmp_path / "begun"
    assert any_kernel.run(f"begun = {str(begun)!r}\n{SETUP}", timeout=40).status == "ok"
    for call in (
        "pool.map(slow, range(9), 1)",
        "pool.apply_async(slow, (1,)).get()",
        "list(pool.imap(slow, range(9)))",
        "list(executor.map(slow, range(9)))",
        "executor.submit(slow, 1).result()",
    ):
        cell = any_kernel.begin(call)
        wait_until(begun.exists, "a task runs")
        any_kernel.interrupt()
        outcome = cell.wait(20)
        assert (outcome.status, outcome.ename) == ("error", "KeyboardInterrupt"), call
        assert "Traceback" not in outcome.stderr, outcome.stderr
        begun.unlink()
        again = any_kernel.run(
            "print(set(pool.map(pid_of, range(6), 1)) | set(executor.map(pid_of, range(6))) <= pids)",
            timeout=40,
        )
        assert (again.stdout, again.stderr) == ("True\n", ""), call
    outcome = any_kernel.run("pool.terminate(); executor.shutdown()", timeout=40)
    assert outcome.status == "ok", outcome.traceback
