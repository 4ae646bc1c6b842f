"""Operations over hosts, against numpy; and what becomes of ranks that wait in one when something fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import takewhile
from random import Random
from typing import Any

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    HostBoundaryError,
    HostLostError,
    ParallelError,
    PeerFailedError,
)
from tests.cluster.host_conformance import HostInterruptsTests, HostOperationsTests
from tests.harness.clusters.loopback import Loopback

pytestmark = pytest.mark.time_limit(60)


class UnevenLoopback(Loopback):
    """A cluster whose first host has more ranks than the others."""

    def hosts(self) -> dict[str, int]:
        """Return the machines, with three ranks or one."""
        return {name: 3 if name == "a" else 1 for name in super().hosts()}


@pytest.fixture(scope="module", params=[Loopback, UnevenLoopback], ids=["2+2", "3+1"])
def hosts(request: pytest.FixtureRequest) -> Iterator[nbp.Session]:
    """Return a session with four ranks on the hosts a and b."""
    with nbp.Session(cluster=request.param(["a", "b"])) as session:
        session.run("pass")
        yield session


@pytest.mark.matrix
class TestLoopback(HostOperationsTests):
    """On hosts that are objects of this process."""


@pytest.mark.slow
class TestLoopbackInterrupts(HostInterruptsTests):
    """Likewise."""


def _fail(session: nbp.Session, cell: str, seconds: float = 15, **options: Any) -> ParallelError:
    """Run a cell that fails; return its error."""
    began = time.monotonic()
    with pytest.raises(ParallelError) as caught:
        session.run(cell, **options)
    assert time.monotonic() - began < seconds
    return caught.value


@pytest.mark.slow
def test_three_hosts() -> None:
    """Every leader with every other one."""
    with nbp.Session(cluster=Loopback(["a", "b", "c"], cpus=1)) as session:
        cell = (
            "x = np.full(300_000, 10.0**rank); all_reduce(x); (x[-1], all_gather(rank), broadcast(rank, 2))"
        )
        assert session.run(cell, namespace={"np": np}).values == [(111.0, [0, 1, 2], 2)] * 3


def test_different_calls_on_hosts(hosts: nbp.Session) -> None:
    """Every rank gets the table of all calls, and no array was touched."""
    cell = """
x = np.ones(3)
try:
    if rank == 3:
        all_reduce(np.ones(4))
    else:
        all_reduce(x)
except CollectiveMismatchError as error:
    found = str(error)
(found, x.tolist())
"""
    names = {"np": np, "CollectiveMismatchError": CollectiveMismatchError}
    found = hosts.run(cell, namespace=names).values
    assert len({text for text, _ in found}) == 1
    assert "0 (host a)  all_reduce  float64  (3,)" in found[0][0]
    assert "3 (host b)  all_reduce  float64  (4,)" in found[0][0]
    assert all(x == [1.0, 1.0, 1.0] for _, x in found)
    error = _fail(hosts, "barrier() if rank < world_size - 1 else all_gather(rank)")
    assert {type(each) for each in error.errors.values()} == {CollectiveMismatchError}
    for each in error.errors.values():
        assert "all_gather" in str(each)
        assert "(host b)" in str(each)
    assert hosts.run("all_reduce(1)").values == [4] * 4


def test_what_does_not_fit_is_refused_before_it_is_written(hosts: nbp.Session) -> None:
    """A buffer of another dtype on one rank."""
    cell = "x = np.zeros(2, 'f4' if rank == 2 else 'f8'); broadcast(x if rank else x + 5)"
    error = _fail(hosts, cell, namespace={"np": np})
    assert "what rank 0 (host a) passed to broadcast does not fit the array that rank 2 (host" in str(error)
    assert not any(x.any() for x in hosts.run("x", ranks=[1, 2, 3]).values)


def test_a_forgotten_call(hosts: nbp.Session) -> None:
    """A host whose ranks have ended the cell is named, with the table, at once."""
    error = _fail(hosts, "import os\nif os.environ['GROUP_RANK'] == '0': barrier()")
    assert {type(each) for each in error.errors.values()} == {CollectiveMismatchError}
    assert "finished the cell without calling barrier" in str(error)
    assert "(host b)" in str(error)
    assert hosts.run("all_reduce(rank)").values == [6] * 4


Call = tuple[str, int, int]
"""An operation, elements, a root; what does not matter to it is 0."""
WRONG = """
done = 0
for name, size, root in program[rank]:
    x = np.full(size, rank + 1.0)
    if name == "all_reduce": all_reduce(x, "max")
    elif name == "reduce": reduce(x, root)
    elif name == "broadcast": broadcast(x, root)
    elif name == "reduce_scatter": reduce_scatter(x)
    elif name == "all_gather": all_gather(rank)
    elif name == "number": all_reduce(rank)
    else: barrier()
    done += 1
