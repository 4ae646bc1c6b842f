"""Every operation on real ranks orders the pairs of ranks that the table of the docs says, and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import permutations
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from nbparallel.distributed.races.operations import COLLECTIVES, COMPOSED, MESSAGES, Order
from nbparallel.session import Session

pytest_plugins = ["tests.harness.sessions"]

Pairs: TypeAlias = set[tuple[int, int]]
"""Of ranks: what the first did before is ordered before what the second does after."""
PAIRS = list(permutations(range(3), 2))
BEFORE = {
    Order.ALL: lambda first, then: True,
    Order.FROM_ROOT: lambda first, then: first == 1,
    Order.TO_ROOT: lambda first, then: then == 1,
    Order.PREFIX: lambda first, then: first < then,
}
"""Rank 1 is the root."""
CALLS = {
    "all_reduce": "dist.all_reduce(np.ones(2)%s)",
    "all_reduce_coalesced": "dist.all_reduce_coalesced([np.ones(2)]%s)",
    "reduce": "dist.reduce(np.ones(2), 1%s)",
    "reduce_scatter": "dist.reduce_scatter(np.zeros(1), [np.ones(1)] * n%s)",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(np.zeros(1), np.ones(n)%s)",
    "reduce_scatter_single": "dist.reduce_scatter_single(np.zeros(1), np.ones(n)%s)",
    "scan": "dist.scan(np.ones(2)%s)",
    "exscan": "dist.exscan(np.ones(2)%s)",
    "maxloc": "dist.maxloc(1.0%s)",
    "minloc": "dist.minloc(1.0%s)",
    "broadcast": "dist.broadcast(np.ones(2), 1%s)",
    "scatter": "dist.scatter(np.zeros(1), [np.ones(1)] * n if rank == 1 else None, 1%s)",
    "gather": "dist.gather(np.ones(1), [np.zeros(1) for _ in range(n)] if rank == 1 else None, 1%s)",
    "all_gather": "dist.all_gather([np.zeros(1) for _ in range(n)], np.ones(1)%s)",
    "all_gather_coalesced": "dist.all_gather_coalesced([[np.zeros(1)] for _ in range(n)], [np.ones(1)]%s)",
    "all_gather_into_tensor": "dist.all_gather_into_tensor(np.zeros(n), np.ones(1)%s)",
    "all_gather_single": "dist.all_gather_single(np.zeros(n), np.ones(1)%s)",
    "all_to_all": "dist.all_to_all([np.zeros(1) for _ in range(n)], [np.ones(1)] * n%s)",
    "all_to_all_single": "dist.all_to_all_single(np.zeros(n), np.ones(n)%s)",
    "all_gather_object": "dist.all_gather_object([None] * n, 'x'%s)",
    "gather_object": "dist.gather_object('x', [None] * n if rank == 1 else None, 1%s)",
    "broadcast_object_list": "dist.broadcast_object_list(['x'], 1%s)",
    "scatter_object_list": "dist.scatter_object_list([None], ['x'] * n if rank == 1 else None, 1%s)",
    "average_gradients": "dist.average_gradients([np.ones(2)]%s)",
    "assert_same": "dist.assert_same(1%s)",
    "barrier": "dist.barrier(%s)",
    "monitored_barrier": "dist.monitored_barrier(%s)",
}
"""Each collective, with room for more arguments; `n` is the size of the group."""
ASYNC = [
    name for name in CALLS if "object" not in name and not name.startswith(("average", "assert", "monitored"))
]
FROM_0_TO_1: dict[str, str] = {
    "send, recv": "dist.send(1, 1) if rank == 0 else dist.recv(src=0) if rank == 1 else None",
    "recv from any source": "dist.send(1, 1) if rank == 0 else dist.recv() if rank == 1 else None",
    "isend, irecv": """\
work = dist.isend(np.ones(1), 1) if rank == 0 else dist.irecv(np.zeros(1), 0) if rank == 1 else None
work and work.wait()""",
    "sendrecv": "rank < 2 and dist.sendrecv(1, dst=1 - rank, src=1 - rank)",
    "batch_isend_irecv": """\
ops = {0: [dist.P2POp(dist.isend, np.ones(1), 1)], 1: [dist.P2POp(dist.irecv, np.zeros(1), 0)], 2: []}[rank]
[work.wait() for work in dist.batch_isend_irecv(ops)]""",
    "send_object_list": """\
