"""F72: the sweep removes what provably dead sessions left, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbparallel.supervisor import sweep as sweeps
from nbparallel.supervisor.owner_liveness import Liveness
from nbparallel.supervisor.sweep import StaleName, look, removal_text, sweep
from nbparallel.wire import owners
from nbparallel.wire.identity import Process
from tests.harness.tiers import examples
from tests.supervisor.leftovers import DEAD, ME, NOBODY, leave, left_in, owner, token

pytestmark = pytest.mark.usefixtures("no_pointers")


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
    monkeypatch.setattr(owners, "pointer_path", lambda record: str(usual / f"{Path(record).stem}.at01234567"))
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


def test_the_sweep_needs_only_the_standard_library() -> None:
    """The supervisor runs it under ``python -I -S -E``."""
    root = str(Path(sweeps.__file__).parents[2])
    code = f"import sys; sys.path.append({root!r}); import nbparallel.supervisor.sweep as s; s.look()\n"
    code += "print(len(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-E", "-c", code], capture_output=True, text=True, timeout=20, check=True
    )
    assert int(done.stdout) < 150
