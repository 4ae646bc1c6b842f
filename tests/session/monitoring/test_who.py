"""Who has which name: told by idle ranks in a moment, and nobody waits for a busy one."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nbparallel.session import Session
from nbparallel.session.monitoring.segments import compare
from nbparallel.sharing.store import Store
from nbparallel.testing.waiting import wait_until
from nbparallel.wire.inspection import NamespaceReport, Origin, VariableInfo


def test_real_ranks_tell_their_names(three_ranks: Session) -> None:
    """Types and shapes of every rank, also with hostile objects, and the ranks go on as before."""
    namespace: dict[str, Any] = {"x": np.ones((4, 3)), "words": ["a"] * 3}
    evil = (
        "class Evil:\n"
        "    __class__ = property(lambda self: exit(1))\n"
        "    shape = property(lambda self: exit(1))\n"
        "evil = Evil()\n"
    )
    three_ranks.run(evil + "words, x\nmine = rank if rank else 'zero'\nimport math", namespace=namespace)
    seen = three_ranks.who()
    assert seen.answered == (0, 1, 2)
    how = {record.name: (record.how, record.ranks[1].looks) for record in seen.names}
    assert how == {
        "Evil": ("own", "class"),
        "evil": ("own", "Evil"),
        "mine": ("differs", "int"),
        "words": ("copied", "list of 3"),
        "x": ("shared", "ndarray (4, 3) float64"),
    }
    assert three_ranks.run("x.sum()", namespace=namespace).values == [12.0] * 3


@pytest.mark.slow
def test_a_busy_rank_is_not_waited_for(three_ranks: Session) -> None:
    """While rank 0 runs a cell, rank 1 tells its names and rank 0 is named; a stopped one is, too."""
    three_ranks.run("a = rank")
    cell = threading.Thread(
        target=three_ranks.run, args=("import time\ntime.sleep(2)",), kwargs={"ranks": [0]}
    )
    cell.start()
    wait_until(lambda: three_ranks.statistics().ranks[0].state != "idle")
    seen = three_ranks.who({})
    assert (seen.busy, seen.answered) == ((0,), (1, 2))
    assert cell.is_alive()
    assert set(seen.names[0].ranks) == {1, 2}
    cell.join(30)
    pid = three_ranks.statistics().ranks[1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        seen = three_ranks.who({})
        assert (dict(seen.silent), seen.answered) == ({1: ""}, (0, 2))
    finally:
        os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: three_ranks.statistics().ranks[1].state == "dead")
    assert three_ranks.who({}).dead == (1,)
    assert three_ranks.run("rank").values == [0, 1, 2]


@pytest.mark.slow
def test_asking_while_cells_come_and_go(two_ranks: Session) -> None:
    """A thread that asks all the time disturbs neither values nor output of the cells."""
    stop = threading.Event()
    asked: list[Any] = []

    def ask() -> None:
        while not stop.is_set():
            asked.append(two_ranks.who({}))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for number in range(30):
            result = two_ranks.run(f"x = all_reduce({number})\nprint(x)\nx")
            assert result.values == [2 * number] * 2
            assert [result.ranks[rank].stdout for rank in (0, 1)] == [f"{2 * number}\n"] * 2
    finally:
        stop.set()
        thread.join(30)
    assert asked


def test_kinds_of_names() -> None:
    """Shared, copied, own, different, and what only the notebook has."""
    store = Store()
    x = store.share(np.zeros(8), strategy="file_descriptor")
    place = store.location(x)
    assert place is not None
    namespace = {"x": x, "words": [1], "here": 3, "_private": 1, "In": [], "np": np, "hidden": "h"}
    whole = (place.segment, place.start, place.stop)
    told = {
        "x": VariableInfo("x", "ndarray", "(8,) float64", Origin.SHARED, False, *whole),
        "old": VariableInfo("old", "ndarray", "(8,) float64", Origin.SHARED, False, 99, 0, 64),
        "words": VariableInfo("words", "list", "of 1", Origin.COPIED),
        "part": VariableInfo("part", "ndarray", "(2,) float64", Origin.OWN, False, place.segment, 16, 32),
        "mixed": VariableInfo("mixed", "int", "", Origin.OWN),
    }
    other = {**told, "mixed": VariableInfo("mixed", "float", "", Origin.OWN)}
    said = {0: NamespaceReport(1, tuple(told.values())), 1: NamespaceReport(1, tuple(other.values()), 7)}
    handles: Any = [SimpleNamespace(rank=rank, alive=True, busy=False, usable=True) for rank in said]
    seen = compare(namespace, {"hidden": namespace["hidden"]}, store, handles, said)
    how = {record.name: record.how for record in seen.names}
    assert how == {
        "here": "notebook only",
        "mixed": "differs",
        "old": "shared",
        "part": "own",
        "words": "copied",
        "x": "shared",
    }
    by_name = {record.name: record for record in seen.names}
    assert (by_name["part"].view_of, by_name["mixed"].view_of) == ("x", "")
    assert (by_name["old"].outdated, by_name["x"].outdated) == (True, False)
    assert (seen.left_out, seen.answered) == (7, (0, 1))
    store.close()
