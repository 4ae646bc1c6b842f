"""F72: the sweep removes what provably dead sessions left, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbparallel.supervisor import sweep as sweeps
from nbparallel.supervisor.orphans import end_orphans, orphans_text
from nbparallel.supervisor.owner_liveness import Liveness, OwnerLiveness
from nbparallel.supervisor.sweep import StaleName, look, removal_text, sweep
from nbparallel.testing.tiers import examples
from nbparallel.wire import owners
from nbparallel.wire.identity import Process, this_process, this_world
from nbparallel.wire.owners import Owner

WORLD, ME = this_world(), this_process()
NOBODY = 65534
LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


def dead_process() -> Process:
    """Return a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    return Process(child.pid, 1)


DEAD = dead_process()


def owner(*processes: Process, **changes: object) -> Owner:
    """Return an owner in this world, with changes to it."""
    return Owner(replace(WORLD, **changes), processes[0], processes)  # type: ignore[arg-type]


def token(number: int) -> str:
    """Return a token of ten letters for a number."""
    return "".join(LETTERS[number >> 5 * i & 31] for i in range(10))


def leave(folder: Path, who: Owner | str | None, count: int = 1, number: int = 1) -> list[Path]:
    """Make names and their record as a process would; return the names."""
    stem = f"nbp_{token(number)}"
    if isinstance(who, Owner):
        owners.write(str(folder / f"{stem}.owner"), who)
    elif who is not None:
        (folder / f"{stem}.owner").symlink_to(who) if who else None
    paths = [folder / f"{stem}_{LETTERS[i & 31]}{LETTERS[i >> 5 & 31]}" for i in range(count)]
    for path in paths:
        path.write_bytes(b"x" * 5000)
        path.chmod(0o600)
    return paths


def left_in(folder: Path) -> set[str]:
    """Return all file names in a folder."""
    return {path.name for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def _no_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave nothing where other sessions look."""
    monkeypatch.setattr(owners, "_pointer", lambda record, temporary: "")


@pytest.fixture
def stopped() -> Iterator[Process]:
    """Start a process that does nothing, and give its identity."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        state = None
        while state is None:
            from nbparallel.wire.identity import process_state

            state = process_state(child.pid)
        yield Process(child.pid, state.started)
        child.kill()


def test_f72_a_dead_owner(tmp_path: Path) -> None:
    """Its names and its record go, and the line says how many, how much and of how many sessions."""
    leave(tmp_path, owner(DEAD), 3)
    report = sweep([str(tmp_path)])
    assert left_in(tmp_path) == set()
    assert len(report.removed) == 3
    assert report.left == ()
    assert {(name.nbytes, name.liveness) for name in report.removed} == {(8192, Liveness.DEAD)}
    assert (
        report.sentence == "removed 3 stale segments (24.0 KiB) of a session that ended without cleaning up"
    )
    assert sweep([str(tmp_path)]).sentence == ""


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
        from nbparallel.wire.identity import process_state

        deadline = time.monotonic() + 5
        state = process_state(child.pid)
        while (state is None or state.letter != "Z") and time.monotonic() < deadline:
            time.sleep(0.005)
            state = process_state(child.pid)
        assert state is not None
        assert state.letter == "Z"
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
        (99.0, "", True, Liveness.UNKNOWN),
        (99.0, WORLD.machine, False, Liveness.UNKNOWN),
    ],
)
def test_f72_a_boot_in_between(written: float, machine: str, on_disk: bool, liveness: Liveness) -> None:
    """On a local disk of this machine, what was made before it booted has no living owner."""
    here = replace(WORLD, machine=WORLD.machine or "89abcdef")
    machine = here.machine if machine == WORLD.machine else machine
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("whose", ["name", "record", "both"])
def test_f72_of_another_user(whose: str, tmp_path: Path) -> None:
    """What belongs to another user, or is claimed by one, is not ours to judge."""
    (path,) = leave(tmp_path, owner(DEAD))
    record = Path(owners.record_path(str(path)))
    for target in {"name": [path], "record": [record], "both": [path, record]}[whose]:
        os.chown(target, NOBODY, NOBODY, follow_symlinks=False)
    report = sweep([str(tmp_path)])
    assert len(left_in(tmp_path)) == 2
    assert [name.liveness for name in report.unknown] == [Liveness.UNKNOWN]
    assert "another user (65534)" in report.unknown[0].reason


@pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
def test_f72_only_files_are_removed(kind: str, tmp_path: Path) -> None:
    """Under a dead owner's name may lie what no process of ours made."""
    (path,) = leave(tmp_path, owner(DEAD))
    path.unlink()
    victim = tmp_path / "thesis.tex"
    victim.write_text("ten years of work")
    {"folder": path.mkdir, "link": lambda: path.symlink_to(victim), "fifo": lambda: os.mkfifo(path)}[kind]()
    assert sweep([str(tmp_path)]).removed == ()
    assert victim.read_text()
    assert os.path.lexists(path)


def test_f72_names_of_other_make_are_left_alone(tmp_path: Path) -> None:
    """A user's own strategy may call its files as it likes; nothing says whose they are."""
    (tmp_path / "nbp_mine").write_text("x")
    (tmp_path / "nbpx_thing").write_text("x")
    (tmp_path / "torch_1_2_3").write_text("x")
    report = sweep([str(tmp_path)])
    assert [Path(name.path).name for name in report.unknown] == ["nbp_mine"]
    assert len(left_in(tmp_path)) == 3


@pytest.mark.time_limit(60)
def test_f72_a_thousand_names_of_many_owners(tmp_path: Path) -> None:
    """Exactly those of the dead go, in small steps; looking removes nothing."""
    kept = set()
    for number in range(100):
        who = owner(DEAD if number % 2 else ME)
        paths = leave(tmp_path, who, 10, number)
        if number % 2 == 0:
            kept |= {path.name for path in paths} | {Path(owners.record_path(str(paths[0]))).name}
    assert len(look([str(tmp_path)]).left) == 1000
    assert len(left_in(tmp_path)) == 1100
    one_step = next(found for found in sweeps.steps([str(tmp_path)]) if found is not None and found.removed)
    assert not os.path.exists(one_step.path)
    assert len(left_in(tmp_path)) == 1099, "one step removes one name"
    report = sweep([str(tmp_path)])
    assert left_in(tmp_path) == kept
    assert (len(report.removed), len(report.left)) == (499, 500)
    assert report.sentence.endswith("of a session that ended without cleaning up")


def test_f72_a_directory_that_only_a_pointer_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in a directory of the user's choice are found through the pointer, which goes with them."""
    usual, chosen, empty = (tmp_path / name for name in ("usual", "chosen", "empty"))
    for folder in (usual, chosen, empty):
        folder.mkdir()
    monkeypatch.setattr(owners, "_pointer", lambda record, _: str(usual / f"{Path(record).stem}.at01234567"))
    leave(chosen, owner(DEAD), 2)
    leave(chosen, owner(ME), 2, number=2)
    assert len(left_in(usual)) == 2
    report = sweep([str(usual)])
    assert len(report.removed) == 2
    assert len(left_in(chosen)) == 3
    assert left_in(usual) == {f"nbp_{token(2)}.at01234567"}, "the living one's stays"
    mode = (usual / f"nbp_{token(2)}.at01234567").lstat().st_mode & 0o777
    assert mode == 0o600, "the user's directories are nobody else's business"


def test_two_sweeps_and_a_session_that_begins(tmp_path: Path) -> None:
    """Each stale name is removed, and told, once; no name of a living process is touched meanwhile."""
    for number in range(40):
        leave(tmp_path, owner(DEAD), 25, number)
    reports: list[tuple[StaleName, ...]] = []
    living: list[Path] = []
    done = threading.Event()

    def begin_sessions() -> None:
        number = 1000
        while not done.is_set():
            number += 1
            living.extend(leave(tmp_path, owner(ME), 1, number))

    threads = [
        threading.Thread(target=lambda: reports.append(sweep([str(tmp_path)]).removed)) for _ in range(3)
    ]
    beginning = threading.Thread(target=begin_sessions)
    beginning.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    beginning.join()
    removed = [name.path for report in reports for name in report]
    assert len(removed) == len(set(removed)) == 1000
    assert all(path.exists() for path in living)
    assert len(left_in(tmp_path)) == 2 * len(living)


