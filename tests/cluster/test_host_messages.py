"""Messages between ranks of different hosts: what arrives, in which order, and what goes wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    HostBoundaryError,
    HostLostError,
    ParallelError,
    PeerFailedError,
)
from tests.harness.clusters.loopback import Loopback

pytestmark = pytest.mark.time_limit(60)


def _fail(session: nbp.Session, cell: str, seconds: float = 15) -> ParallelError:
    """Run a cell that fails; return its error."""
    began = time.monotonic()
    with pytest.raises(ParallelError) as caught:
        session.run(cell, namespace={"np": np})
    assert time.monotonic() - began < seconds
    return caught.value


VALUES = [
    "rank", "None", "2**70", "'x' * 100_000", "b'y' * 3", "{'of': rank, 'list': [np.ones(3), (rank,)]}",
    "np.arange(3) + rank", "np.arange(200_000.0) + rank", "np.arange(9).reshape(3, 3)[:, ::2] + rank",
    "np.zeros((0, 3))", "np.array(rank)", "np.array(['a', 'bc'] * 20_000)", "nbp.full(50_000, rank + 1.0)",
    "[nbp.full(50_000, rank + 1.0)]", "np.array([{1}, None], object)",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_a_value_arrives_as_it_was_sent(hosts: nbp.Session, value: str) -> None:
    """Whatever its size and kind, and it is the receiver's: what the sender writes then does not reach it."""
    cell = f"""
x, there = {value}, (rank + 2) % 4
send(x, there)
if isinstance(x, np.ndarray) and x.dtype != object: x[...] = x.dtype.type()
y = recv(src=there)
if isinstance(y, np.ndarray): y.flags.writeable or 1 / 0
y
"""
    found = hosts.run(cell, namespace={"np": np}).values
    for rank, value_there in enumerate(found):
        wanted: Any = eval(value, {"np": np, "nbp": nbp, "rank": (rank + 2) % 4})
        np.testing.assert_equal(value_there, wanted)
        assert type(value_there) is type(wanted)
        assert getattr(value_there, "dtype", None) == getattr(wanted, "dtype", None)


def test_arrays_are_filled(hosts: nbp.Session) -> None:
    """Short and long, strided ones as well; `recv` returns the source."""
    cell = """
there = (rank + 2) % 4
for size in 3, 300_000:
    send(np.arange(size) + rank, there); send(np.arange(size) - rank, there)
    x, y = np.empty(size, int), np.empty((size, 2), int)[:, 0]
    source = recv(x, there), recv(y, return_source=True)[1]
    assert source == (there, there)
    assert (x == np.arange(size) + there).all() and (y == np.arange(size) - there).all()
"""
    hosts.run(cell, namespace={"np": np})


def test_order_tags_and_sources(hosts: nbp.Session) -> None:
    """Messages of a tag come in order, others may be taken first, large ones among them; from any rank."""
    cell = """
big = np.full(100_000, rank)
for other in range(4):
    if other != rank:
        send(("first", rank), other); send(big, other, tag=1); send(("second", rank), other)
        send(("late", rank), other, tag=7)
late = {recv(src=other, tag=7)[1] for other in range(4) if other != rank}
plain = [recv(return_source=True) for _ in range(6)]
arrays = [recv(tag=1, return_source=True) for _ in range(3)]
per_source = {s: [v[0] for (v, t) in plain if t == s] for s in range(4) if s != rank}
right = all((x == s).all() for x, s in arrays) and late == set(range(4)) - {rank}
(right, per_source, len({s for _, s in arrays}))
"""
    for rank, found in enumerate(hosts.run(cell, namespace={"np": np}).values):
        assert found == (True, {r: ["first", "second"] for r in range(4) if r != rank}, 3)