"""
ROOTED, SIZED = ("reduce", "broadcast"), ("all_reduce", "reduce", "broadcast", "reduce_scatter")
PLAIN = ("all_gather", "number", "barrier")


def _random_call(random: Random, names: tuple[str, ...]) -> Call:
    name = random.choice(names)
    size = random.choice([4, 1000, 200_000]) if name in SIZED else 0
    return name, size, random.randrange(4) if name in ROOTED else 0


def _go_wrong(random: Random, kind: str) -> tuple[list[Call], list[Call]]:
    """Return a program, and another one that differs from it in one call."""
    calls = [_random_call(random, SIZED + PLAIN) for _ in range(random.randrange(2, 8))]
    at = random.randrange(len(calls))
    name, size, root = calls[at] = _random_call(random, SIZED) if kind == "shape" else calls[at]
    other = {
        "operation": [_random_call(random, tuple({*SIZED, *PLAIN} - {name}))],
        "shape": [(name, size + 4, root)],
        "forgotten": [],
        "one too many": [_random_call(random, SIZED + PLAIN), calls[at]],
    }[kind]
    return calls, [*calls[:at], *other, *calls[at + 1 :]]


@pytest.mark.slow
@pytest.mark.fault("F94")
@pytest.mark.parametrize("kind", ["operation", "shape", "forgotten", "one too many"])
def test_random_wrong_programs(hosts: nbp.Session, kind: str) -> None:
    """Ranks agree up to the call that differs; then all in a call are told; no array has changed."""
    for seed in range(12):
        random = Random(f"{kind} {seed}")
        right, wrong = _go_wrong(random, kind)
        who, program = random.randrange(4), [right] * 4
        program[who] = wrong
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(right, wrong, strict=False)))
        error = _fail(hosts, WRONG, namespace={"np": np, "program": program})
        about = f"rank {who} of {program}: {error}"
        calling = {rank for rank in range(4) if len(program[rank]) > same}
        assert set(error.errors) == calling, about
        assert {type(each) for each in error.errors.values()} == {CollectiveMismatchError}, about
        (host,) = (name for name, ranks in (hosts.hosts or {}).items() if who in ranks)
        assert all(f"{who} (host {host})" in str(each) for each in error.errors.values()), about
        done = hosts.run("done").values
        # the other host may be in an earlier call, which this one has left: what a root sent is on its way
        assert max(done) == same, about
        assert all(done[rank] == same for rank in (hosts.hosts or {})[host]), about
        assert all(hosts.run("bool((x == rank + 1).all())", ranks=sorted(calling)).values), about
        assert hosts.run("all_reduce(rank)").values == [6] * 4, about


def test_a_failure_on_another_host(hosts: nbp.Session) -> None:
    """Ranks that wait are free within half a second, with an error that names rank and host."""
    cell = """
import time
if rank == 3:
    time.sleep(0.3)
    failed = time.time()
    raise ZeroDivisionError("on purpose")
try:
    all_reduce(rank)
except PeerFailedError as error:
    freed, text, who = time.time(), str(error), error.rank
"""
    error = _fail(hosts, cell, namespace={"PeerFailedError": PeerFailedError})
    assert list(error.errors) == [3]
    (failed,) = hosts.run("failed", ranks=[3]).values
    for freed, text, who in hosts.run("freed, text, who", ranks=[0, 1, 2]).values:
        assert "rank 3 (host b) failed: ZeroDivisionError" in text
        assert "on purpose" in text
        assert who == 3
        assert freed - failed < 0.5
    assert hosts.run("all_reduce(rank)").values == [6] * 4


def test_a_failure_for_which_no_other_host_waits(hosts: nbp.Session) -> None:
    """It is not taken for one of the next cell."""
    _fail(hosts, "import time\nif rank == 3: raise ZeroDivisionError\nif rank < 2: time.sleep(0.4)")
    assert hosts.run("import time; time.sleep(0.1 * rank); all_reduce(rank)").values == [6] * 4


@pytest.mark.slow
def test_a_failure_while_other_ranks_go_on(hosts: nbp.Session) -> None:
    """With `on_error="continue"` as well: the operation needs the rank that failed."""
    cell = "if rank == 3: raise ZeroDivisionError('on purpose')\nif rank == 0: barrier()\nelse: barrier()"
    error = _fail(hosts, cell, on_error="continue")
    assert any(isinstance(each, ZeroDivisionError) for each in error.errors.values())
    assert hosts.run("all_reduce(rank)").values == [6] * 4


@pytest.mark.slow
def test_a_rank_that_dies(hosts: nbp.Session) -> None:
    """It is named where other hosts wait."""
    cell = """
