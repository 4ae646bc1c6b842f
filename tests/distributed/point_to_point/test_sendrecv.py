"""sendrecv, receives that name their source, and None as the rank beyond the edge of a grid."""

from __future__ import annotations

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
    """With None for a rank nothing is sent, nothing received, and an array stays as it is."""
    n = 3

    def work(c: Communicator) -> None:
        up, down = c.rank - 1 if c.rank else None, c.rank + 1 if c.rank < n - 1 else None
        u = np.full((4, 5), float(c.rank))
        u[0] = u[-1] = -1.0
        assert c.sendrecv(u[1], up, down, output=u[-1]) is not None
        c.send(u[-2], down)
        assert c.recv(u[0], up) == up
        assert (u[0, 0], u[-1, 0]) == (-1.0 if up is None else up, -1.0 if down is None else down)
        ops = [P2POp(dist.isend, c.rank, up), P2POp(dist.irecv, None, down)]
        assert [w.result() for w in c.batch_isend_irecv(ops)] == [None, down]
        assert c.batch_isend_irecv([]) == []
        buffer = np.ones(2)
        got = c.irecv(buffer, None)
        assert got.is_completed()
        assert (got.result() is buffer, got.source_rank()) == (True, -1)
        assert c.isend(1, None).wait()
        assert (c.recv(src=None), c.recv(buffer, src=None)) == (None, None)
        assert c.recv(src=None, return_source=True) == (None, None)
        assert c.sendrecv(1, None, None) is None
        assert buffer.tolist() == [1.0, 1.0]
        c.barrier()
        c.end_cell(None)
        assert c.messages is None

    ranks(n, work)


def test_a_receive_names_its_source(ranks: Any) -> None:
    """From any rank: value and source; ANY_SOURCE says what leaving `src` out does."""

    def work(c: Communicator) -> None:
        for tag in range(4):
            c.send(10 * c.rank, 0, tag=tag)
        c.send(np.ones(2), c.rank, tag=4)
        if c.rank == 0:
            everything = [(0, 0), (10, 1), (20, 2)]
            assert sorted(c.recv(return_source=True) for _ in range(3)) == everything
            found = [c.recv(src=dist.ANY_SOURCE, tag=1, return_source=True) for _ in range(3)]
            assert sorted(found) == everything
            works = [c.irecv(None, dist.ANY_SOURCE, tag=2) for _ in range(3)]
            assert sorted((w.result(), w.source_rank()) for w in works) == everything
            for source in (2, 0, 1):
                assert c.recv(src=source, tag=3, return_source=True) == (10 * source, source)
        buffer = np.zeros(2)
        value, source = c.recv(buffer, c.rank, tag=4, return_source=True)
        assert (value is buffer, source) == (True, c.rank)
        assert repr(dist.ANY_SOURCE) == "ANY_SOURCE"

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
        assert P2POp(dist.isend, 1, None, group_peer=1).group_peer == 1

    ranks(2, work)
