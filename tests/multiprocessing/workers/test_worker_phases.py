"""A pool's worker is killed in each of its phases, whatever it works for; a pool inside it goes with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program
from tests.multiprocessing.workers.test_dead_workers import run

pytestmark = [pytest.mark.slow, pytest.mark.matrix(cover=(), size=1)]

WAYS = {
    "map": "pool.map_async(task, [size] * 3, chunksize=1)",
    "imap": "pool.imap(task, [size] * 3)",
    "apply_async": "[pool.apply_async(task, (size,)) for _ in range(3)]",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", ["waits", "reads", "runs", "writes"])
def test_killed_in_each_phase(tmp_path: Path, step: str, way: str) -> None:
    """What it costs is a `WorkerDiedError` of the jobs concerned, or nothing; then the pool works."""
    size = {"reads": "bytes(200_000_000)", "writes": "200_000_000"}.get(step, "1")
    run(
        f"""
        def task(x):
            if x == 1:
                time.sleep(0.5)
            return bytes(x)
        def get(work):
            for job in work if isinstance(work, list) else [work]:
                if hasattr(job, "get"):
                    job.get(60)
                    continue
                for _ in range(3):
                    try:
                        job.next(60)
                    except WorkerDiedError:
                        global died
                        died = True
                    except StopIteration:
                        return
        with ctx.Pool(2) as pool:
            pool.map(abs, range(4))
            size, died = {size}, False
            if "{step}" == "reads":
                task = len  # the bytes themselves go through the pipe
            if "{step}" == "waits":
                os.kill(wait_for(pool, "waits").pid, signal.SIGKILL)
            work = {WAYS[way]}
            if "{step}" != "waits":
                worker = wait_for(pool, "reads" if "{step}" == "reads" else "runs")
                if "{step}" == "writes":
                    time.sleep(0.2)
                os.kill(worker.pid, signal.SIGKILL)
            try:
                get(work)
            except WorkerDiedError:
                died = True
            assert died == ("{step}" != "waits"), died
            assert pool.map_async(abs, range(-4, 0)).get(30) == [4, 3, 2, 1]
        """,
        tmp_path,
    )


def test_an_iteration_whose_tasks_come_late(tmp_path: Path) -> None:
    """It has the error of the task that was lost and goes on, although its length becomes known later."""
    run(
        """
        import threading
        go_on = threading.Event()
        def items():
            yield bytes(200_000_000)
            go_on.wait(60)
            yield b""
        for way in ("imap", "imap_unordered"):
            with ctx.Pool(2) as pool:
                go_on.clear()
                pool.map(abs, range(4))
                work = getattr(pool, way)(len, items())
                os.kill(wait_for(pool, "reads").pid, signal.SIGKILL)
                try:
                    work.next(30)
                except WorkerDiedError:
                    pass
                else:
                    raise AssertionError
                go_on.set()
                assert pool.map_async(abs, range(-4, 0)).get(30) == [4, 3, 2, 1]  # later tasks were sent
                assert list(work) == [0]
        """,
        tmp_path,
    )


def test_a_pool_inside_a_pool(tmp_path: Path, method: str) -> None:
    """A worker that has a pool is killed: its workers end with it, the task fails, and the next one works."""
    run_program(
        """
        from nbparallel.testing.waiting import wait_until

        def nested(kill):
            with mp.get_context("fork").Pool(2) as inner:
                pids = inner.map(lambda _: os.getpid(), range(4))
                if kill:
                    told.send(sorted(set(pids)))
                    os.kill(os.getpid(), signal.SIGKILL)
                return inner.map(abs, range(-4, 0))
        def begin(end):
            global told
            told = end
        def is_gone(pid):
            try:
                return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                return True
        came, told = ctx.Pipe(duplex=False)
        with ctx.Pool(1, begin, (told,)) as pool:
            assert pool.apply_async(nested, (False,)).get(30) == [4, 3, 2, 1]
            job = pool.apply_async(nested, (True,))
            assert came.poll(30)
            pids = came.recv()
            try:
                job.get(30)
            except WorkerDiedError:
                pass
            else:
                raise AssertionError
            wait_until(lambda: all(map(is_gone, pids)), seconds=5)
            assert pool.apply_async(nested, (False,)).get(30) == [4, 3, 2, 1]
        """,
        tmp_path,
        method,
    )
