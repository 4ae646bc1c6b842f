"""A pool outlives its workers: a death costs what the worker did, and nothing hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

pytestmark = pytest.mark.matrix(cover=(), size=1)

POOL = """
from tests.harness.ranks import worker_states
from nbparallel.testing.waiting import wait_until

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def kill_at(x):
    if x == 5:
        kill()
    return x

def wait_for(pool, state):
    there = lambda: [p for p, found in worker_states(pool).items() if found == state]
    return wait_until(there, lambda: worker_states(pool), seconds=30)[0]
"""


def run(body: str, folder: Path, method: str = "fork") -> str:
    """Run `body` with the helpers above."""
    import textwrap

    return run_program(POOL + textwrap.dedent(body), folder, method)


def test_a_running_worker_costs_its_task(tmp_path: Path, method: str) -> None:
    """That task raises `WorkerDiedError`, the others have their results, and the pool goes on, within 1 s."""
    run(
        """
        with ctx.Pool(2) as pool:
            pool.map(abs, range(4))
            began = time.monotonic()
            try:
                pool.apply(kill)
            except WorkerDiedError as error:
                assert error.signal_name == "SIGKILL" and str(error.pid) in str(error)
                assert "task 0" in str(error)
            assert time.monotonic() - began < 5
            found, results = [], pool.imap(kill_at, range(8))
            while True:
                try:
                    found.append(next(results))
                except StopIteration:
                    break
                except WorkerDiedError:
                    found.append("died")
            assert found == [0, 1, 2, 3, 4, "died", 6, 7]
            try:
                pool.map(kill_at, range(8), chunksize=1)
            except WorkerDiedError:
                assert pool.map(kill_at, range(4)) == [0, 1, 2, 3]
            else:
                raise AssertionError
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_a_waiting_worker_costs_nothing(tmp_path: Path) -> None:
    """Killed at any moment, again and again."""
    run(
        """
        with ctx.Pool(2) as pool:
            for round in range(60):
                for p in list(pool._pool):
                    try:
                        p.kill()
                    except (AttributeError, ValueError):
                        pass
                assert pool.map_async(abs, range(-4, 0)).get(30) == [4, 3, 2, 1]
        """,
        tmp_path,
    )