def test_receives_that_were_begun(hosts: nbp.Session) -> None:
    """`irecv` beside `isend`, `sendrecv` in a ring, and a `send` that waits for its receiver."""
    cell = """
begun = [irecv(src=other, tag=2) for other in range(4)]
works = [isend((rank, other), other, tag=2) for other in range(4)]
got = [work.result() for work in begun]
x = np.full(200_000, rank)
ring = sendrecv(x, (rank + 1) % 4, (rank - 1) % 4)[0]
dist.strict_sync(True)
try:
    if rank < 2: send(rank, rank + 2); strict = recv(src=rank + 2)
    else: strict = recv(src=rank - 2); send(rank, rank - 2)
finally:
    dist.strict_sync(False)
(got, int(ring), strict, all_reduce(1))
"""
    for rank, found in enumerate(hosts.run(cell, namespace={"np": np}).values):
        assert found == ([(other, rank) for other in range(4)], (rank - 1) % 4, (rank + 2) % 4, 4)


def test_what_nobody_receives_stops_nothing(hosts: nbp.Session) -> None:
    """Of a rank that computes: large messages to it hold up neither others nor collectives; then it waits."""
    cell = """
import time
if rank == 0:
    sent = time.monotonic()
    for i in range(20): send(np.full(100_000, i), 3)
    quick = time.monotonic() - sent < 5
    recv(src=2)
elif rank == 2:
    send("here", 0)
elif rank == 3:
    time.sleep(1)
    quick = [int(recv(src=0)[0]) for i in range(20)] == list(range(20))
all_reduce(1)
quick if rank in (0, 3) else True
"""
    assert hosts.run(cell, namespace={"np": np}).values == [True] * 4


def test_a_full_ring_waits_for_room(hosts: nbp.Session) -> None:
    """Hundreds of kilobytes of short messages to a rank that computes; all arrive, in order."""
    cell = """
import time
if rank == 1:
    for i in range(3000): send(np.full(40, i), 2)
elif rank == 2:
    time.sleep(0.5)
    assert all((recv(src=1) == i).all() for i in range(3000))
"""
    hosts.run(cell, namespace={"np": np})


@pytest.mark.parametrize(
    ("cell", "texts"),
    [
        ("recv(src=(rank + 2) % 4)", ["rank 0 waits in recv(src=2) for rank 2 (host b) (line 1)"]),
        ("recv(src=3) if rank == 0 else barrier()", ["rank 3 waits in barrier", "0 waits in recv(src=3)"]),
        ("recv(src=2) if rank == 0 else None", ["rank 2 (host b) finished the cell without sending it"]),
        ("recv() if rank == 3 else None", ["finished the cell"]),
        ("recv(src=2, tag=4) if rank == 0 else send(1, 0, tag=5) if rank == 2 else 0", ["tag 5 from rank 2"]),
        ("dist.strict_sync(True); send(rank, (rank + 1) % 4)", ["rank 3 waits in send(dst=0)"]),
        ("dist.strict_sync(True); send(1, 2) if rank == 1 else 0", ["the cell without receiving"]),
    ],
)  # fmt: skip
def test_deadlocks_over_hosts_are_named(hosts: nbp.Session, cell: str, texts: list[str]) -> None:
    """With what every rank waits for, on which host; the same on all that wait."""
    error = _fail(hosts, cell, 8)
    waiting = [each for each in error.errors.values() if not isinstance(each, PeerFailedError)]
    assert {type(each) for each in waiting} == {DeadlockError}
    for text in texts:
        assert text in str(error)
    assert hosts.run("dist.strict_sync(False); all_reduce(rank)").values == [6] * 4


def test_a_wait_that_can_end_is_no_deadlock(hosts: nbp.Session) -> None:
    """Of a rank that computes, one with a time-out, and one of which the message is on its way."""
    cell = """
import time
if rank == 3: time.sleep(1.5); send(1, 0)
elif rank == 0: recv(src=3); send(2, 2)
elif rank == 2: recv(src=0)
barrier()
try: recv(src=(rank + 2) % 4, timeout=1)
except CollectiveTimeoutError: found = "timed out"
barrier()
found
"""
    names = {"CollectiveTimeoutError": CollectiveTimeoutError}
    assert hosts.run(cell, namespace=names).values == ["timed out"] * 4


