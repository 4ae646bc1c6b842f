"""What ranks keep mapped between two arrays: in a real session, with deaths, interrupts, idle ranks."""

import os
import signal
import time

import pytest

import nbparallel as nbp
from nbparallel.errors import ParallelError
from nbparallel.sharing import current_store
from nbparallel.testing.waiting import wait_until
from tests.session.names.memory.mapped_memory import mapped

COUNT = """
import collections, os, time
import nbparallel as nbp
from nbparallel.channel import Channel
from nbparallel.sharing import current_store
from nbparallel.wire.segments import MESSAGES
said, send_frame = collections.Counter(), Channel.send
def counted(self, kind, *args, **more):
    send_frame(self, kind, *args, **more)
    said[kind.name] += kind in MESSAGES
Channel.send = counted
os.getpid()
"""
"""Run on ranks: counts what they say to the supervisor."""


@pytest.fixture
def ranks(three_ranks):
    """Give three ranks that count what they say: the session and their process ids."""
    return three_ranks, three_ranks.run(COUNT, namespace={}).values


SEND = """
said.clear()
for turn in range(20):
    if rank == 0:
        x[0] = turn
        for other in (1, 2):
            send(x, other, view=True)
        assert [recv(src=other) for other in (1, 2)] == [turn, turn]
    else:
        y = recv(src=0)
        found = y[0]
        del y
        send(float(found), 0)
said["FETCH"], said["HOLD"]
"""


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_a_view_that_arrives_again_is_not_fetched(ranks):
    """Twenty times the same array: one question, and the content of now."""
    session, _ = ranks
    session.run("x = nbp.zeros(100_000) if rank == 0 else None")
    values = session.run(SEND).values
    assert values == [(0, 0), (1, 19), (1, 19)]


NEW = """
said.clear()
for turn in range(30):
    if rank == 0:
        z = nbp.empty(100_000)
        z[:] = turn
        for other in (1, 2):
            send(z, other, view=True)
        assert [recv(src=other) for other in (1, 2)] == [turn, turn]
        del z
    else:
        y = recv(src=0)
        lowest, highest = float(y.min()), float(y.max())
        assert lowest == highest, (lowest, highest)
        del y
        send(lowest, 0)
said["FETCH"], said["FETCH"] + said["HOLD"]
"""


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_new_arrays_in_the_owners_pool(ranks):
    """An array for each turn, whose memory comes round: few questions, and never another turn's content."""
    session, _ = ranks
    (_, _), first, second = session.run(NEW).values
    for fetched, arrived in (first, second):
        assert arrived == 30
        assert fetched < 15


@pytest.mark.time_limit(60)
def test_memory_goes_back_although_ranks_kept_it(ranks):
    """The owner gives back its pool: idle ranks unmap it, without a cell."""
    session, (_, *others) = ranks
    before = [mapped(pid) for pid in others]
    session.run("x = nbp.ones(1_000_000) if rank == 0 else None")
    session.run("y = broadcast(x, src=0, view=True); float(y[0])")
    session.run("del y, x")
    assert [mapped(pid) >= size + 8_000_000 for pid, size in zip(others, before, strict=True)] == [True] * 2

    def gone():
        # again: the supervisor may notify the owner of the last release after it has looked
        session.run("current_store().drain(); current_store().trim()", ranks=[0])
        return all(mapped(pid) < size + 8_000_000 for pid, size in zip(others, before, strict=True))

    wait_until(gone)


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_the_notebooks_arrays_too():
    """What the notebook named in a cell stays mapped on ranks no longer than in the notebook's pool."""
    with nbp.Session(2) as session:
        pids = session.run("import os; os.getpid()", namespace={}).values
        before = [mapped(pid) for pid in pids]
        names = {"x": nbp.ones(1_000_000)}
        session.run("float(x[0])", namespace=names)
        assert not _below(pids, before)
        session.run("del x")
        names.clear()
        wait_until(lambda: _gives_back() and _below(pids, before))


