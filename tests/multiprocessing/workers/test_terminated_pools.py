"""A pool that is terminated: no result comes any more, and no wait for one is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

PROGRAM = """
import threading
from concurrent.futures import CancelledError

def cancelled(wait):
    try:
        wait()
    except CancelledError as error:
        assert "`with` block" in str(error), error
    else:
        raise AssertionError("a result came")

def pass_on(x, seconds):
    time.sleep(seconds)
    return x
"""


@pytest.mark.matrix(cover=(), size=1)
def test_a_wait_after_the_block_ends(tmp_path: Path, method: str) -> None:
    """Whatever is asked for after a `with` block raises, unless it was there before; so do waits inside."""
    run_program(
        PROGRAM
        + """
called = []
with ctx.Pool(2) as pool:
    done = pool.apply_async(abs, (-5,))
    done.wait()
    slow = [pool.apply_async(pass_on, (n, 60), error_callback=called.append) for n in range(4)]
    several = pool.map_async(time.sleep, [60] * 4)
    slowly, unordered = pool.imap(time.sleep, [60] * 9), pool.imap_unordered(time.sleep, [60] * 9)
    waiting = threading.Thread(target=cancelled, args=(slow[0].get,))
    waiting.start()
waiting.join(30)
assert not waiting.is_alive()
assert done.get() == 5
for job in (*slow, several):
    cancelled(job.get)
    assert job.ready() and not job.successful()
for results in (slowly, unordered):
    cancelled(lambda: next(results))
    assert list(results) == []
assert not called, "as in the library"
""",
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_a_callback_may_terminate_the_pool(tmp_path: Path) -> None:
    """The job whose callback it is keeps its result or error; the others are cancelled."""
    run_program(
        PROGRAM
        + """
def fails():
    raise KeyError("mine")

for way in ("apply", "fails", "map"):
    pool = ctx.Pool(1)
    end = dict(callback=lambda _: pool.terminate(), error_callback=lambda _: pool.terminate())
    if way == "map":
        job = pool.map_async(abs, [-1, -2], **end)
    else:
        job = pool.apply_async(*((abs, (-1,)) if way == "apply" else (fails,)), **end)
    other = pool.apply_async(time.sleep, (60,))
    try:
        assert job.get(30) == (1 if way == "apply" else [1, 2])
    except KeyError:
        assert way == "fails"
    else:
        assert way != "fails"
    cancelled(lambda: other.get(30))
    pool.join()
""",
        tmp_path,
    )


@pytest.mark.slow
def test_a_worker_that_ignores_sigterm_is_killed(tmp_path: Path, method: str) -> None:
    """The library waits for its end without a limit."""
    run_program(
        """
def ignore():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

with ctx.Pool(2, ignore) as pool:
    pids = pool.map(lambda _: (time.sleep(0.2), os.getpid())[1], range(4), chunksize=1)
    assert len(set(pids)) == 2, pids
for pid in pids:
    assert not os.path.exists(f"/proc/{pid}"), "it is left"
""",
        tmp_path,
        method,
    )
