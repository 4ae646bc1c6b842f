"""F72: the sweep removes what provably dead sessions left, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbparallel.supervisor import sweep as sweeps
from nbparallel.supervisor.sweep import StaleName, look, removal_text
from nbparallel.testing.waiting import wait_until
from nbparallel.wire import locked_names
from tests.harness import sandboxes
from tests.supervisor.leftovers import NOBODY, leave, left_in


class Swept:
    """What one sweep of a directory found: names that are gone now, those that stay, and the line."""

    def __init__(self, place: Path | str) -> None:
        found = [name for name in sweeps.steps([str(place)]) if name is not None]
        self.removed = tuple(name for name in found if name.removed)
        self.left = tuple(name for name in found if not name.removed)
        self.sentence = removal_text(found)


def test_f72_nobody_needs_them(tmp_path: Path) -> None:
    """Names that no process has locked go, and the line says how many, how much and of how many sessions."""
    leave(tmp_path, 3)
    report = Swept(tmp_path)
    assert left_in(tmp_path) == set()
    assert len(report.removed) == 3
    assert report.left == ()
    assert {(name.nbytes, name.needed, name.notebook) for name in report.removed} == {(8192, False, 4242)}
    assert (
        report.sentence == "removed 3 stale segments (24.0 KiB) of a session that ended without cleaning up"
    )
    assert Swept(tmp_path).sentence == ""


MAKER = """
import os, sys, time
from nbparallel.sharing.strategies.named_files import MemoryMapStrategy
source = MemoryMapStrategy(sys.argv[1]).create(5000)
{then}
print(os.getpid(), flush=True)
sys.stdin.read()
os._exit(0)
"""
THEN = {
    "it alone": "",
    "a forked child": "if os.fork(): os._exit(0)",
    "who maps it": "import mmap; kept = mmap.mmap(source.fd, 0); os.close(source.fd); source.fd = -1",
}


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start processes that make a name, and end them."""
    started = []

    def start(then: str = "", wrapper: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        words = [*wrapper, sys.executable, "-c", MAKER.format(then=then), str(tmp_path)]
        child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(child)
        return child

    yield start
    for child in started:
        with child:
            child.kill()


@pytest.mark.parametrize("who", THEN)
def test_f72_as_long_as_a_process_needs_it(
    who: str, tmp_path: Path, maker: Callable[..., subprocess.Popen[str]]
) -> None:
    """The maker, a forked child that outlives it, a mapping alone: the name stays, and goes after SIGKILL."""
    child = maker(THEN[who])
    pid = int(child.stdout.readline())
    report = Swept(tmp_path)
    (name,) = report.left
    assert (name.needed, name.removed) == (True, False)
    assert "lives" in name.reason
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(Swept(tmp_path).removed) == 1)
    assert left_in(tmp_path) == set()


def test_f72_in_another_container(tmp_path: Path, maker: Callable[..., subprocess.Popen[str]]) -> None:
    """A name of a living process in another pid namespace stays; that of a dead one there goes."""
    if reason := sandboxes.missing_reason():
        pytest.skip(reason)
    child = maker(wrapper=("unshare", "-Urmpf", "--kill-child", "--mount-proc"))
    assert int(child.stdout.readline()) < 10, "a pid of another namespace"
    assert [name.needed for name in Swept(tmp_path).left] == [True]
    child.kill()
    wait_until(lambda: len(Swept(tmp_path).removed) == 1)


def test_f72_in_an_overlay(tmp_path: Path) -> None:
    """In a container's layered file system as elsewhere: locked names stay, unlocked ones go."""
    if reason := sandboxes.missing_reason():
        pytest.skip(reason)
    for folder in ("lower", "upper", "work", "all"):
        (tmp_path / folder).mkdir()
    script = f"""
import os, subprocess
from tests.supervisor.test_sweep import Swept
from nbparallel.wire.locked_names import file_system_of
from nbparallel.sharing.strategies.named_files import MemoryMapStrategy
top = {str(tmp_path)!r}
options = f"lowerdir={{top}}/lower,upperdir={{top}}/upper,workdir={{top}}/work"
done = subprocess.run(["mount", "-t", "overlay", "none", "-o", options, f"{{top}}/all"], capture_output=True)
if done.returncode:
    raise SystemExit(f"no overlay: {{done.stderr}}")
assert file_system_of(f"{{top}}/all") == "overlay"
source = MemoryMapStrategy(f"{{top}}/all").create(5000)
assert len(Swept(f"{{top}}/all").left) == 1 and os.path.exists(source.path)
path, source.path = source.path, ""
source.close()
assert len(Swept(f"{{top}}/all").removed) == 1 and not os.path.exists(path)
print("tried")
"""
    done = sandboxes.run_script(script, ["unshare", "-Urm"])
    if "no overlay" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == "tried\n", done.stderr