def test_what_does_not_fit_is_refused_and_can_still_be_received(hosts: nbp.Session) -> None:
    """With both forms, short and long."""
    cell = """
send(np.zeros(3 if rank else 300_000), (rank + 2) % 4)
try: recv(np.zeros(4), (rank + 2) % 4)
except Exception as error: found = type(error).__name__, "float64" in str(error)
(*found, recv(src=(rank + 2) % 4).size)
"""
    found = hosts.run(cell, namespace={"np": np}).values
    assert found == [("CollectiveMismatchError", True, 300_000 if rank == 2 else 3) for rank in range(4)]


def test_forgotten_messages_are_named(hosts: nbp.Session) -> None:
    """Those in rings and those that were taken aside; they are dropped, or kept for the next cell."""
    cell = "send(rank, (rank + 2) % 4); barrier()\nif rank == 1: send(np.zeros(50_000), 2, tag=9)"
    result = hosts.run(cell, namespace={"np": np})
    notes = "; ".join(result.notes)
    assert "dropped at the end of the cell" in notes
    for text in ("rank 0 to rank 2", "rank 1 to rank 3", "rank 2 to rank 0", "tag 9"):
        assert text in notes
    assert not hosts.run("barrier()").notes
    hosts.keep_messages = True
    try:
        kept = hosts.run("send((rank, np.full(50_000, rank)), (rank + 2) % 4)", namespace={"np": np}).notes
        assert "kept for later cells" in "; ".join(kept)
        cell = "r, x = recv(src=(rank + 2) % 4); (r, int(x[0]))"
        assert hosts.run(cell).values == [(r, r) for r in (2, 3, 0, 1)]
    finally:
        hosts.keep_messages = False


def test_only_cells_on_all_ranks(hosts: nbp.Session) -> None:
    """Elsewhere the call says so, and nobody waits; `view=True` needs the host's own memory."""
    for cell in ("send(1, (rank + 2) % 4)", "recv(src=(rank + 2) % 4)"):
        with pytest.raises(ParallelError) as caught:
            hosts.run(cell, ranks=[0, 2])
        assert {type(error) for error in caught.value.errors.values()} == {HostBoundaryError}
    error = _fail(hosts, "send(nbp.zeros(9), (rank + 2) % 4, view=True)")
    assert {type(each) for each in error.errors.values()} == {HostBoundaryError}


@pytest.mark.parametrize("cell", ["1 / (rank - 3)", "import os\nos._exit(3)"])
def test_a_rank_that_fails_frees_its_partners(hosts: nbp.Session, cell: str) -> None:
    """In `recv`, in a `send` that waits for room, and in any-source; the next cell works."""
    code = """
if rank == 0: recv(src=3)
elif rank == 1:
    while True: send(np.zeros(1000), 3)
elif rank == 2: recv()
"""
    error = _fail(
        hosts, code + "else:\n    import time; time.sleep(0.5)\n    " + cell.replace("\n", "\n    ")
    )
    assert 3 in error.errors
    assert hosts.run("send(rank, (rank + 2) % 4); recv(src=(rank + 2) % 4)").values == [2, 3, 0, 1]


def test_a_rank_that_dies_behind_its_part(hosts: nbp.Session) -> None:
    """What it had sent dies with it: its receiver, which asks later, is told."""
    cell = """
import os, threading, time
if rank == 3:
    send(np.zeros(100_000), 0)
    threading.Timer(0.3, os._exit, (3,)).start()
if rank == 0:
    time.sleep(1.5)
    recv(src=3)
"""
    error = _fail(hosts, cell)
    assert "PeerFailedError on rank 0 (host a), line 7: rank 3 (host b) died" in str(error)
    assert hosts.run("all_reduce(rank)").values == [6] * 4