import os, signal
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    barrier()
except PeerFailedError as error:
    text = str(error)
"""
    _fail(hosts, cell, namespace={"PeerFailedError": PeerFailedError})
    for text in hosts.run("text", ranks=[0, 1, 2]).values:
        assert "rank 3 (host b) died" in text or "RankDiedError" in text
    assert hosts.run("all_reduce(rank)").values == [6] * 4


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["all_reduce(x, 'max')", "all_gather(x)", "barrier()"])
@pytest.mark.parametrize("what", ["dies", "raises", "interrupt", "lost"])
def test_something_happens_in_the_middle(what: str, operation: str) -> None:
    """Wherever frames are: every rank is free soon, nothing of it reaches the next cell."""
    cluster = Loopback(["a", "b", "c"], cpus=2)
    cell = f"""
import ctypes, os, signal, threading
def dies(): os.kill(os.getpid(), signal.SIGKILL)
def raises(): ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(ZeroDivisionError))
main = ctypes.c_ulong(threading.main_thread().ident)
if rank == 3 and {what!r} in globals(): threading.Timer(0.5, globals()[{what!r}]).start()
x = np.full(400_000, rank * 1.0)
while True: {operation}
"""
    with nbp.Session(4, cluster=cluster) as session:
        session.run("pass")
        pending = session.submit(cell, namespace={"np": np})
        time.sleep(0.5)
        began = time.monotonic()
        if what == "interrupt":
            pending.cancel()
        elif what == "lost":
            cluster.lose("b")
        with pytest.raises(KeyboardInterrupt if what == "interrupt" else ParallelError):
            pending.result(30)
        assert time.monotonic() - began < 10
        assert session.run("all_gather(rank)").values == [[0, 1, 2, 3]] * 4


@pytest.mark.slow
def test_a_time_out_names_the_ranks_that_are_missing(hosts: nbp.Session) -> None:
    """Those of the other host."""
    cell = "import time\nif rank == 3: time.sleep(1)\nbarrier(timeout=0.2)"
    error = _fail(hosts, cell)
    timed_out = [each for each in error.errors.values() if isinstance(each, CollectiveTimeoutError)]
    assert timed_out
    assert all("barrier on line 3: timed out" in str(each) for each in timed_out)
    assert all("3 (host b) did not arrive" in str(each) for each in timed_out)


def test_a_cell_on_some_ranks_has_no_operations_of_all(hosts: nbp.Session) -> None:
    """As on one machine."""
    error = _fail(hosts, "barrier()", ranks=[0, 3])
    assert all(isinstance(each, HostBoundaryError) for each in error.errors.values())


@pytest.mark.slow
def test_a_lost_host() -> None:
    """Ranks that wait for it are told, and those of another host take its place."""
    cluster = Loopback(["a", "b", "c"], cpus=1)
    with nbp.Session(cluster=cluster, max_hosts=2) as session:
        session.run("pass")
        pending = session.submit("import time\nif rank: time.sleep(30)\nbarrier()")
        time.sleep(0.5)
        began = time.monotonic()
        cluster.lose("b", "its worker was killed")
        with pytest.raises(ParallelError, match="HostLostError: host b is lost"):
            pending.result(20)
        assert time.monotonic() - began < 5
        assert session.run("all_gather(rank)").values == [[0, 1]] * 2


@pytest.mark.slow
def test_a_link_that_breaks() -> None:
    """Ranks that wait are told which hosts it connected; the next task connects them again."""
    cluster = Loopback(["a", "b"], cpus=1)
    with nbp.Session(cluster=cluster) as session:
        session.run("barrier()")
        pending = session.submit("import time\nif rank: time.sleep(30)\nbarrier()")
        time.sleep(0.5)
        cluster.nodes["a"].break_link("b")
        with pytest.raises(ParallelError) as caught:
            pending.result(20)
        assert isinstance(caught.value.errors[0], HostLostError)
        assert "rank 1 (host b), and the link between the hosts is closed" in str(caught.value)
        assert session.run("all_reduce(rank)").values == [1, 1]
