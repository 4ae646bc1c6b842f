"""Ranks without a session: they end with the test run that forked them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from nbparallel.testing import processes
from nbparallel.testing.waiting import wait_until

RUN = """
import os, time
from tests.harness.ranks import run_ranks

def work(c):
    if c.rank == 0:
        print(c.recv(src=1), flush=True)
        c.recv(src=1)
    c.send("both there", 0)
    time.sleep(1000)

run_ranks(2, work, seconds=600)
"""


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.fault("F9")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_no_rank(number: int) -> None:
    """Both the one that waits in an operation and the one that sleeps end with it."""
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "both there\n"
            ranks = [record for record in processes.family(run.pid) if record.pid != run.pid]
            assert len(ranks) == 2
            run.send_signal(number)
            run.wait(30)
            started = {record.pid: record.started for record in ranks}
            wait_until(
                lambda: not [r for r in map(processes.read, started) if r and r.started == started[r.pid]]
            )
        finally:
            run.kill()  # else leaving the block waits for it
