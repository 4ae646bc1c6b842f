"""F14: what user code on a rank started goes when the rank dies, and when everybody dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from nbparallel.session import Session
from nbparallel.testing.waiting import wait_until
from tests.faults.deaths.test_reclaim import has_ended
from tests.harness.turns import Promised

WAYS = {
    "subprocess": "pids.append(subprocess.Popen(['sleep', '1000']).pid)",
    "subprocess in a session of its own": (
        "pids.append(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
    ),
    "a shell with job control": (
        "shell = subprocess.Popen(['bash', '-c', 'set -m; sleep 1000 & echo $!; wait'],"
        " stdout=subprocess.PIPE, text=True)\n"
        "pids += [shell.pid, int(shell.stdout.readline())]"
    ),
    "mp.MemoryPool": (
        "import multiprocessing as mp\n"
        "pool = mp.get_context('fork').Pool(2)\n"
        "pids += [process.pid for process in pool._pool]"
    ),
    "os.fork": "pids.append(os.fork())\nif not pids[-1]: time.sleep(1000); os._exit(0)",
    "setsid": "pids.append(os.fork())\nif not pids[-1]: os.setsid(); time.sleep(1000); os._exit(0)",
    "double fork": (
        "read, write = os.pipe()\n"
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    child = os.fork()\n"
        "    if child: os.write(write, str(child).encode()); os._exit(0)\n"
        "    time.sleep(1000); os._exit(0)\n"
        "os.wait(); pids.append(int(os.read(read, 20)))"
    ),
    "daemon": (
        "read, write = os.pipe(); os.set_inheritable(write, True)\n"
        "code = 'import os, sys, time\\n'"
        "'if os.fork(): os._exit(0)\\n'"
        "'os.setsid()\\n'"
        "'if os.fork(): os._exit(0)\\n'"
        "'os.write(int(sys.argv[1]), str(os.getpid()).encode()); time.sleep(1000)'\n"
        "subprocess.run([sys.executable, '-c', code, str(write)], pass_fds=[write])\n"
        "pids.append(int(os.read(read, 20)))"
    ),
}


def alive(pid: int) -> bool:
    """Return whether a process runs: a zombie does not."""
    return not has_ended(pid)


START = "import os, subprocess, sys, time, signal\npids = []\n"


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("way", WAYS)
def test_f14_what_a_rank_started_goes_when_the_rank_is_killed(way: str, promised: Promised) -> None:
    """The dead rank's processes end with it; those of the living rank are left alone."""
    with Session(2) as session:
        session.run(START + WAYS[way])
        mine, others = session.pull("pids")[1], session.pull("pids")[0]
        assert all(map(alive, mine + others))
        os.kill(session.statistics().ranks[1].pid, signal.SIGKILL)
        with promised(1.0):
            wait_until(lambda: not any(map(alive, mine)), mine)
        assert all(map(alive, others)), "the living rank's were killed"
        # some of its processes end by themselves, before the notebook is notified of the rank's end
        wait_until(lambda: session.statistics().ranks[1].state == "dead")
        assert session.run("rank").values == [0, 1]
        assert all(map(alive, others))


OWNER = """
import json, sys, nbparallel as nbp
session = nbp.Session(2)
session.run({source!r})
print(json.dumps([session.statistics().supervisor_pid, *sum(session.pull("pids"), [])]), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("way", WAYS)
def test_f14_what_a_rank_started_goes_when_the_notebook_is_killed(way: str, promised: Promised) -> None:
    """Whatever it was started as, the supervisor finds it before it ends."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER.format(source=START + WAYS[way])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as owner:
        assert owner.stdout is not None
        supervisor, *pids = json.loads(owner.stdout.readline())
        assert all(map(alive, pids))
        owner.kill()
        with promised(1.0):
            wait_until(lambda: not any(map(alive, [supervisor, *pids])), pids)


@pytest.mark.slow
@pytest.mark.alone  # every new session of this machine ends what a killed one left
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("way", ["setsid", "daemon", "subprocess in a session of its own"])
def test_f14_what_a_rank_started_goes_when_everybody_is_killed(way: str) -> None:
    """Nobody was left to end it: the next session does (any of this machine, so that the note may be its)."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", OWNER.format(source=START + WAYS[way])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as owner,
        Session(1) as neighbour,
    ):
        assert owner.stdout is not None
        supervisor, *pids = json.loads(owner.stdout.readline())
        neighbour.run(START + WAYS[way])
        for kill in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(supervisor, kill)
            os.kill(owner.pid, kill)
        owner.wait()
        wait_until(lambda: not alive(supervisor), supervisor)
        assert all(map(alive, pids))
        with Session(1) as session:
            session.run("rank")
            wait_until(lambda: not any(map(alive, pids)), pids)
        assert all(map(alive, neighbour.pull("pids")[0])), "of a living session"
