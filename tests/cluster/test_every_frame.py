"""A fault at every frame between two hosts: nobody waits for ever, and no frame reaches another cell."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import NbParallelError, ParallelError
from nbparallel.session.tasks.cell_queue import PendingCell
from nbparallel.testing.processes import read
from nbparallel.testing.waiting import wait_until
from tests.harness.clusters import Loopback

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(300)]
CELL = """
number = {number}
x = np.full(150_000, float(rank + number)); all_reduce(x)
y = all_gather(rank + 10 * number)
z = broadcast(np.full(150_000, 1.0 * number) if rank == 1 else None, 1)
(x[-1], y, z[-1])
"""


class WatchedLoopback(Loopback):
    """A cluster that counts frames between hosts, and does something at one of them."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names, 1)
        self.frames, self.at = 0, 0
        self.strike: Callable[[], None] = int
        self._counting = threading.Lock()

    def link(self, one: str, other: str, timeout: float) -> None:
        """Connect two hosts, and watch."""
        super().link(one, other, timeout)
        for mine, theirs in ((one, other), (other, one)):
            self.nodes[mine].connections[theirs].before = self._count

    def arm(self, at: int, strike: Callable[[], None]) -> None:
        """Have something happen at the frame of this number from now on, in the thread that sends it."""
        with self._counting:
            self.frames, self.at, self.strike = 0, at, strike

    def _count(self) -> None:
        with self._counting:
            self.frames += 1
            strike = self.strike if self.frames == self.at else int
        strike()


def wanted(number: int) -> list[object]:
    """Return what the cell of a number leaves on both ranks."""
    return [(2.0 * number + 1, [10 * number, 10 * number + 1], 1.0 * number)] * 2


def run_cell(session: nbp.Session, number: int) -> object:
    """Run the cell of a number."""
    return session.run(CELL.format(number=number), namespace={"np": np}).values


def run_next(session: nbp.Session, number: int) -> object:
    """Do this after a fault: what is lost behind its last frame may be missed as the next cell begins."""
    try:
        return run_cell(session, number)
    except ParallelError as error:
        if "died before the cell began" not in str(error) and "its process ended" not in str(error):
            raise
    return run_cell(session, number)


def frames_of_a_cell() -> int:
    """Return how many frames a cell without faults sends."""
    cluster = WatchedLoopback(["a", "b"])
    with nbp.Session(cluster=cluster) as session:
        cluster.arm(0, int)
        assert run_cell(session, 1) == wanted(1)
    return cluster.frames


def strike(fault: str, cluster: Loopback, host: str, pid: int, press: Callable[[], None]) -> None:
    """Have a fault happen, on a host or the link with it."""
    if fault == "link":
        cluster.nodes["a"].connections[host].abort()
    elif fault == "host":
        threading.Thread(target=cluster.lose, args=(host,)).start()  # it waits for this thread
    elif fault == "rank":
        os.kill(pid, 9)
        wait_until(lambda: not read(pid))
    else:
        press()


def run_struck(session: nbp.Session, number: int, begun: SimpleQueue[PendingCell]) -> str:
    """Run the cell of a number; return its error, or nothing if it came to its end."""
    pending = session.submit(CELL.format(number=number), namespace={"np": np})
    begun.put(pending)
    try:
        assert pending.result(30).values == wanted(number)
    except (NbParallelError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("fault", ["link", "host", "rank", "interrupt"])
def test_a_fault_at_every_frame(fault: str) -> None:
    """The cell ends soon, well or with an error that names it; the next one has its own values."""
    count = frames_of_a_cell()
    assert count > 10
    failed = 0
    cluster = WatchedLoopback(["a", *(f"b{n:02}" for n in range(count + 1))])
    with nbp.Session(cluster=cluster, max_hosts=2) as session:
        session.run("kept = rank")
        for at in range(1, count + 1):
            host, begun = list(session.hosts)[1], SimpleQueue[PendingCell]()
            pid = session.run("import os; os.getpid()").values[1]
            press = lambda begun=begun: begun.get(timeout=20).cancel()  # noqa: E731
            cluster.arm(at, partial(strike, fault, cluster, host, pid, press))
            began = time.monotonic()
            said = run_struck(session, 100 + at, begun)
            assert time.monotonic() - began < 20
            named = {"link": "link between", "host": f"host {host}", "rank": f"(host {host})"}
            assert named.get(fault, "KeyboardInterrupt") in said or not said, (at, said)
            failed += bool(said)
            cluster.arm(0, int)
            assert run_next(session, at) == wanted(at), (fault, at)
            assert session.run("kept", ranks=[0]).values == [0]
    assert failed >= count // 2
