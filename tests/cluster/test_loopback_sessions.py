"""A session on hosts that are objects of this process: numbers, values, names, errors, losses."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.cluster import host_messages
from nbparallel.errors import HostBoundaryError, ParallelError
from nbparallel.testing.processes import read
from nbparallel.testing.waiting import wait_until
from tests.cluster.sink import Sink
from tests.harness.clusters import session_messages

pytestmark = pytest.mark.time_limit(60)


def _where(names: str) -> str:
    return f"import os; [os.environ[name] for name in {names.split()!r}]"


def test_ranks_are_numbered_host_by_host(hosts: nbp.Session) -> None:
    """Global numbers in names and environment, local ones where torchrun has them."""
    assert hosts.world_size == 4
    assert hosts.run("rank, world_size").values == [(rank, 4) for rank in range(4)]
    found = hosts.run(_where("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK")).values
    assert found == [[str(r), str(r % 2), "4", "2", str(r // 2)] for r in range(4)]
    assert hosts.run("dist.get_rank(), dist.get_world_size()").values == [(rank, 4) for rank in range(4)]


def test_values_output_and_displays_come_as_from_one_machine(hosts: nbp.Session) -> None:
    """Text live and whole, before the sink is finished; the value shown once for each rank."""
    sink = Sink()
    result = hosts.run(
        "import sys\nprint('out', rank)\nprint('err', rank, file=sys.stderr)\nrank * 10", sink=sink
    )
    assert result.values == [0, 10, 20, 30]
    assert [each.stdout for each in result] == [f"out {rank}\n" for rank in range(4)]
    assert [each.stderr for each in result] == [f"err {rank}\n" for rank in range(4)]
    assert sorted(sink.shown) == [(rank, str(10 * rank)) for rank in range(4)]
    assert sink.texts[-1][1] == "finish"
    whole = {
        rank: "".join(text for r, name, text in sink.texts if (r, name) == (rank, "stdout"))
        for rank in range(4)
    }
    assert whole == {rank: f"out {rank}\n" for rank in range(4)}


def test_much_output_arrives_in_order(hosts: nbp.Session) -> None:
    """Ten thousand lines of each rank, none lost, none out of order."""
    result = hosts.run("for i in range(10_000): print(i)")
    assert all(each.stdout.split() == [str(i) for i in range(10_000)] for each in result)


def test_large_values_come_whole(hosts: nbp.Session) -> None:
    """Larger than an event and than a piece, there and back."""
    x = np.arange(1_500_000.0)
    result = hosts.run("given['x'] + rank", namespace={"given": {"x": x}})
    assert all(np.array_equal(value, x + rank) for rank, value in enumerate(result.values))


def test_names_of_the_notebook_follow_the_rules(hosts: nbp.Session) -> None:
    """Sent on first use and on a change; kept where a rank assigned them; functions see the rank's names."""
    names: dict[str, Any] = {"a": 1, "np": np}
    exec("def f():\n    return a + rank\nclass Point:\n    def __init__(self, x): self.x = x", names)
    names["f"].__module__ = names["Point"].__module__ = "__main__"
    assert hosts.run("f()", namespace=names).values == [1, 2, 3, 4]
    names["a"] = 10
    assert hosts.run("f()", namespace=names).values == [10, 11, 12, 13]
    hosts.run("if rank == 2: a = 100", namespace=names)
    assert hosts.run("a", namespace=names).values == [10, 10, 100, 10]
    names["a"] = 7
    assert hosts.run("a", namespace=names).values == [7] * 4
    assert hosts.run("Point(rank).x", namespace=names).values == [0, 1, 2, 3]


def test_call_pull_push_draw(hosts: nbp.Session) -> None:
    """What is no cell works as on one machine."""
    assert hosts.call(lambda x: x + 1, 4) == [5] * 4
    hosts.push(given=np.arange(3))
    assert all(np.array_equal(value, np.arange(3)) for value in hosts.pull("given"))
    hosts.run("mine = rank", ranks=[1, 3])
    assert hosts.run("mine", ranks=[1, 3]).values == [1, 3]
    assert sorted(hosts.draw("given").ranks) == [0, 1, 2, 3]