def _gives_back():
    current_store().drain()
    current_store().trim()
    return True


def _below(pids, before):
    return all(mapped(pid) < size + 8_000_000 for pid, size in zip(pids, before, strict=True))


@pytest.mark.time_limit(90)
@pytest.mark.parametrize("victim", [0, 1], ids=["owner", "keeper"])
def test_a_rank_dies(ranks, victim):
    """Its death takes along what it owned, from idle ranks as well; those who live go on."""
    session, pids = ranks
    before = mapped(pids[2])
    session.run("x = nbp.ones(1_000_000) if rank == 0 else None")
    session.run("y = broadcast(x, src=0, view=True); s = float(y[0]); del y")
    assert mapped(pids[2]) >= before + 8_000_000
    os.kill(pids[victim], signal.SIGKILL)
    if victim == 0:
        wait_until(lambda: mapped(pids[2]) < before + 8_000_000)
    session.restart(victim)
    session.run(COUNT, ranks=[victim])
    session.run("x = nbp.zeros(100_000) if rank == 0 else None")
    assert session.run(SEND).values[2] == (1, 19)


@pytest.mark.slow
@pytest.mark.time_limit(90)
def test_interrupts_while_views_come_and_go(ranks):
    """Wherever an interrupt falls, nothing is held for ever, and the next cell finds its content."""
    session, _ = ranks
    session.run("x = nbp.zeros(100_000) if rank == 0 else None")
    endless = "while True:\n    y = broadcast(x, src=0, view=True)\n    assert y[0] == 0\n    del y"
    for turn in range(5):
        pending = session.submit(endless)
        time.sleep(0.1 + 0.03 * turn)
        session.interrupt()
        with pytest.raises((KeyboardInterrupt, ParallelError)):
            pending.result()
        assert session.run(SEND).values[1][0] <= 2
        session.run("if rank == 0: x[0] = 0")
    session.run("x = y = None")
    held = "current_store().drain(); [s.nbytes for s in nbp.segments() if s.phase != 'pooled']"
    wait_until(lambda: session.run(held).values == [[], [], []])


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_the_supervisor_dies():
    """The ranks go with it; the notebook's arrays stay, and what it kept mapped of theirs goes."""
    before = mapped("self")
    session = nbp.Session(2)
    try:
        value = session.run("nbp.full(100_000, rank + 1.0)", namespace={"nbp": nbp}).values[1]
        os.kill(session.statistics().supervisor_pid, signal.SIGKILL)
        assert float(value[-1]) == 2
        del value
    finally:
        session.stop()
    current_store().drain()
    current_store().trim()
    assert mapped("self") <= before


@pytest.mark.time_limit(60)
def test_arrays_outlive_who_made_them(ranks):
    """An array on a kept mapping stays what it is when its owner is killed."""
    session, pids = ranks
    session.run("x = nbp.full(100_000, 7.0) if rank == 0 else None")
    session.run("for _ in range(3):\n    y = None\n    y = broadcast(x, src=0, view=True)")
    assert session.run("said['HOLD']").values[1] >= 1
    os.kill(pids[0], signal.SIGKILL)
    assert session.run("float(y[0]), float(y[-1])", ranks=[1, 2]).values == [(7, 7)] * 2
    session.restart(0)


@pytest.mark.time_limit(60)
def test_strategies_change_in_between(ranks):
    """What is kept of one strategy goes on serving after another; with a name it serves one array only."""
    session, _ = ranks
    before = nbp.get_sharing_strategy()
    try:
        for strategy in ("file_descriptor", "file_system", "file_descriptor"):
            nbp.set_sharing_strategy(strategy)
            session.run("x = nbp.zeros(100_000) if rank == 0 else None")
            fetched, held = session.run(SEND).values[1]
            assert fetched <= 1  # none, if the owner's pool gives out the memory of the first round
            assert fetched + held == 20
            session.run("x = None")
    finally:
        nbp.set_sharing_strategy(before)