def test_f72_where_locks_may_not_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system of other machines an unlocked name may be in use: it stays, and is listed with it."""
    leave(tmp_path)
    monkeypatch.setattr(locked_names, "file_system_of", lambda path: "nfs4")
    (name,) = Swept(tmp_path).left
    assert "nfs4" in name.reason
    assert len(left_in(tmp_path)) == 1


def test_f72_a_name_that_a_sweep_finds_first(tmp_path: Path) -> None:
    """Between making a file and locking it a sweep removes it, or has it locked: it is made anew."""
    path = tmp_path / "file"
    for taken in ("removed", "locked"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        seized = locked_names.seize(str(path))
        os.unlink(path)
        if taken == "removed":
            os.close(seized)
        assert not locked_names.hold(fd)
        os.close(fd)
        if taken == "locked":
            os.close(seized)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_f72_of_another_user(tmp_path: Path) -> None:
    """What belongs to another user is not ours to judge."""
    (path,) = leave(tmp_path)
    os.chown(path, NOBODY, NOBODY)
    report = Swept(tmp_path)
    assert len(left_in(tmp_path)) == 1
    assert [name.needed for name in report.left] == [None]
    assert "another user (65534)" in report.left[0].reason


@pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
def test_f72_only_files_are_removed(kind: str, tmp_path: Path) -> None:
    """Under a name like ours may lie what no process of ours made."""
    (path,) = leave(tmp_path)
    path.unlink()
    victim = tmp_path / "thesis.tex"
    victim.write_text("ten years of work")
    {"folder": path.mkdir, "link": lambda: path.symlink_to(victim), "fifo": lambda: os.mkfifo(path)}[kind]()
    assert Swept(tmp_path).removed == ()
    assert victim.read_text()
    assert os.path.lexists(path)


def test_f72_names_of_other_make_are_left_alone(tmp_path: Path) -> None:
    """A user's own strategy may call its files as it likes; nothing says whose they are."""
    (tmp_path / "nbp_mine").write_text("x")
    (tmp_path / "nbp_abcdefghij_b").write_text("x")
    (tmp_path / "nbpx_thing").write_text("x")
    (tmp_path / "torch_1_2_3").write_text("x")
    report = Swept(tmp_path)
    assert [Path(name.path).name for name in report.left] == ["nbp_abcdefghij_b", "nbp_mine"]
    assert len(left_in(tmp_path)) == 4


@pytest.mark.time_limit(60)
def test_f72_a_thousand_names_of_many_owners(tmp_path: Path) -> None:
    """Exactly those of the dead go, in small steps; looking removes nothing."""
    kept = set()
    for number in range(100):
        paths = leave(tmp_path, 10, number, living=number % 2 == 0)
        if number % 2 == 0:
            kept |= {path.name for path in paths}
    assert len(look([str(tmp_path)])) == 1000
    assert len(left_in(tmp_path)) == 1000
    one_step = next(found for found in sweeps.steps([str(tmp_path)]) if found is not None and found.removed)
    assert not os.path.exists(one_step.path)
    assert len(left_in(tmp_path)) == 999, "one step removes one name"
    report = Swept(tmp_path)
    assert left_in(tmp_path) == kept
    assert (len(report.removed), len(report.left)) == (499, 500)
    assert report.sentence.endswith("of a session that ended without cleaning up")


def test_the_sweep_needs_only_the_standard_library() -> None:
    """The supervisor runs it under ``python -I -S -E``."""
    root = str(Path(sweeps.__file__).parents[2])
    code = f"import sys; sys.path.append({root!r}); import nbparallel.supervisor.sweep as s; s.look()\n"
    code += "print(len(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-E", "-c", code], capture_output=True, text=True, timeout=20, check=True
    )
    assert int(done.stdout) < 150


def test_two_sweeps_and_a_session_that_begins(tmp_path: Path) -> None:
    """Each stale name is removed, and told, once; no name of a living process is touched meanwhile."""
    doomed = {str(path) for number in range(40) for path in leave(tmp_path, 25, number)}
    reports: list[tuple[StaleName, ...]] = []
    living: list[Path] = []
    done = threading.Event()

    def begin_sessions() -> None:
        number = 1000
        while not done.is_set():
            number += 1
            try:
                living.extend(leave(tmp_path, 1, number, living=True))
            except InterruptedError:
                continue  # a sweep found it before it was locked: a session draws another one

    threads = [threading.Thread(target=lambda: reports.append(Swept(tmp_path).removed)) for _ in range(3)]
    beginning = threading.Thread(target=begin_sessions)
    beginning.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    beginning.join()
    removed = [name.path for report in reports for name in report]
    assert len(removed) == len(set(removed))
    assert doomed <= set(removed)
    assert all(path.exists() for path in living)
    assert len(left_in(tmp_path) - {path.name for path in living}) == 0


def test_the_line_counts_segments_and_sessions() -> None:
    """One, several, none."""
    large, *small = (
        StaleName("", n, True, False, "", session) for n, session in ((1 << 30, 7), (2, 7), (3, 8))
    )
    assert removal_text([None]) == ""
    assert removal_text([large]).startswith("removed 1 stale segment (1.0 GiB) of a session that")
    assert removal_text(small).startswith("removed 2 stale segments (5 B) of 2 sessions that")
