"""F15, F16: signals to the supervisor change nothing, and neither does a notebook that reaps for itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from nbparallel.session import Session
from nbparallel.testing.waiting import wait_until

SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGQUIT, signal.SIGUSR1),
    *(signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGRTMIN),
)


@pytest.mark.slow
def test_f15_the_supervisor_is_not_disturbed_by_signals() -> None:
    """A hundred of each while ranks talk and make memory: the same processes, the right results."""
    with Session(2) as session:
        before = session.statistics()
        pending = session.submit(
            "total = 0\nfor step in range(300):\n    x = nbp.zeros(100_000)\n"
            "    total += all_reduce(step)\ntotal"
        )
        rounds = 0
        while rounds < 100 or not pending.done():
            for number in SIGNALS:
                os.kill(before.supervisor_pid, number)
            rounds += 1
            pending.wait(0.001)
        assert pending.result().values == [2 * sum(range(300))] * 2
        after = session.statistics()
        assert after.supervisor_pid == before.supervisor_pid
        assert [rank.pid for rank in after.ranks] == [rank.pid for rank in before.ranks]
        os.kill(after.ranks[1].pid, signal.SIGKILL)
        wait_until(lambda: session.statistics().ranks[1].state == "dead")
        assert session.run("all_reduce(1)").values == [2, 2], "it still sees deaths, and starts ranks"


THIEF = """
import os, signal, sys, threading, time
from nbparallel.errors import ParallelError, PeerFailedError, RankDiedError
from nbparallel.session import Session
from nbparallel.testing.waiting import wait_until

def steal():
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.001)

threading.Thread(target=steal, daemon=True).start()
for way in ("stolen", "ignored"):
    if way == "ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with Session(2) as session:
        supervisor = session.statistics().supervisor_pid
        os.kill(session.statistics().ranks[1].pid, signal.SIGKILL)
        wait_until(lambda: session.statistics().ranks[1].state == "dead")
        notes = session.run("import os, signal, time\\nx = rank").notes
        assert any("rank 1 was killed by SIGKILL" in note for note in notes), notes
        for rest in ("while True: time.sleep(0.01)", "all_reduce(1)")[way == "ignored":]:
            try:
                session.run(f"if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\\n{rest}")
            except ParallelError as error:
                assert isinstance(error.errors[1], RankDiedError), error
                assert error.errors[1].signal_name == "SIGKILL", error
                assert isinstance(error.errors.get(0, PeerFailedError("")), PeerFailedError), error
            else:
                raise AssertionError(rest)
            assert session.run("import os, signal, time\\nglobals().get('x')").values == [0, None]
    assert not os.path.exists(f"/proc/{supervisor}")
print("fine")
"""


@pytest.mark.slow
def test_f16_a_notebook_that_reaps_for_itself() -> None:
    """A thread that waits for every child, SIGCHLD that is ignored: causes of death stay right."""
    done = subprocess.run(
        [sys.executable, "-c", THIEF], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.stdout, done.stderr) == ("fine\n", ""), done.stderr
