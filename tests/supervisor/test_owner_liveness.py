"""F72: whether an owner is alive: nothing is removed of one that may be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nbparallel.supervisor.owner_liveness import Liveness, OwnerLiveness
from nbparallel.supervisor.sweep import sweep
from nbparallel.testing.waiting import wait_until
from nbparallel.wire.identity import Process, ProcessState, process_state
from nbparallel.wire.owners import Owner
from tests.supervisor.leftovers import DEAD, ME, WORLD, leave, left_in, owner, token

pytestmark = pytest.mark.usefixtures("no_pointers")


@pytest.fixture
def stopped() -> Iterator[Process]:
    """Start a process that does nothing, and give its identity."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        state = None
        while state is None:
            state = process_state(child.pid)
        yield Process(child.pid, state.started)
        child.kill()


LIVING: dict[str, Callable[[Process], Owner]] = {
    "alive": lambda other: owner(other),
    "this process": lambda _: owner(ME),
    "one of two alive": lambda other: owner(DEAD, other),
    "one of two alive, the first": lambda other: owner(other, DEAD),
}
UNKNOWN: dict[str, Callable[[], Owner]] = {
    "another pid namespace": lambda: owner(DEAD, pid_namespace=WORLD.pid_namespace + 1),
    "no pid namespace": lambda: owner(DEAD, pid_namespace=0),
    "no boot id": lambda: owner(DEAD, boot=""),
    "another boot": lambda: owner(DEAD, boot="f" * 16),
    "another boot of another machine": lambda: owner(DEAD, boot="f" * 16, machine="01234567"),
    "another time namespace, pid in use": lambda: owner(
        Process(ME.pid, 1), time_namespace=WORLD.time_namespace + 1
    ),
    "start not known, pid in use": lambda: owner(Process(ME.pid, 0)),
}
DEAD_FOR_SURE: dict[str, Callable[[], Owner]] = {
    "pid is nobody's": lambda: owner(DEAD),
    "pid is another's now": lambda: owner(Process(ME.pid, ME.started + 1)),
    "pid is another user's process now": lambda: owner(Process(1, 1)),
    "both dead": lambda: owner(DEAD, Process(ME.pid, ME.started - 1)),
    "another time namespace, pid is nobody's": lambda: owner(DEAD, time_namespace=7),
    "start not known, pid is nobody's": lambda: owner(replace(DEAD, started=0)),
}


@pytest.mark.parametrize("case", LIVING)
def test_f72_a_living_owner(case: str, tmp_path: Path, stopped: Process) -> None:
    """Nothing is touched as long as one of the owner's processes lives, and the report says so."""
    (path,) = leave(tmp_path, LIVING[case](stopped))
    report = sweep([str(tmp_path)])
    assert len(left_in(tmp_path)) == 2
    assert [(name.path, name.liveness, name.removed) for name in report.left] == [
        (str(path), Liveness.LIVING, False)
    ]
    assert report.unknown == report.removed == ()
    assert "lives" in report.left[0].reason


@pytest.mark.parametrize("case", UNKNOWN)
def test_f72_an_owner_of_whom_nobody_knows(case: str, tmp_path: Path) -> None:
    """What is not certain counts as alive, and is listed with the reason."""
    leave(tmp_path, UNKNOWN[case]())
    report = sweep([str(tmp_path)])
    assert len(left_in(tmp_path)) == 2
    (name,) = report.unknown
    assert name.liveness is Liveness.UNKNOWN
    assert name.reason
    assert report.sentence == ""


@pytest.mark.parametrize("case", DEAD_FOR_SURE)
def test_f72_an_owner_that_is_dead_for_sure(case: str, tmp_path: Path) -> None:
    """A pid that means nobody, or somebody who started at another time, is a dead process."""
    leave(tmp_path, DEAD_FOR_SURE[case]())
    assert len(sweep([str(tmp_path)]).removed) == 1
    assert left_in(tmp_path) == set()


def test_f72_a_zombie_is_dead(tmp_path: Path) -> None:
    """A killed process whose parent does not ask for it needs nothing any more."""
    code = "import os, time\nprint(os.fork() or os._exit(0), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        from nbparallel.wire.identity import process_state

        state = process_state(pid)
        while state is None or state.letter != "Z":
            state = process_state(pid)
        leave(tmp_path, owner(Process(pid, state.started)))
        assert [name.reason for name in sweep([str(tmp_path)]).removed] == ["its processes have ended"]
        parent.communicate("\n")


def test_f72_a_thread_that_outlives_its_main_thread_is_no_zombie() -> None:
    """The process looks like a zombie in /proc, but its other threads go on."""
    code = (
        "import ctypes, threading, time, os, sys\n"
        "threading.Thread(target=lambda: sys.stdin.readline(), daemon=True).start()\n"
        "print(flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()

        def zombie() -> ProcessState | None:
            found = process_state(child.pid)
            return found if found is not None and found.letter == "Z" else None

        state = wait_until(zombie)
        result = OwnerLiveness(WORLD, None).check(
            owner(Process(child.pid, state.started)), time.time(), on_disk=False
        )
        assert result.liveness is Liveness.LIVING
        child.kill()


@pytest.mark.parametrize(
    ("written", "machine", "on_disk", "liveness"),
    [
        (99.0, WORLD.machine, True, Liveness.DEAD),
        (101.0, WORLD.machine, True, Liveness.UNKNOWN),
        (99.0, "01234567", True, Liveness.UNKNOWN),
        (99.0, None, True, Liveness.UNKNOWN),
        (99.0, WORLD.machine, False, Liveness.UNKNOWN),
    ],
)
def test_f72_a_boot_in_between(
    written: float, machine: str | None, on_disk: bool, liveness: Liveness
) -> None:
    """On a local disk of this machine, what was made before it booted has no living owner."""
    here = replace(WORLD, machine=WORLD.machine or "89abcdef")  # a container may have no number
    machine = here.machine if machine == WORLD.machine else machine or ""
    old = owner(ME, boot="f" * 16, machine=machine)
    assert OwnerLiveness(here, 100.0).check(old, written, on_disk=on_disk).liveness is liveness


RECORDS: dict[str, Callable[[Path], object]] = {
    "none": lambda _: None,
    "empty": lambda path: path.write_text(""),
    "garbage": lambda path: path.write_bytes(os.urandom(500)),
    "half": lambda path: path.write_text(owner(DEAD).text()[:-9]),
    "half a link": lambda path: path.symlink_to(owner(DEAD).text()[:-9]),
    "a link to elsewhere": lambda path: path.symlink_to("/etc/passwd"),
    "a folder": lambda path: path.mkdir(),
    "a FIFO": lambda path: os.mkfifo(path),
    "of a later version": lambda path: path.symlink_to(owner(DEAD).text().replace("nbp1", "nbp2")),
    "of no process": lambda path: path.symlink_to(owner(Process(0, 0)).text()),
    "of a huge process": lambda path: path.symlink_to(owner(Process(1 << 40, 5)).text()),
}


@pytest.mark.parametrize("case", RECORDS)
def test_f72_a_record_that_says_nothing(case: str, tmp_path: Path) -> None:
    """A name whose record is missing, damaged or half written stays, and so does the record."""
    stem = f"nbp_{token(5)}"
    (tmp_path / f"{stem}_b").write_bytes(b"x")
    RECORDS[case](tmp_path / f"{stem}.owner")
    before = left_in(tmp_path)
    report = sweep([str(tmp_path)])
    assert left_in(tmp_path) == before
    (name,) = report.unknown
    assert "record" in name.reason
