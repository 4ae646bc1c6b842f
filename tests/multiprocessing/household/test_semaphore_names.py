"""Semaphores with names, as locks of ``forkserver`` and ``spawn`` are: they go with their processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nbparallel.session import Session
from nbparallel.testing.waiting import wait_until
from tests.harness.ranks import rank_pool

PROGRAM = """
import os, signal
import nbparallel.multiprocessing as mp
from nbparallel.multiprocessing import household
context = mp.get_context("forkserver")
lock, queue = context.Lock(), context.Queue()

def use(lock, queue):
    with lock:
        queue.put(os.getpid())

def run():
    process = context.Process(target=use, args=(lock, queue))
    process.start()
    assert queue.get(timeout=30) == process.pid
    process.join()

run()
print(os.path.basename(lock._semlock.name), flush=True)
"""


def _of(name: str) -> list[str]:
    """Return what begins as a semaphore does, but for its last part."""
    prefix = f"sem.{name.rpartition('-')[0]}-"
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(prefix)]


def test_they_go_with_a_group_that_is_killed(promised):
    """As a front end ends a kernel: the library's resource tracker, which removes them, is in the group."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM + "signal.pause()"], stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert f"sem.{name}" in _of(name)
        os.killpg(process.pid, signal.SIGKILL)
        with promised(1.0):
            wait_until(lambda: not _of(name))


@pytest.mark.slow
def test_they_go_with_the_session_of_a_rank_that_is_killed():
    """The supervisor ends what the rank has started, its tracker too."""
    with Session(1) as session:
        cell = PROGRAM.replace("print(", "name = (").replace(", flush=True", "")
        session.run(cell)
        (name,) = session.pull("name")
        assert f"sem.{name}" in _of(name)
        os.kill(session.statistics().ranks[0].pid, signal.SIGKILL)
        wait_until(lambda: rank_pool(session).dead(), "the death of the rank")
        session.run("pass")
    assert not _of(name)


WITHOUT_LOCKS = """
import nbparallel.multiprocessing as mp
process = mp.get_context("forkserver").Process(target=int)
process.start(); process.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [PROGRAM, WITHOUT_LOCKS], ids=["locks", "processes"])
@pytest.mark.parametrize("killed", [False, True])
def test_a_ranks_folder_goes_with_its_session(killed: bool, program: str):
    """The end of a rank does not do the last steps of multiprocessing, which remove it."""
    with Session(1) as session:
        session.run(
            "import multiprocessing.util\n"
            + program.replace("print(", "name = (").replace(", flush=True", "")
        )
        session.run("folder = multiprocessing.util.get_temp_dir()")
        (folder,) = session.pull("folder")
        assert Path(folder).is_dir()
        if killed:
            os.kill(session.statistics().ranks[0].pid, signal.SIGKILL)
            wait_until(lambda: rank_pool(session).dead(), "the death of the rank")
            session.run("pass")
    assert not Path(folder).exists()


@pytest.mark.slow
def test_they_stay_while_their_process_lives():
    """The end of a household does not take away what the process still uses; that is its own last step."""
    code = PROGRAM + "household.stop()\nrun()\n"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert not _of(done.stdout.strip())
