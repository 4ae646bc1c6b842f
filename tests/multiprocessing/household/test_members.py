"""Guests of ranks, and of processes that another program started: they use the supervisor that is there."""

import os
import signal
import subprocess
import sys

import pytest

import nbparallel as nbp
from nbparallel.testing.waiting import wait_until
from tests.multiprocessing.household.family import is_gone

RANK = """
import os, signal
import numpy as np, nbparallel as nbp, nbparallel.multiprocessing as mp
ctx, mine = mp.get_context("fork"), nbp.full((400, 400), float(rank))
here, there = ctx.Pipe()
def work():
    mine[0, 0] = 42
    there.send((mine, shared))
    signal.pause()
child = ctx.Process(target=work)
child.start()
got, also = here.recv()
same = np.shares_memory(got, mine) and np.shares_memory(also, shared) and got[0, 0] == 42
(child.pid, same)
"""
MEMBER = """
import os, sys
import nbparallel as nbp, nbparallel.distributed as dist
dist.init_process_group(init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
rank, shared = dist.get_rank(), nbp.full((400, 400), 1.0)
""" + RANK.replace("(child.pid, same)", "os.write(1, b'%d %d\\n' % (child.pid, same))")


@pytest.mark.slow
def test_a_rank_s_guests_use_the_session():
    """A child of a rank sends its arrays and the notebook's as the same memory, and ends with it."""
    shared = nbp.full((400, 400), 1.0)
    with nbp.Session(2) as session:
        found = list(session.run(RANK, namespace={"shared": shared}).values)
        assert [same for _, same in found] == [True, True]
        first, second = (pid for pid, _ in found)
        with pytest.raises(nbp.ParallelError):
            session.run("os.kill(os.getpid(), 9)", ranks=[0], namespace={})
        wait_until(lambda: is_gone(first))
        assert not is_gone(second)
    wait_until(lambda: is_gone(second))


@pytest.mark.slow
def test_a_member_s_guests_end_with_it(tmp_path):
    """Guests of a member of a world use the world's supervisor, and end with that member."""
    code = [sys.executable, "-c", MEMBER + "\nimport signal; signal.pause()", str(tmp_path / "place")]
    members = [subprocess.Popen([*code, str(rank)], stdout=subprocess.PIPE) for rank in range(2)]
    lines = [tuple(map(int, member.stdout.readline().split())) for member in members]
    assert [same for _, same in lines] == [1, 1]
    pids = [pid for pid, _ in lines]
    os.kill(members[0].pid, signal.SIGKILL)
    members[0].communicate()
    wait_until(lambda: is_gone(pids[0]))
    assert not is_gone(pids[1])
    members[1].kill()
    members[1].communicate()
    wait_until(lambda: is_gone(pids[1]))
