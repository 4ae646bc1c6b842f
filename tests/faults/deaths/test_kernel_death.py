"""The process that owns a session ends, in every way and state: nothing of ours outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from nbparallel.testing.processes import ProcessRecord, family
from nbparallel.testing.waiting import wait_until
from tests.harness.turns import Promised

OWNER = """
import os, sys, threading
from nbparallel.session import Session
session = Session(3)
session.start()
session.run("import ctypes, os, signal, time; from nbparallel import zeros; big = zeros(1 << 20)")
print(session.statistics().session, flush=True)
source = {source!r}
if source:
    threading.Timer(0.3, print, ("running",), dict(flush=True)).start()
    {call}
else:
    print("running", flush=True)
    sys.stdin.read()
"""

STATES = {
    "idle": "",
    "computing": "while True: pass",
    "in all_reduce": "all_reduce(1) if rank else time.sleep(100)",
    "holding the GIL in C": "ctypes.PyDLL(None).sleep(100)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "with a child in a session of its own": (
        "import subprocess; subprocess.Popen(['sleep', '100'], start_new_session=True); time.sleep(100)"
    ),
}


def start(source: str, call: str = "session.run(source)") -> tuple[subprocess.Popen[str], str]:
    """Start an owner and wait until its ranks are in the state; return it and its session's id."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(source=source, call=call)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert owner.stdout is not None
    session = owner.stdout.readline().strip()
    assert owner.stdout.readline().strip() == "running"
    return owner, session


def records(session: str) -> list[ProcessRecord]:
    """Return the processes of a session."""
    mark = os.environ["NBP_TEST_RUN"]
    return [record for record in family(os.getpid(), mark) if record.session == session]


def members(session: str) -> list[str]:
    """Return the processes of a session, as text."""
    return [str(record) for record in records(session)]


def wait_until_gone(session: str) -> None:
    """Fail unless every process of the session ends."""
    wait_until(lambda: not members(session), lambda: "\n".join(members(session)))


def close(owner: subprocess.Popen[str]) -> None:
    """Reap the owner and close its pipes."""
    with owner:
        owner.kill()


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("how", ["kill", "killpg"])
def test_f10_a_killed_owner_leaves_nothing(state: str, how: str, promised: Promised) -> None:
    """Kill -9 of the process, or of its whole group: no process of the session is left."""
    owner, session = start(STATES[state])
    assert members(session)
    if how == "kill":
        owner.kill()
    else:
        os.killpg(owner.pid, signal.SIGKILL)
    with promised(2.0):
        wait_until_gone(session)
    close(owner)


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("how", ["returns", "raises", "exits"])
def test_f13_an_owner_that_exits_while_ranks_compute_ends_them_and_itself(
    how: str, promised: Promised
) -> None:
    """Leaving a script, whatever the way, takes the ranks along within two seconds."""
    call = {
        "returns": "threading.Thread(target=session.run, args=(source,), daemon=True).start()",
        "raises": "threading.Thread(target=session.run, args=(source,), daemon=True).start(); 1 / 0",
        "exits": "threading.Thread(target=session.run, args=(source,), daemon=True).start(); sys.exit(3)",
    }[how]
    program = OWNER.format(
        source="while True: pass",
        call="import time; " + call.replace(").start()", ").start(); time.sleep(0.3)"),
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=15, check=False
    )
    assert time.monotonic() - begin < 10
    session = done.stdout.split()[0]
    assert done.returncode == {"returns": 0, "raises": 1, "exits": 3}[how]
    with promised(2.0):
        wait_until_gone(session)
    for word in ("Exception ignored", "leaked", "resource_tracker"):
        assert word not in done.stderr
