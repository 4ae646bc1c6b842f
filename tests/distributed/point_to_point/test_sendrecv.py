"""sendrecv, receives that name their source, and PROC_NULL as the rank beyond the edge of a grid."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import nbparallel.distributed as dist
from nbparallel.distributed import Communicator, P2POp
from nbparallel.errors import CollectiveTimeoutError, ReadOnlyArrayError


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_rings(ranks: Any, n: int, strict: bool) -> None:
    """All ranks of a ring exchange values of any size and kind at the same time, also in place."""
    if strict and n == 1:
        return  # a rank that waits for itself is a deadlock: see test_point_to_point

    def work(c: Communicator) -> None:
        left, right = (c.rank - 1) % n, (c.rank + 1) % n
        c.strict_sync(strict)
        assert c.sendrecv({"from": c.rank}, right, left) == {"from": left}
        for size in (0, 3, 40_000, 400_000):
            x, output = np.full(size, float(c.rank)), np.empty(size)
            for _ in range(2):
                assert c.sendrecv(x, dst=right, src=left, output=output) is output
                assert (output == left).all()
            assert c.sendrecv(x, right, left, output=x) is x
            assert (x == left).all()
        assert c.sendrecv(c.rank, right, left, None, 1 + c.rank, recv_tag=1 + left) == left
        assert c.sendrecv(c.rank, right, group=c.new_group(range(n))) == left

    ranks(n, work)


def test_the_edge_of_a_grid(ranks: Any) -> None:
    """With PROC_NULL for a rank nothing is sent, nothing received, and an array stays as it is."""
    n = 3

    def work(c: Communicator) -> None:
        up, down = dist.grid(n).shift(0)
        assert (up is dist.PROC_NULL, down is dist.PROC_NULL) == (c.rank == 0, c.rank == n - 1)
        u = np.full((4, 5), float(c.rank))
        u[0] = u[-1] = -1.0
        assert c.sendrecv(u[1], up, down, output=u[-1]) is not None
        c.send(u[-2], down)
        assert c.recv(u[0], up) == up
        assert (u[0, 0], u[-1, 0]) == (max(up, -1), max(down, -1))
        ops = [P2POp(dist.isend, c.rank, up), P2POp(dist.irecv, None, down)]
        assert [w.result() for w in c.batch_isend_irecv(ops)] == [None, None if down < 0 else down]
        assert c.batch_isend_irecv([]) == []
        buffer = np.ones(2)
        nowhere = dist.PROC_NULL
        got = c.irecv(buffer, nowhere)
        assert got.is_completed()
        assert (got.result() is buffer, got.source_rank()) == (True, nowhere)
        assert c.isend(1, nowhere).wait()
        c.strict_sync(True)
        c.send(1, nowhere)
        assert c.isend(1, nowhere).wait()
        c.strict_sync(False)
        assert (c.recv(src=nowhere), c.recv(buffer, src=nowhere)) == (None, nowhere)
        assert c.recv(src=nowhere, group=c.new_group(range(n)), return_source=True) == (None, nowhere)
        assert c.sendrecv(1, nowhere, nowhere) is None
        objects = [c.rank]
        c.send_object_list(objects, nowhere)
        assert (c.recv_object_list(objects, nowhere), objects) == (nowhere, [c.rank])
        assert buffer.tolist() == [1.0, 1.0]
        c.barrier()
        c.end_cell(None)
        assert c.messages is None

    ranks(n, work)


def test_the_rank_that_does_not_exist_travels(ranks: Any) -> None:
    """PROC_NULL is itself after a pickle, a copy and in numpy, and no other negative number is it."""
    null = dist.PROC_NULL
    assert pickle.loads(pickle.dumps(null)) is null
    assert copy.deepcopy([null])[0] is null
    assert (repr(null), f"{null}", str([null])) == ("PROC_NULL", "PROC_NULL", "[PROC_NULL]")

    def work(c: Communicator) -> None:
        assert c.recv(src=np.array([null])[0], return_source=True) == (None, null)
        for wrong in (-1, -2, null + 1, null - 1):
            with pytest.raises(ValueError, match=f"src={wrong}: there is no such rank"):
                c.recv(src=wrong)
        for send in (c.send, c.isend, c.sendrecv, lambda x: c.send_object_list([x])):
            with pytest.raises(TypeError, match=r"dst is missing.*dist\.PROC_NULL if there is none"):
                send(1)

    ranks(1, work)


def test_a_receive_names_its_source(ranks: Any) -> None:
    """From any rank, with None for `src` or without it, as in torch: value and source."""

    def work(c: Communicator) -> None:
        for tag in range(4):
            c.send(10 * c.rank, 0, tag=tag)
        c.send(np.ones(2), c.rank, tag=4)
        if c.rank == 0:
            everything = [(0, 0), (10, 1), (20, 2)]
            assert sorted(c.recv(return_source=True) for _ in range(3)) == everything
            found = [c.recv(src=None, tag=1, return_source=True) for _ in range(3)]
            assert sorted(found) == everything
            works = [c.irecv(None, dist.ANY_SOURCE, tag=2) for _ in range(3)]
            assert sorted((w.result(), w.source_rank()) for w in works) == everything
            for source in (2, 0, 1):
                assert c.recv(src=source, tag=3, return_source=True) == (10 * source, source)
        buffer = np.zeros(2)
        value, source = c.recv(buffer, c.rank, tag=4, return_source=True)
        assert (value is buffer, source) == (True, c.rank)

    ranks(3, work)


def test_wrong_calls_send_nothing(ranks: Any) -> None:
    """A rank that is not named at all, a wrong output, a time-out."""

    def work(c: Communicator) -> None:
        for call in (lambda: c.send(1), lambda: c.isend(1), lambda: c.sendrecv(1)):
            with pytest.raises(TypeError, match="dst is missing"):
                call()
        fixed = np.ones(3)
        fixed.flags.writeable = False
        with pytest.raises(ReadOnlyArrayError, match=r"pass `x\.copy\(\)`, which is filled and returned"):
            c.sendrecv(1, 0, 0, output=fixed)
        with pytest.raises(ValueError, match="src=7: there is no such rank"):
            c.sendrecv(1, 0, 7)
        c.barrier()
        if c.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="recv"):
                c.sendrecv("sent", 1, 1, timeout=0.05)
        c.barrier()
        if c.rank:
            assert c.recv(src=0) == "sent"
        with pytest.raises(ValueError, match="pass one of them"):
            P2POp(dist.isend, 1, 0, group_peer=1)
        with pytest.raises(ValueError, match="needs either peer or group_peer"):
            P2POp(dist.isend, 1, None)
        assert P2POp(dist.isend, 1, None, group_peer=1).group_peer == 1

    ranks(2, work)
