"""Guests end with their root also when no supervisor is left to end them."""

import os
import signal
import subprocess
import sys

import pytest

from nbparallel.multiprocessing import household
from nbparallel.testing.waiting import wait_until
from tests.multiprocessing.household.family import Child, is_gone

FAMILY = """
import os, signal, sys
import nbparallel as nbp
import nbparallel.multiprocessing as mp
from nbparallel.multiprocessing import household
def say(role, pid):
    os.write(1, b"%s %d\\n" % (role.encode(), pid))
def inner():
    say("inner", os.getpid()); signal.pause()
def outer(method):
    mp.get_context(method).Process(target=inner, daemon=False).start()
    say("outer", os.getpid()); signal.pause()
if not (pid := os.fork()):
    signal.alarm(60); signal.pause()
say("inert", pid)
"""


@pytest.mark.slow
@pytest.mark.parametrize("second", ["fork", "spawn"])
@pytest.mark.parametrize("first", ["fork", "spawn", "forkserver"])
def test_the_supervisor_is_killed_and_then_the_root(first, second, promised, tmp_path):
    """Guests and their guests, of any start method, are gone within a second of the root's end.

    A process that the root has forked without us neither keeps them nor ends with them.
    """
    code = FAMILY + (
        f"mp.get_context({first!r}).Process(target=outer, args=({second!r},)).start()\n"
        "say('supervisor', household.report().supervisor); signal.pause()\n"
    )
    # whatever could remove its folder is killed, as where the library's own process is
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    lines = [process.stdout.readline().split() for _ in range(4)]
    pids = {role.decode(): int(pid) for role, pid in lines}
    os.kill(pids["supervisor"], signal.SIGKILL)
    wait_until(lambda: is_gone(pids["supervisor"]))
    guests = [pids["inner"], pids["outer"]]
    assert not any(map(is_gone, guests))  # they go on without it
    process.kill()
    with promised(1.0):
        wait_until(lambda: all(map(is_gone, guests)))
    assert not is_gone(pids["inert"])
    os.kill(pids["inert"], signal.SIGKILL)
    process.communicate()


def test_guests_of_a_killed_supervisor_end_with_the_household(root, promised):
    """They live while the root has another supervisor, and end with `stop`."""
    child = Child(lambda point: (point("started"), signal.pause()))
    child.await_point("started")
    supervisor = household.report().supervisor
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: is_gone(supervisor))
    assert household.membership() is not root
    assert wait_until(household.report).supervisor != supervisor  # the second one serves
    assert not is_gone(child.pid)
    with promised(1.0):
        household.stop()
        assert child.wait() == -signal.SIGKILL