def test_a_cell_in_the_background(hosts: nbp.Session) -> None:
    """`submit` returns at once; another cell is refused until it has ended, or waits for its turn."""
    pending = hosts.submit("import time; time.sleep(0.2); rank")
    with pytest.raises(nbp.BusyError):
        hosts.run("1")
    queued = hosts.submit("rank + 1", queue=True)
    assert pending.result(20).values == [0, 1, 2, 3]
    assert queued.result(20).values == [1, 2, 3, 4]


def test_errors_name_the_host(hosts: nbp.Session) -> None:
    """The message names rank and host; other hosts are released, and nobody waits for them."""
    began = time.monotonic()
    with pytest.raises(ParallelError, match=r"ZeroDivisionError on rank 3 \(host b\), line 1") as caught:
        hosts.run("1 / (3 - rank)\nimport time; time.sleep(30)")
    assert time.monotonic() - began < 15
    assert list(caught.value.errors) == [3]
    assert isinstance(caught.value.errors[3], ZeroDivisionError)
    assert "ranks 0-1 (host a), 2 (host b) were released" in str(caught.value)
    assert hosts.run("rank").values == [0, 1, 2, 3]


def test_a_host_without_memory_is_named(hosts: nbp.Session) -> None:
    """As every error of a rank."""
    with pytest.raises(ParallelError, match=r"SharedMemoryFullError on rank 2 \(host b\)"):
        hosts.run("if rank == 2: nbp.zeros(1 << 50, 'u1')")


def test_on_error_continue(hosts: nbp.Session) -> None:
    """The others run to their end."""
    with pytest.raises(ParallelError) as caught:
        hosts.run("1 / rank; done = True", on_error="continue")
    assert list(caught.value.errors) == [0]
    assert hosts.run("done", ranks=[1, 2, 3]).values == [True] * 3


def test_a_dead_rank_is_named_and_comes_back(hosts: nbp.Session) -> None:
    """Only its variables are gone; the next cell sends it what it lacks."""
    names = {"a": 5}
    hosts.run("own = rank + a", namespace=names)
    with pytest.raises(ParallelError, match=r"RankDiedError: rank 2 \(host b\)"):
        hosts.run("import os, signal\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)")
    result = hosts.run("'own' in globals(), a", namespace=names)
    assert result.values == [(True, 5), (True, 5), (False, 5), (True, 5)]
    assert any("rank 2 (host b)" in note for note in result.notes)


