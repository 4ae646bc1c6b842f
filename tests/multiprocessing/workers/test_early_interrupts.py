"""Interrupts of the whole group while workers start: no worker says a word, and all of them stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

STORM = """
import threading
from contextlib import contextmanager

root = os.getpid()
os.setsid()

def interrupt(*_):
    if os.getpid() != root:
        raise KeyboardInterrupt  # as the handler that a process begins with

@contextmanager
def storm():
    "The whole group is interrupted all the time; this process takes no notice."
    ended = threading.Event()

    def press():
        while not ended.is_set():
            os.killpg(0, signal.SIGINT)
            time.sleep(0.001)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

signal.signal(signal.SIGINT, interrupt)
"""

pytestmark = pytest.mark.time_limit(60)


def test_workers_start_in_a_storm(tmp_path: Path, method: str) -> None:
    """Those of a pool, of an executor and of a loader; tasks that run are not interrupted either."""
    run_program(
        STORM
        + """
with storm():
    with ctx.Pool(2) as pool:
        workers = [worker.pid for worker in pool._pool]
        assert pool.map(abs, range(-50, 0), 1) == list(range(50, 0, -1))
        assert [worker.pid for worker in pool._pool] == workers
    with mp.Executor(2, ctx) as executor:
        assert list(executor.map(abs, range(-50, 0))) == list(range(50, 0, -1))
    loader = mp.DataLoader(list(range(8)), batch_size=2, num_workers=2, start_method=ctx.get_start_method())
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    loader.close()
""",
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_a_manager_starts_in_a_storm(tmp_path: Path, method: str) -> None:
    """Its process ignores interrupts, from the first moment on."""
    run_program(
        STORM
        + """
with storm(), ctx.Manager() as manager:
    names = manager.dict(a=1)
    assert names["a"] == 1
    del names
""",
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_other_processes_are_interrupted(tmp_path: Path, method: str) -> None:
    """A process gets interrupts from its start, also where a pool has started the fork server."""
    run_program(
        """
        def wait_for_interrupt(ready):
            try:
                ready.send(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
                time.sleep(60)
            except KeyboardInterrupt:
                sys.exit(7)

        with ctx.Pool(1) as pool:
            assert pool.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, ())) == set()
        receive, ready = ctx.Pipe(False)
        process = ctx.Process(target=wait_for_interrupt, args=(ready,))
        process.start()
        assert receive.recv() == set()
        os.kill(process.pid, signal.SIGINT)
        process.join()
        assert process.exitcode == 7
        """,
        tmp_path,
        method,
    )