@pytest.mark.slow
@pytest.mark.parametrize("half", ["a task", "a result"])
def test_half_a_message_costs_its_task(tmp_path: Path, half: str) -> None:
    """Killed in the middle of a large task or result: that one fails, the others have their results."""
    run(
        f"""
        with ctx.Pool(2) as pool:
            size = 300_000_000
            if "{half}" == "a result":
                job = pool.apply_async(bytes, (size,))
            else:
                job = pool.apply_async(len, (bytes(size),))
            others = pool.imap(abs, range(5))
            worker = wait_for(pool, "reads" if "{half}" == "a task" else "runs")
            if "{half}" == "a result":
                time.sleep(0.2)
            os.kill(worker.pid, signal.SIGKILL)
            try:
                job.get(30)
            except WorkerDiedError as error:
                assert "task 0 of a call of apply" in str(error)
            else:
                raise AssertionError
            assert list(others) == [0, 1, 2, 3, 4]
            assert pool.map_async(abs, range(-4, 0)).get(30) == [4, 3, 2, 1]
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_an_initializer_that_fails(tmp_path: Path) -> None:
    """Workers that end before their first task are not started for ever without a word."""
    run(
        """
        with ctx.Pool(1, kill) as pool:
            try:
                pool.apply_async(abs, (1,)).get(30)
            except WorkerDiedError as error:
                assert "initializer" in str(error)
            else:
                raise AssertionError
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_a_dead_worker_does_not_keep_a_pool_from_its_end(tmp_path: Path) -> None:
    """`terminate` returns soon when a worker was killed just before."""
    run(
        """
        pool = ctx.Pool(2)
        pool.map(abs, range(4))
        os.kill(wait_for(pool, "waits").pid, signal.SIGKILL)
        began = time.monotonic()
        pool.terminate()
        pool.join()
        assert time.monotonic() - began < 5
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_what_cannot_be_rebuilt_costs_its_task(tmp_path: Path, method: str) -> None:
    """An argument or a result whose own code raises in the other process: that task has the error, at once.

    An exception with an argument that it does not pass on is rebuilt without its constructor.
    """
    run(
        """
        class Two(Exception):
            def __init__(self, text, number):
                super().__init__(text)

        class Raises:
            def __reduce__(self):
                return exec, ("1 / 0",)

        def raise_two(x):
            if x == 3:
                raise Two("text", x)
            return x

        def make(x):
            return Raises()

        with ctx.Pool(2) as pool:
            worker = pool.apply(os.getpid)
            for job, word in (
                (pool.apply_async(make, (1,)), "division by zero"),
                (pool.apply_async(abs, (Raises(),)), "division by zero"),
                (pool.map_async(abs, [Raises()]), "division by zero"),
            ):
                try:
                    job.get(30)
                except UnpicklableError as error:
                    assert word in str(error) and error.__cause__ is not None
                else:
                    raise AssertionError(word)
            try:
                pool.map(raise_two, range(6), 1)
            except Two as error:
                assert str(error) == "text" and error.__cause__ is not None
            else:
                raise AssertionError
            found, results = [], pool.imap(raise_two, range(6))
            for _ in range(6):
                try:
                    found.append(results.next(30))
                except Two:
                    found.append(None)
            assert found == [0, 1, 2, None, 4, 5]
            assert worker in [process.pid for process in pool._pool], "no worker was replaced"
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["close", "terminate"])
def test_a_pool_ends_whatever_its_workers_do(tmp_path: Path, way: str) -> None:
    """Killed just before or after the pool is closed, with results and tasks that fill the pipes."""
    run(
        f"""
        import faulthandler, random

        draw = random.Random(14)

        def make(nbytes):
            return bytes(nbytes)

        def kill_one(pool):
            workers = list(pool._pool)  # another thread replaces the dead
            for worker in draw.sample(workers, min(1, len(workers))):
                worker.kill()

        for _ in range(60):
            faulthandler.dump_traceback_later(30, exit=True)
            pool = ctx.Pool(draw.choice([1, 2, 3]))
            sizes = [draw.choice([10, 3_000, 60_000, 300_000]) for _ in range(draw.choice([3, 100]))]
            pool.map_async(make, sizes, 1)
            pool.map_async(len, [bytes(50_000)] * 40, 1)
            for _ in range(draw.choice([0, 1, 3])):
                time.sleep(0.02 * draw.random())
                kill_one(pool)
            pool.{way}()
            if draw.random() < 0.5:
                kill_one(pool)
            pool.join()
            faulthandler.cancel_dump_traceback_later()
        """,
        tmp_path,
    )


def test_join_ends_though_the_program_reaps_the_workers(tmp_path: Path) -> None:
    """As a handler of SIGCHLD does, or CPython's own tests: then a worker has no exit code, and has ended."""
    run(
        """
        def reap(*_):
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass

        pool = ctx.Pool(2)
        assert pool.map(abs, [-1, 2]) == [1, 2]
        signal.signal(signal.SIGCHLD, reap)
        pool.close()
        pool.join()
        """,
        tmp_path,
    )


@pytest.mark.parametrize("size", [10, 200_000])
def test_a_task_that_a_dead_worker_never_read_goes_to_another(tmp_path: Path, size: int) -> None:
    """Whatever its size: an idle worker that is killed costs nothing."""
    run(
        f"""
        with ctx.Pool(1) as pool:
            for _ in range(5):
                pool.apply(len, (b"",))
                os.kill(pool._pool[0].pid, signal.SIGKILL)
                assert pool.apply(len, (bytes({size}),)) == {size}
        """,
        tmp_path,
    )
