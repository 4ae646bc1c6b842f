"""Names of torch.distributed that scripts use: what they ask, sub-groups, works, coalesced operations."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nbparallel.distributed as dist
from nbparallel.distributed import Communicator
from nbparallel.errors import CollectiveMismatchError, CollectiveTimeoutError


def test_what_scripts_ask_before_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends, launchers and the rank on this machine, in a process that is no rank."""
    assert [dist.is_backend_available(name) for name in ("nbparallel", "GLOO", "nccl")] == [True, True, False]
    assert dist.is_gloo_available()
    for name in ("nccl", "mpi", "ucc", "xccl"):
        assert getattr(dist, f"is_{name}_available")() is False
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not dist.is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert dist.is_torchelastic_launched()
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(RuntimeError, match="LOCAL_RANK is not set: pass a fallback_rank"):
        dist.get_node_local_rank()
    assert dist.get_node_local_rank(3) == 3
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert dist.get_node_local_rank() == 5


def test_sub_groups(ranks: Any) -> None:
    """Made without a word to other ranks; a group knows its size, and this rank's place in it."""

    def work(c: Communicator) -> None:
        assert (dist.get_backend(), dist.get_node_local_rank()) == ("nbparallel", c.rank)
        mine, groups = dist.new_subgroups(2)
        assert [list(group) for group in groups] == [[0, 1], [2, 3]]
        assert mine is groups[c.rank // 2]
        assert (mine.size(), mine.rank(), groups[0].rank()) == (2, c.rank % 2, c.rank if c.rank < 2 else -1)
        assert dist.all_gather(c.rank, group=mine) == list(mine)
        assert dist.new_subgroups()[0].size() == 4
        assert [list(g) for g in dist.new_subgroups(1, group=mine)[1]] == [[rank] for rank in mine]
        mine, groups = dist.new_subgroups_by_enumeration([[3, 0], [1]])
        assert (mine is None) == (c.rank == 2)
        assert [list(group) for group in groups] == [[0, 3], [1]]
        with pytest.raises(ValueError, match="group_size=3 must divide the number of ranks, 4"):
            dist.new_subgroups(3)
        with pytest.raises(TypeError, match="group_size must be an int, not str"):
            dist.new_subgroups("2")
        with pytest.raises(ValueError, match="rank 1 is in more than one of ranks_per_sub"):
            dist.new_subgroups_by_enumeration([[0, 1], [1, 2]])

    ranks(4, work)


def test_coalesced(ranks: Any) -> None:
    """Each array as by an operation of its own, also one that is listed twice; one work stands for all."""

    def work(c: Communicator) -> None:
        x, y = np.full(3, c.rank), np.full((2, 2), c.rank + 0.5)
        assert dist.all_reduce_coalesced([x, y], "max")[0] is x
        assert (x == 1).all()
        assert (y == 1.5).all()
        pending = dist.all_reduce_coalesced([x, y, c.rank], async_op=True)
        assert pending.wait()
        assert pending.is_success()
        assert (x == 2).all()
        assert (y == 3).all()
        assert pending.result()[2] == 1
        tied, whole = np.full(2, c.rank + 1), np.full(4, c.rank + 1)
        for async_op in (False, True):
            found = dist.all_reduce_coalesced(
                [tied, tied[:], c.rank, whole[::2], whole[1::2]], async_op=async_op
            )
            assert [list(x) for x in (found.result() if async_op else found)[:2]] == [list(tied)] * 2
            assert tied.tolist() == [3 * 2**async_op] * 2
            assert whole.tolist() == [3 * 2**async_op] * 4
            with pytest.raises(ValueError, match=r"tensors\[1\] and tensors\[3\] share memory"):
                dist.all_reduce_coalesced([tied, whole[1:], tied, whole], async_op=async_op)
            with pytest.raises(ValueError, match=r"lists\[0\]\[0\] and .*lists\[1\]\[1\] share memory"):
                dist.all_gather_coalesced([[tied, whole], [np.ones(2), tied]], [tied, tied], None, async_op)
        assert whole.tolist() == [6] * 4
        outputs = [[np.zeros(1), np.zeros(2)] for _ in range(2)]
        assert (
            dist.all_gather_coalesced(outputs, [np.full(1, 1.0 * c.rank), np.full(2, 10.0 * c.rank)])
            is outputs
        )
        assert [[list(a) for a in row] for row in outputs] == [[[0], [0, 0]], [[1], [10, 10]]]
        pending = dist.all_gather_coalesced(outputs, [np.full(1, 7.0), np.full(2, 8.0)], None, True)
        pending.synchronize()
        assert [[list(a) for a in row] for row in outputs] == [[[7], [8, 8]]] * 2
        for call in (dist.all_reduce_coalesced, lambda x: dist.all_gather_coalesced([[x]] * 2, x)):
            with pytest.raises(TypeError, match="needs a list of"):
                call(x)
        with pytest.raises(ValueError, match="a list to fill has 1 arrays, and each rank brings 2"):
            dist.all_gather_coalesced([[x]] * 2, [x, x])
        with pytest.raises(CollectiveMismatchError):
            dist.all_reduce_coalesced([np.ones(2), np.ones(2 + c.rank)], async_op=True).wait()

    ranks(2, work)


def test_works(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_success` and `get_future` say what `wait` says; the future is completed when it is returned."""

    class Future(list[Any]):
        set_result = list.append

    def work(c: Communicator) -> None:
        x = np.ones(2)
        pending = dist.all_reduce(x, async_op=True)
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        with pytest.raises(RuntimeError, match=r"torch is not imported: use result\(\)"):
            pending.get_future()
        module = SimpleNamespace(futures=SimpleNamespace(Future=Future))
        monkeypatch.setitem(sys.modules, "torch", module)
        (value,) = pending.get_future()
        assert value[0] is x
        assert (x == 2).all()
        assert pending.is_success()
        (found,) = dist.all_gather([np.zeros(2), np.zeros(2)], x, None, True).get_future()
        assert [list(part) for part in found] == [[2, 2]] * 2
        assert pending.synchronize() is None
        received = dist.irecv(src=1 - c.rank)
        assert not received.is_success()
        dist.barrier()
        dist.send("hello", 1 - c.rank)
        assert received.get_future() == [["hello"]]

    ranks(2, work)


def test_a_time_out_is_a_runtime_error() -> None:
    """As in torch; it stays a `TimeoutError`, and travels between processes."""
    error = pickle.loads(pickle.dumps(CollectiveTimeoutError("rank 1 did not come")))
    assert isinstance(error, RuntimeError)
    assert isinstance(error, TimeoutError)
    assert str(error) == "rank 1 did not come"


def test_operators_of_torch(ranks: Any) -> None:
    """Torch's own `ReduceOp` is understood; PREMUL_SUM has a name, and an error that says what to do."""

    class RedOpType:
        name = "PRODUCT"

    def work(c: Communicator) -> None:
        assert dist.all_reduce(c.rank + 1, RedOpType()) == 2  # type: ignore[arg-type]
        assert dist.all_reduce(np.full(1, c.rank + 1), RedOpType())[0] == 2  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"needs a factor: multiply before, all_reduce\(factor \* x\)"):
            dist.all_reduce(np.ones(1), dist.ReduceOp.PREMUL_SUM)

    ranks(2, work)
