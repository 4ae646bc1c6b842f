"""Pools that replace a worker after some tasks: `maxtasksperchild`, `max_tasks_per_child` of `Executor`."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

TASKS = """
def work(n):
    return os.getpid(), np.full(100_000, n)  # 800 KB: in shared memory, which the worker made

def check(results, tasks):
    by_worker = {}
    for n, (pid, made) in enumerate(results):
        assert nbp.is_shared(made) and (made == n).all(), "a worker's array outlives the worker"
        by_worker.setdefault(pid, []).append(n)
    assert all(len(some) <= tasks for some in by_worker.values()), by_worker
    assert sum(map(len, by_worker.values())) == 6
    return by_worker
"""


@pytest.mark.matrix(cover=(), size=1)
def test_a_pools_workers_end_after_their_tasks(tmp_path: Path, method: str) -> None:
    """One worker of two tasks each: three for six, one after the other; the initializer runs in each."""
    run_program(
        TASKS
        + textwrap.dedent("""
        started = ctx.SimpleQueue()
        def initialize():
            started.put(os.getpid())

        with ctx.Pool(1, initialize, maxtasksperchild=2) as pool:
            by_worker = check(pool.map(work, range(6), chunksize=1), 2)
            assert len(by_worker) == 3, by_worker
            assert list(map(len, by_worker.values())) == [2, 2, 2]
            found = {started.get() for _ in range(3)}
            assert found >= set(by_worker), (found, by_worker)
            pool.close()
            pool.join()
        """),
        tmp_path,
        method,
    )


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=1)
def test_a_worker_that_dies_is_no_worker_that_was_replaced(tmp_path: Path, method: str) -> None:
    """The task of one that is killed fails with its name, the others are done."""
    run_program(
        """
        def work(n):
            if n == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return n

        with ctx.Pool(1, maxtasksperchild=2) as pool:
            jobs = [pool.apply_async(work, (n,)) for n in range(6)]
            for n, job in enumerate(jobs):
                try:
                    assert job.get(30) == n
                except WorkerDiedError as error:
                    assert n == 3 and "SIGKILL" in str(error), (n, error)
                else:
                    assert n != 3
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_an_executors_workers_end_after_their_tasks(tmp_path: Path) -> None:
    """The same of `Executor`, for fresh interpreters only; the library's own waits without end."""
    run_program(
        TASKS
        + textwrap.dedent("""
        ctx = mp.get_context("forkserver")
        with mp.Executor(1, ctx, max_tasks_per_child=2) as executor:
            assert len(check(list(executor.map(work, range(6))), 2)) == 3
        check(list(mp.Executor(1, ctx, max_tasks_per_child=2).map(work, range(6))), 2)  # nothing holds it
        """),
        tmp_path,
        "forkserver",
    )


@pytest.mark.slow
def test_a_worker_in_anothers_place_starts_as_the_first(tmp_path: Path) -> None:
    """A Ctrl-C that meets its start waits, too; without a context both are spawned, as the library's."""
    run_program(
        """
        def start(_):
            return mp.current_process().defers_sigint, type(mp.current_process()).__name__

        mp.set_start_method("forkserver")
        with mp.Executor(1, max_tasks_per_child=1) as executor:
            assert list(executor.map(start, range(3))) == [(True, "SpawnProcess")] * 3
        """,
        tmp_path,
        "spawn",
    )