def test_interrupt(hosts: nbp.Session) -> None:
    """■ ends every wait for another host, also between the pieces of a large message."""
    for cell in (
        "recv(src=(rank + 2) % 4, timeout=60)",
        "x = np.zeros(1_000_000)\nwhile True: sendrecv(x, (rank + 2) % 4, (rank + 2) % 4)",
        "while True: send(1, (rank + 2) % 4)",
        "__import__('time').sleep(60) if rank > 1 else None",
    ):
        pending = hosts.submit(cell, namespace={"np": np})
        time.sleep(0.7)
        began = time.monotonic()
        pending.cancel()
        with pytest.raises(KeyboardInterrupt):
            pending.result(30)
        assert time.monotonic() - began < 3
        assert hosts.run("send(rank, (rank + 2) % 4); recv(src=(rank + 2) % 4)").values == [2, 3, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["lose", "unlink"])
def test_a_host_that_is_lost_frees_its_partners(how: str) -> None:
    """Ranks that wait for it get an error that names it, and others keep their variables."""
    cluster = Loopback(["a", "b", "c"], cpus=1)
    with nbp.Session(cluster=cluster) as session:
        session.run("kept = rank")
        pending = session.submit("recv(src=2) if rank == 0 else __import__('time').sleep(30)")
        time.sleep(1)
        if how == "lose":
            cluster.lose("c")
        else:
            cluster.nodes["a"].break_link("c")
        began = time.monotonic()
        with pytest.raises(ParallelError) as caught:
            pending.result(40)
        assert time.monotonic() - began < 10
        assert isinstance(caught.value.errors[0], HostLostError | PeerFailedError)
        assert "host c" in str(caught.value)
        assert session.run("kept", ranks=[0, 1]).values == [0, 1]


@pytest.mark.slow
def test_three_hosts() -> None:
    """A ring over all, a deadlock over all, and a message that is on its way between two others."""
    with nbp.Session(cluster=Loopback(["a", "b", "c"], cpus=1)) as session:
        cell = "x = np.full(100_000, rank)\n"
        cell += "[int(sendrecv(x, (rank + 1) % 3, (rank - 1) % 3)[0]) for _ in range(5)]"
        assert session.run(cell, namespace={"np": np}).values == [[2] * 5, [0] * 5, [1] * 5]
        error = _fail(session, "recv(src=(rank - 1) % 3)", 8)
        assert all(f"rank {r} waits in recv" in str(error) for r in range(3))
        assert session.run("send(rank, (rank + 1) % 3); recv()").values == [2, 0, 1]


def test_a_failure_that_others_caught_is_the_reason_on_all_hosts(hosts: nbp.Session) -> None:
    """Ranks that leave the cell for it are not taken for ranks that forgot an operation."""
    cell = """
import time
if rank == 3: time.sleep(0.3); raise ZeroDivisionError("on purpose")
try: recv(src=2) if rank == 0 else barrier()
except PeerFailedError as error: text = str(error)
"""
    with pytest.raises(ParallelError, match="ZeroDivisionError on rank 3"):
        hosts.run(cell, namespace={"PeerFailedError": PeerFailedError})
    found = hosts.run("text", ranks=[0, 1, 2]).values
    assert all("rank 3 (host b) failed: ZeroDivisionError" in text for text in found), found


def test_a_group_over_hosts_is_in_ascending_order(hosts: nbp.Session) -> None:
    """`split` with a key that reorders ranks of several hosts is refused, where values would be mixed up."""
    error = _fail(hosts, "all_gather(rank, group=dist.split(0, -rank))")
    assert HostBoundaryError in map(type, error.errors.values())
    assert "not [3, 2, 1, 0]: leave `key` out of split" in str(error)
    assert hosts.run("all_gather(rank, group=dist.split(0, rank))").values == [[0, 1, 2, 3]] * 4


@pytest.fixture
def slow() -> Iterator[nbp.Session]:
    """Return a session of two ranks on two hosts, between which a large message takes a while."""
    cluster = Loopback(["a", "b"], cpus=1)
    with nbp.Session(cluster=cluster) as session:
        session.run("pass")
        for mine, theirs in ("ab", "ba"):
            cluster.nodes[mine].connections[theirs].before = lambda: time.sleep(0.02)
        yield session


