"""Named segments and deaths: of a rank by any signal, and of the supervisor itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import ParallelError, SupervisorDiedError
from nbparallel.session import Session
from nbparallel.supervisor.sweep import steps
from nbparallel.testing.waiting import wait_until
from nbparallel.wire.identity import process_state
from tests.harness.stores import names_of
from tests.harness.turns import Promised

MAKE = "mine = [nbp.share(np.full(50_000, rank), strategy=s) for s in ('file_system', 'mmap')]"


def open_files(pid: int) -> list[str]:
    """Return what the descriptors of a process lead to."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:
            continue
    return found


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT", "SIGBUS"])
def test_names_and_memory_of_a_rank_go_whatever_signal_ends_it(name: str, promised: Promised) -> None:
    """The dead rank's names and memory are gone, what others made or hold stays."""
    x = nbp.share(np.ones(50_000), strategy="file_system")
    with Session(2) as session:
        session.run(f"total = x.sum()\n{MAKE}", namespace={"x": x, "np": np})
        seen = session.statistics()
        before = names_of(os.getpid())
        assert len(before) == 5
        session.run("del mine", ranks=[1])
        wait_until(lambda: len(names_of(os.getpid())) == 3, lambda: names_of(os.getpid()))
        kept = names_of(os.getpid())
        session.run(MAKE, ranks=[1], namespace={"np": np})
        dying = set(names_of(os.getpid())) - set(kept)
        assert len(dying) == 2
        with promised(1.0):
            with pytest.raises(ParallelError):
                session.run(f"import signal, os; os.kill(os.getpid(), signal.{name})", ranks=[1])
            wait_until(lambda: names_of(os.getpid()) == kept, lambda: names_of(os.getpid()))
            wait_until(
                lambda: not any(path.startswith(tuple(dying)) for path in open_files(seen.supervisor_pid)),
                lambda: open_files(seen.supervisor_pid),
            )
        assert session.run("float(x.sum())", namespace={"x": x}).values == [50_000.0] * 2
        assert session.run("int(mine[1].sum())", ranks=[0]).values[0] == 0
    assert x.sum() == 50_000
    del x
    nbp.sharing.current_store().drain()


@pytest.mark.slow
def test_what_only_a_dead_rank_made_stays_while_others_hold_it() -> None:
    """A name goes with the last hold, not with its maker; no sweep removes it until then."""
    with Session(2) as session:
        session.run(
            "if rank:\n"
            "    made = nbp.share(np.arange(40_000.0), strategy='file_system')\n"
            "    send(made, 0, view=True)\n"
            "else:\n"
            "    held = recv(src=1)",
            namespace={"np": np},
        )
        (name,) = names_of(os.getpid())
        os.kill(session.statistics().ranks[1].pid, signal.SIGKILL)
        wait_until(lambda: session.statistics().ranks[1].state == "dead", session.statistics)
        assert session.run("float(held.sum())", ranks=[0]).values[0] == np.arange(40_000.0).sum()
        assert [found.path for found in steps() if found is not None and found.needed] == [name]
        session.run("del held", ranks=[0])
        wait_until(lambda: not os.path.exists(name), lambda: name)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; its parent may not have asked for it yet."""
    state = process_state(pid)
    return state is None or state.letter in "ZX"


def kill_idle(session: Session, pid: int) -> None:
    """Kill the supervisor while nobody does anything."""
    os.kill(pid, signal.SIGKILL)


def kill_while_ranks_make_names(session: Session, pid: int) -> None:
    """Kill it in the middle of ranks' announcements."""
    with pytest.raises((SupervisorDiedError, ParallelError)):
        session.run(
            "import os, signal, threading\n"
            f"if rank == 0: threading.Timer(0.05, os.kill, ({pid}, signal.SIGKILL)).start()\n"
            "while True: mine = [nbp.share(np.ones(2000), strategy='file_system') for _ in range(5)]"
        )


def kill_while_the_notebook_makes_names(session: Session, pid: int) -> None:
    """Kill it in the middle of the notebook's announcements."""
    threading.Timer(0.05, os.kill, (pid, signal.SIGKILL)).start()
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        nbp.share(np.ones(70_000), strategy="file_system")


def kill_with_announcements_unread(session: Session, pid: int) -> None:
    """Kill it while what the notebook and ranks announced lies in its sockets."""
    os.kill(pid, signal.SIGSTOP)
    for _ in range(5):
        nbp.share(np.ones(70_000), strategy="mmap")
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize(
    "kill",
    [
        kill_idle,
        kill_while_ranks_make_names,
        kill_while_the_notebook_makes_names,
        kill_with_announcements_unread,
    ],
)
def test_the_janitors_own_death(kill: Callable[[Session, int], None]) -> None:
    """The notebook's names and arrays stay and are the next supervisor's; the dead ranks' names go."""
    arrays = [nbp.share(np.full(50_000, i), strategy=s) for i, s in enumerate(("file_system", "mmap"))]
    own = names_of(os.getpid())
    assert len(own) == 2
    with Session(2) as session:
        session.run(MAKE + "\nfirst, second = arrays", namespace={"np": np, "arrays": arrays})
        assert len(names_of(os.getpid())) == 6
        pid = session.statistics().supervisor_pid
        kill(session, pid)
        wait_until(lambda: has_ended(pid), lambda: pid)
        assert [int(x[0]) for x in arrays] == [0, 1]
        result = session.run("[int(x[-1]) for x in arrays]", namespace={"arrays": arrays})
        assert result.values == [[0, 1]] * 2
        wait_until(lambda: names_of(os.getpid()) == own, lambda: names_of(os.getpid()))
        assert session.statistics().supervisor_pid != pid
    assert names_of(os.getpid()) == [], "the new supervisor saw to the notebook's names"
    assert [int(x[0]) for x in arrays] == [0, 1]
    del arrays, result
    nbp.sharing.current_store().drain()


OWNER = """
import json, os, signal, sys, numpy as np, nbparallel as nbp
x = nbp.share(np.ones(50_000), strategy="file_system")
session = nbp.Session(2)
session.run("y = nbp.share(x + rank, strategy='mmap')", namespace={"x": x})
first = session.statistics().supervisor_pid
os.kill(first, signal.SIGKILL)
while session.statistics().supervisor_pid == first:  # it may die behind a cell or two
    try:
        session.run("1")
    except nbp.errors.SupervisorDiedError:
        session.run("1")
session.run("y = nbp.share(x + rank, strategy='mmap')", namespace={"x": x})
print(json.dumps([session.statistics().supervisor_pid, session.statistics().session]), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_second_janitor_cleans_up_after_the_notebook() -> None:
    """First the supervisor is killed, a cell later the notebook: nothing is left, without any sweep."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        supervisor, _ = json.loads(owner.stdout.readline())
        wait_until(lambda: len(names_of(owner.pid)) == 3, lambda: names_of(owner.pid))
        owner.kill()
        wait_until(lambda: not os.path.exists(f"/proc/{supervisor}/exe"), lambda: supervisor)
        wait_until(lambda: names_of(owner.pid) == [], lambda: (supervisor, names_of(owner.pid)))