FATES = st.sampled_from(["alive", "dead", "reused", "pid namespace", "boot", "no record"])
DAMAGE = st.one_of(
    st.none(),
    st.tuples(st.just("cut"), st.integers(0, 200)),
    st.tuples(st.just("flip"), st.integers(0, 200)),
    st.tuples(st.just("digit"), st.integers(0, 200)),
)
OWNERS_OF = {
    "alive": lambda: owner(ME),
    "dead": lambda: owner(DEAD),
    "reused": lambda: owner(Process(ME.pid, ME.started + 3)),
    "pid namespace": lambda: owner(DEAD, pid_namespace=3),
    "boot": lambda: owner(DEAD, boot="e" * 16),
}


def damaged(text: str, damage: tuple[str, int]) -> str:
    """Return a text that was cut off, or of which one character is another."""
    kind, place = damage
    if kind == "cut":
        return text[: place % len(text)]
    if kind == "digit":
        digits = [at for at, letter in enumerate(text) if letter.isdigit()]
        at = digits[place % len(digits)]
        return f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}"
    at = place % len(text)
    return f"{text[:at]}{'x' if text[at] != 'x' else 'y'}{text[at + 1 :]}"


@settings(max_examples=examples(200), deadline=None)
@given(sessions=st.lists(st.tuples(FATES, DAMAGE, st.integers(0, 4)), max_size=8))
def test_f72_property_a_living_one_is_never_touched(
    sessions: list[tuple[str, tuple[str, int] | None, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever lies there, in whatever state: only whole records of the dead cost a name."""
    folder = tmp_path_factory.mktemp("names")
    doomed, kept = set(), set()
    for number, (liveness, damage, count) in enumerate(sessions):
        text = OWNERS_OF[liveness]().text() if liveness != "no record" else ""
        if text and damage is not None:
            text = damaged(text, damage)
        paths = leave(folder, text, count, number)
        dead = liveness in ("dead", "reused") and damage is None
        (doomed if dead else kept).update(path.name for path in paths)
    report = sweep([str(folder)])
    assert {Path(name.path).name for name in report.removed} == doomed
    assert {name for name in left_in(folder) if not name.endswith(".owner")} == kept


def test_f72_gigabytes_are_freed_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor does not wait until a large name's memory is free; a child of its does."""
    monkeypatch.setattr(sweeps, "LARGE", 8192)
    leave(tmp_path, owner(DEAD), 2)
    report = sweeps.report_of(sweeps.steps([str(tmp_path)], remove=sweeps.unlink_aside))
    assert len(report.removed) == 2
    assert left_in(tmp_path) == set()
    assert [os.wait()[1] for _ in report.removed] == [0, 0]


def test_the_line_counts_segments_and_sessions() -> None:
    """One, several, none."""
    assert removal_text(0, 0, 0) == ""
    assert removal_text(1, 1 << 30, 1).startswith("removed 1 stale segment (1.0 GiB) of a session that")
    assert removal_text(5, 5, 2).startswith("removed 5 stale segments (5 B) of 2 sessions that")


def test_the_line_about_processes() -> None:
    """One, several, none."""
    assert orphans_text(0) == ""
    assert orphans_text(1) == "ended 1 process that a killed session had left running"
    assert orphans_text(2) == "ended 2 processes that a killed session had left running"


def test_an_orphan_is_told_by_the_record_in_its_environment() -> None:
    """Who bears a dead session's record is ended; who bears a living one's, none or half of one is not."""
    started = []
    for record in (owner(DEAD).text(), owner(ME).text(), "", owner(DEAD).text()[:-1]):
        environment = {**os.environ, "NBP_OWNER": record}
        words = [sys.executable, "-c", "print(flush=True); input()"]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment))
    for child in started:
        assert child.stdout is not None
        child.stdout.readline()
    end_orphans()  # or another session of this machine was quicker
    assert started[0].wait(10) == -signal.SIGKILL
    assert [child.poll() for child in started[1:]] == [None] * 3
    for child in started:
        with child:
            child.kill()


def test_the_sweep_needs_only_the_standard_library() -> None:
    """The supervisor runs it under ``python -I -S -E``."""
    root = str(Path(sweeps.__file__).parents[2])
    code = f"import sys; sys.path.append({root!r}); import nbparallel.supervisor.sweep as s; s.look()\n"
    code += "print(len(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-E", "-c", code], capture_output=True, text=True, timeout=20, check=True
    )
    assert int(done.stdout) < 150