def test_irecv_does_not_wait_for_a_large_message(slow: nbp.Session) -> None:
    """It returns while the content is still with the sender."""
    cell = "x = np.arange(3e6)\nif rank: send(x, 0)\nbarrier()\nbegan = time.monotonic()\n"
    cell += "if not rank: work = irecv(src=1)\nnow = time.monotonic()\n"
    cell += "right = rank or bool((work.result() == x).all())\n"
    cell += "now - began < 0.2, right, time.monotonic() - now > 0.3"
    assert slow.run(cell, namespace={"np": np, "time": time}).values[0] == (True, True, True)


def test_a_large_message_comes_inside_of_another_wait(slow: nbp.Session) -> None:
    """Both waits count, and the rank lives on."""
    cell = "x = np.arange(3e6)\nif rank: work = irecv(src=0)\nelse: send(x, 1)\nbarrier()\n"
    cell += "bool((work.result() == x).all()) if rank else True"
    assert slow.run(cell, namespace={"np": np}).values == [True, True]
    assert slow.run("all_reduce(1)").values == [2, 2]


def test_a_message_that_was_left_is_not_mixed_with_the_next(slow: nbp.Session) -> None:
    """An exception of a signal's handler ends a `recv`; others receive that message, and the next."""
    cell = """
import signal
def late(*_): raise KeyError
if rank:
    for i in (1, 2): send(np.full(24 << 20, i, "u1"), 0)
barrier()
if not rank:
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try: recv(src=1)
    except KeyError: pass
[np.unique(recv(src=1)).tolist() for i in (1, 2)] if rank == 0 else None
"""
    assert slow.run(cell, namespace={"np": np}).values[0] == [[1], [2]]


def test_a_large_message_may_come_too_late(slow: nbp.Session) -> None:
    """A time-out ends `recv` while the content comes; it goes on coming, for another `recv`."""
    cell = """
if rank: send(np.arange(3e6), 0)
barrier()
for i in range(1, 31):
    if rank: break
    began = time.monotonic()
    try: x = recv(src=1, timeout=0.1); break
    except nbp.CollectiveTimeoutError as error: print(error, time.monotonic() - began < 0.3)
rank or (x[-1], i > 3)
"""
    result = slow.run(cell, namespace={"np": np, "nbp": nbp, "time": time})
    assert result.values[0] == (3e6 - 1, True)
    assert "message of rank 1 was coming from its host" in result[0].stdout
    assert "False" not in result[0].stdout


def test_a_poll_does_not_wait_for_a_large_message(slow: nbp.Session) -> None:
    """Neither does a wait with a time-out; the content goes on coming, and other messages come before it."""
    cell = """
if rank:
    for tag in (1, 1, 2): send(np.arange(3e6) + tag if tag == 1 else 0, 0, tag=tag)
barrier()
began = time.monotonic()
if not rank:
    works = [irecv(src=1, tag=tag) for tag in (1, 1, 2)]
    first = [work.is_completed() for work in works]
    try: works[0].wait(timeout=0.1)
    except nbp.CollectiveTimeoutError: first.append(time.monotonic() - began < 0.5)
    while not works[1].is_completed() and time.monotonic() - began < 10: time.sleep(0.01)
    began = time.monotonic()
    first.append([work.result() for work in works][2] == 0 and time.monotonic() - began < 0.1)
rank or first
"""
    result = slow.run(cell, namespace={"np": np, "nbp": nbp, "time": time})
    assert result.values[0] == [False, False, True, True, True]


def test_a_collective_that_comes_too_late_leaves_no_message(slow: nbp.Session) -> None:
    """No note names a message of the library's own."""
    cell = "if rank: time.sleep(0.6)\nelse:\n    try: barrier(timeout=0.2)\n"
    cell += "    except nbp.CollectiveTimeoutError as error: print(error)"
    result = slow.run(cell, namespace={"nbp": nbp, "time": time})
    assert "timed out" in result[0].stdout
    assert result.notes == ()