def test_a_death_of_which_no_event_has_come_yet(hosts: nbp.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What became of the cell tells it as well: the event comes from another thread of the node."""
    send = host_messages.send_message
    monkeypatch.setattr(
        host_messages,
        "send_message",
        lambda emit, kind, *rest: None if kind == "died" else send(emit, kind, *rest),
    )
    names = {"a": 5}
    hosts.run("a", namespace=names)
    with pytest.raises(ParallelError, match=r"RankDiedError: rank 2 \(host b\)"):
        hosts.run("import os, signal\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)")
    assert hosts.run("a", namespace=names).values == [5, 5, 5, 5]
    pid = hosts.run("import os; os.getpid()").values[2]
    os.kill(pid, 9)
    wait_until(lambda: not read(pid))
    with pytest.raises(ParallelError, match=r"rank 2 \(host b\) died before the cell began"):
        hosts.run("a", namespace=names)  # it had not been sent to the new process
    result = hosts.run("a", namespace=names)
    assert result.values == [5, 5, 5, 5]
    assert any("rank 2 (host b)" in note for note in result.notes)


def test_a_rank_that_dies_between_cells(hosts: nbp.Session) -> None:
    """The next cell finds it started again, with the notebook's names."""
    names = {"a": 5}
    pids = hosts.run("import os; a; os.getpid()", namespace=names).values
    os.kill(pids[1], 9)
    wait_until(lambda: not session_messages(hosts).empty())
    result = hosts.run("a, rank", namespace=names)
    assert result.values == [(5, rank) for rank in range(4)]


def test_interrupts_and_time_outs(hosts: nbp.Session) -> None:
    """Both reach every host."""
    pending = hosts.submit("import time; time.sleep(30)")
    wait_until(lambda: session_messages(hosts).empty())
    time.sleep(0.3)
    pending.cancel()
    with pytest.raises(KeyboardInterrupt):
        pending.result(20)
    with pytest.raises(nbp.CellTimeoutError, match="ranks 0-1"):
        hosts.run("import time; time.sleep(30)", timeout=0.3)
    assert hosts.run("rank").values == [0, 1, 2, 3]


_ACROSS = """
dist.lock('x').acquire()
dist.maxloc(1, rank)
all_reduce(rank, async_op=True)
dist.minloc(1, rank, group=dist.new_group([0, 3] if rank in (0, 3) else [1, 2]))
"""


@pytest.mark.parametrize("cell", _ACROSS.strip().splitlines())
def test_operations_across_hosts_are_refused(hosts: nbp.Session, cell: str) -> None:
    """At the call, on the ranks that call it, with both sides named; nobody waits."""
    began = time.monotonic()
    with pytest.raises(ParallelError) as caught:
        hosts.run(cell)
    assert time.monotonic() - began < 15
    error = next(iter(caught.value.errors.values()))
    assert type(error) is HostBoundaryError
    assert "on host a needs" in str(caught.value) or "on host b needs" in str(caught.value)
    assert "(host b)" in str(caught.value)
    assert "host_group()" in str(caught.value)


def test_everything_works_inside_a_host(hosts: nbp.Session) -> None:
    """Groups, messages, locks' refusal apart: `host_group` is the ranks of the host."""
    cell = "g = dist.host_group(); (all_reduce(rank, group=g), all_gather(rank, group=g), list(g.ranks))"
    assert hosts.run(cell).values == [(1, [0, 1], [0, 1])] * 2 + [(5, [2, 3], [2, 3])] * 2
    assert hosts.run("dist.sendrecv(rank, rank ^ 1, src=rank ^ 1)").values == [1, 0, 3, 2]
    assert hosts.run("dist.new_group([2, 3]).size()", ranks=[0, 1]).values == [2, 2]
    with pytest.raises(ParallelError, match="CollectiveMismatchError"):
        hosts.run("g = dist.host_group()\nif rank == 2: barrier(group=g)\nelse: all_reduce(1, group=g)")
    with pytest.raises(ParallelError, match=r"DeadlockError.*rank"):
        hosts.run("recv(src=rank ^ 1)")


def test_what_needs_one_machine_is_refused(hosts: nbp.Session) -> None:
    """Before anything runs, with what to do instead."""
    shared = nbp.zeros(4)
    refused = [
        (lambda: hosts.run("x", namespace={"x": shared}), "x_here = x.copy"),
        (lambda: hosts.run("x", namespace={"x": np.zeros(3)}, share=["x"]), "return its part"),
        (lambda: hosts.share_names(["x"], {"x": np.zeros(3)}), "return its part"),
        (lambda: hosts.run("x", check_races=True), "one machine"),
        (lambda: hosts.map(abs, [1, 2]), "rank::world_size"),
        (lambda: hosts.resize(8), "ranks_per_host"),
    ]
    for call, text in refused:
        with pytest.raises(HostBoundaryError, match=text):
            call()
    assert hosts.run("rank").values == [0, 1, 2, 3]


def test_input_is_refused(hosts: nbp.Session) -> None:
    """There is no keyboard on a host of a cluster."""
    with pytest.raises(ParallelError, match="host of a cluster"):
        hosts.run("input('?')", ranks=[2])
    with pytest.raises(ParallelError, match="ZeroDivision"):  # failures are heard of afterwards, too
        hosts.run("1 / (rank - 2)")


def test_restart(hosts: nbp.Session) -> None:
    """Of one rank: the others keep their variables."""
    hosts.run("kept = rank")
    hosts.restart(2)
    assert hosts.run("'kept' in globals()").values == [True, True, False, True]