dist.send_object_list(["x"], 1) if rank == 0 else dist.recv_object_list([None], 0) if rank == 1 else None""",
}
"""Messages from rank 0 to rank 1."""


def unordered(session: Session, calls: str, *, during: str = "") -> Pairs:
    """Return the pairs that operations do not order.

    Each rank writes an element for each other one before them, which that one reads after them (or, with
    `during`, which are `calls` that come after these reads, before the last of them).
    """
    lines: dict[int, tuple[int, int]] = {}
    source = [f"if rank == {first}: cells[{first}, {then}] = 1" for first, then in PAIRS]
    source += calls.split("\n")
    for first, then in PAIRS:
        source.append(f"if rank == {then}: cells[{first}, {then}]")
        lines[len(source)] = (first, then)
    source += during.split("\n")
    namespace = {"cells": np.zeros((3, 3)), "np": np}
    result = session.run("\n".join(source), namespace=namespace, share=["cells"], check_races=True)
    assert all(race.certain and race.kinds == ("wrote", "read") for race in result.races), str(result.races)
    found = {lines[race.lines[1]] for race in result.races}
    assert len(found) == len(result.races)
    return found


def not_in(ordered: Callable[[int, int], bool], ranks: Iterable[int] = range(3)) -> Pairs:
    """Return the pairs that an operation of these ranks leaves without an order."""
    taking_part = set(ranks)
    return {pair for pair in PAIRS if not (taking_part.issuperset(pair) and ordered(*pair))}


def order_of(name: str) -> Callable[[int, int], bool]:
    """Return which pairs a collective orders."""
    return BEFORE[COLLECTIVES[name].order if name in COLLECTIVES else Order.ALL]


def test_every_operation_is_here() -> None:
    """One that is added gets its program."""
    assert set(CALLS) == {*COLLECTIVES, "barrier", "monitored_barrier"}
    named = " ".join([*FROM_0_TO_1, *FROM_0_TO_1.values()])
    assert all(name in named for name in (*MESSAGES, *COMPOSED))


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=6)
@pytest.mark.parametrize("name", CALLS)
def test_collectives(three_ranks: Session, name: str) -> None:
    """Of all ranks."""
    assert unordered(three_ranks, "n = 3\n" + CALLS[name] % "") == not_in(order_of(name))


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=4)
@pytest.mark.parametrize("name", CALLS)
def test_of_a_group(three_ranks: Session, name: str) -> None:
    """The third rank takes part in nothing; making the group orders nothing."""
    call = CALLS[name] % ("group=g" if "(%s)" in CALLS[name] else ", group=g")
    calls = f"n, g = 2, dist.new_group([0, 1])\nif rank < 2: {call}"
    assert unordered(three_ranks, calls) == not_in(order_of(name), (0, 1))


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=4)
@pytest.mark.parametrize("name", ASYNC)
def test_with_async_op(three_ranks: Session, name: str) -> None:
    """Ordered by `wait`, and by nothing before it."""
    begin = "n = 3\nwork = " + CALLS[name] % ("async_op=True" if "(%s)" in CALLS[name] else ", async_op=True")
    assert unordered(three_ranks, f"{begin}\nwork.wait()") == not_in(order_of(name))
    assert unordered(three_ranks, begin, during="work.wait()") == set(PAIRS)


@pytest.mark.matrix(cover=(), size=3)
@pytest.mark.parametrize("name", FROM_0_TO_1)
def test_messages(three_ranks: Session, name: str) -> None:
    """What the sender did before is ordered before what the receiver does after."""
    both = {(0, 1), (1, 0)} if name == "sendrecv" else {(0, 1)}
    assert unordered(three_ranks, FROM_0_TO_1[name]) == set(PAIRS) - both


TURNS = {
    "with": "with dist.lock('a'): pass",
    "acquire, release": "lock = dist.lock('a'); lock.acquire(); lock.release()",
    "dropped": "lock = dist.lock('a'); lock.__enter__(); del lock",
    "another lock": "with dist.lock('b'): pass",
}
"""How a rank uses the lock, or another one."""
FLAG = """\
import pathlib, time
flag = pathlib.Path({path!r})
def wait():
    while not flag.exists(): time.sleep(0.001)
"""


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("last", TURNS)
@pytest.mark.parametrize("first", ["with", "acquire, release", "dropped"])
def test_locks(three_ranks: Session, tmp_path: Path, first: str, last: str) -> None:
    """A release is ordered before the next acquisition; a file that tells whose turn it is orders nothing."""
    calls = FLAG.format(path=str(tmp_path / "released")) + (
        f"if rank == 0:\n    {TURNS[first]}\n    flag.touch()\nif rank == 1:\n    wait()\n    {TURNS[last]}"
    )
    ordered = set() if last == "another lock" else {(0, 1)}
    assert unordered(three_ranks, calls) == set(PAIRS) - ordered


def test_a_lock_that_was_not_got(three_ranks: Session, tmp_path: Path) -> None:
    """It orders nothing, and what comes later is ordered as ever."""
    calls = FLAG.format(path=str(tmp_path / "late")) + (
        "if rank == 0:\n"
        "    with dist.lock('a'):\n        dist.send(1, 1)\n        wait()\n"
        "if rank == 1:\n"
        "    dist.recv(src=0)\n"
        "    try: dist.lock('a', timeout=0.01).acquire()\n"
        "    except TimeoutError: flag.touch()\n"
        "if rank == 2:\n    wait()\n    with dist.lock('a'): pass"
    )
    assert unordered(three_ranks, calls) == set(PAIRS) - {(0, 1), (0, 2)}
