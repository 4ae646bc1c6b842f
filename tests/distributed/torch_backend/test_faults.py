"""What goes wrong inside torch's operations is said as in ours, and the next cell works."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import nbparallel as nbp
from nbparallel.errors import CollectiveMismatchError, DeadlockError, RankDiedError

MODEL = """
td.init_process_group()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
def step():
    ddp.zero_grad()
    loss = ddp(torch.ones(4, 8) * (rank + 1)).sum()
    loss.backward()
    return [p.grad.double().sum().item() for p in model.parameters()]
step()
"""


def error_of(session: nbp.Session, cell: str, rank: int) -> BaseException:
    """Run a cell that fails; return the error of a rank."""
    with pytest.raises(nbp.ParallelError) as caught:
        session.run(cell, namespace={})
    assert rank in caught.value.errors, caught.value
    return caught.value.errors[rank]


def gradients(session: nbp.Session) -> list[float]:
    """Make the model and do a step; return the gradients, which are the same on all ranks."""
    found = session.run(MODEL, namespace={}).values
    assert found[0] == found[1]
    return list(found[0])


@pytest.mark.slow
def test_a_forgotten_backward(session: nbp.Session) -> None:
    """A rank that calls no backward pass is named, with the line; the same model trains in the next cell."""
    expected = gradients(session)
    error = error_of(session, "loss = ddp(torch.ones(4, 8)).sum()\nif rank == 0:\n    loss.backward()", 0)
    assert isinstance(error, CollectiveMismatchError)
    assert "rank 1 finished the cell without calling all_reduce" in str(error)
    assert list(session.run("step()", namespace={}).values) == [expected] * 2
    assert session.run("x = torch.ones(2); td.all_reduce(x); x.tolist()", namespace={}).values[1] == [
        2.0,
        2.0,
    ]


@pytest.mark.slow
def test_other_errors_of_operations(session: nbp.Session) -> None:
    """Mismatch and deadlock inside torch's operations are ours; groups made before still work."""
    session.run("td.init_process_group(); pair = td.new_group([0, 1])", namespace={})
    error = error_of(session, "x = torch.ones(2 + rank)\ntd.all_reduce(x)", 0)
    assert isinstance(error, CollectiveMismatchError)
    assert "(2,)" in str(error)
    assert "(3,)" in str(error)
    error = error_of(session, "x = torch.ones(2)\ntd.recv(x, 1 - rank)", 1)
    assert isinstance(error, DeadlockError)
    assert "line 2" in str(error)
    error = error_of(session, "td.broadcast(torch.ones(2), 5)", 0)
    assert isinstance(error, ValueError)
    assert "no rank 5 in a group of 2 ranks" in str(error)
    error = error_of(session, "td.monitored_barrier() if rank else None", 1)
    assert "monitored_barrier" in str(error)
    done = session.run("x = torch.ones(2); td.all_reduce(x, group=pair); x.tolist()", namespace={})
    assert done.values[0] == [2.0, 2.0]


@pytest.mark.slow
def test_an_error_in_a_backward_hook(session: nbp.Session) -> None:
    """The user's own error comes out of the backward pass, and the other rank is released."""
    expected = gradients(session)
    cell = """
def fail(grad):
    if rank == 1:
        raise ZeroDivisionError("in a hook")
hook = model[0].weight.register_hook(fail)
try:
    step()
finally:
    hook.remove()
"""
    assert isinstance(error_of(session, cell, 1), ZeroDivisionError)
    assert session.run("step()", namespace={}).values[0] == expected


def test_an_interrupt_in_a_backward_pass(
    session: nbp.Session, interrupted: Callable[[nbp.Session, str], None]
) -> None:
    """Both ranks stop, one of them waiting for the other; the same model trains in the next cell."""
    expected = gradients(session)
    interrupted(
        session,
        """
import time
def sleep(grad):
    if rank == 1:
        time.sleep(60)
hook = model[0].weight.register_hook(sleep)
try:
    while True:
        step()
finally:
    hook.remove()
""",
    )
    assert session.run("step()", namespace={}).values[0] == expected


def test_a_failure_between_the_buckets_of_two_ranks(session: nbp.Session) -> None:
    """Rank 1 has changed the order of its gradients, rank 0 has not; the next step sums in one order."""
    expected = gradients(session)
    cell = """
def fail():
    for told in [3, 1, 2, 0, 1], [4]:  # the order of the parameters, the number of buckets; their sizes
        td.broadcast(torch.tensor(told, dtype=torch.int32), 0)
    raise ZeroDivisionError("before its own buckets")
if rank == 0:
    ddp.reducer._rebuild_buckets = fail
try:
    step()
finally:
    vars(ddp.reducer).pop("_rebuild_buckets", None)
"""
    assert isinstance(error_of(session, cell, 0), ZeroDivisionError)
    for _ in range(3):
        assert list(session.run("step()", namespace={}).values) == [expected] * 2


@pytest.mark.slow
def test_a_failed_collective_that_was_not_waited_for(session: nbp.Session) -> None:
    """An operation begun and never waited for runs at the end of the cell; if that fails, `wait` says so."""
    session.run("td.init_process_group()", namespace={})
    session.run("x = torch.ones(2); work = td.all_reduce(x, async_op=True)", namespace={})
    assert session.run("work.is_completed(), x.tolist()", namespace={}).values[0] == (True, [2.0, 2.0])
    error_of(session, "work = td.all_reduce(x, async_op=True)\nif rank == 1:\n    1 / 0", 1)
    assert "rank 1 failed: ZeroDivisionError on line 3" in str(error_of(session, "work.wait()", 0))


@pytest.mark.slow
def test_a_rank_killed_in_a_backward_pass(entry_point: str) -> None:
    """The others are released with its name; the cell that imports and begins anew works on all."""
    from tests.distributed.torch_backend.conftest import BEGIN

    with nbp.Session(2) as session:
        session.run(BEGIN, namespace={})
        expected = gradients(session)
        cell = """
import os, signal
def die(grad):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
model[0].weight.register_hook(die)
step()
"""
        error = error_of(session, cell, 1)
        assert isinstance(error, RankDiedError)
        assert "SIGKILL" in str(error)
        session.run(BEGIN, namespace={})
        assert gradients(session) == expected
