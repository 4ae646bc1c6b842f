"""The doctor: every finding says what was seen and what to do, and a real small place is noticed."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import Any

import pytest

from nbparallel.session.diagnostics import doctor
from nbparallel.session.diagnostics.doctor import (
    Examination,
    Finding,
    Machine,
    Severity,
    examine,
    findings,
    inspect_machine,
)
from nbparallel.sharing.memory import memory_limits
from nbparallel.supervisor.sweep import StaleName
from nbparallel.wire.system import TaskLimit
from tests.harness import sandboxes

ENDLESS = (None, None)


def name(needed: bool | None, reason: str = "") -> StaleName:
    """Return a name that was found."""
    return StaleName("/dev/shm/nbp_b", 5 << 20, False, needed, reason, "")


GOOD = Machine(
    proc=True,
    files=(4096, 4096),
    used_files=90,
    processes=ENDLESS,
    tasks=(),
    file_size=ENDLESS,
    address_space=ENDLESS,
    max_maps=65_530,
    used_maps=300,
    free=(memory_limits.MemoryLimit(8 << 30, "this machine (16.0 GiB of memory)"),),
    shm=(8 << 30, 8 << 30),
    cpus=8,
    affinity=8,
    quota=None,
    blas=(("openblas", 8),),
    refused={},
    unread="",
    strategies={"file_descriptor": "", "file_system": "", "copy": ""},
    strategy="file_descriptor",
    names=(StaleName("/dev/shm/nbp_a", 4096, False, True, "it runs", "1:1"),),
    versions={"Python": "3.12.1", "ipykernel": "7.1.0", "numpy": "2.1"},
    system="Linux",
)


def found(**facts: Any) -> dict[str, Finding]:
    """Return the findings about a good machine but for some facts, by subject."""
    return {finding.subject: finding for finding in findings(replace(GOOD, **facts))}


def test_a_good_machine_has_nothing_to_do() -> None:
    """Nothing is wrong, and the title says so."""
    assert {finding.state for finding in found().values()} == {Severity.OK}
    assert not any(finding.advice for finding in found().values())
    assert repr(Examination(found().values())).splitlines() == [
        "this machine: nothing is wrong",
        "Python 3.12.1 · numpy 2.1 · Linux",
        "12 checks passed: ranks start by forkserver · strategies that work: 3 · reading in place · 8.0 GiB "
        "free on this machine (16.0 GiB of memory) · /dev/shm · 90 of 4,096 open files · processes · mappings"
        " · 8 CPUs · BLAS threads · stale names",
        "… each check: with --all",
    ]


@pytest.mark.parametrize(
    ("facts", "subject", "state", "words"),
    [
        ({"refused": {"pidfd_open": "Function not implemented"}}, "starting ranks", 2, "seccomp"),
        ({"proc": False}, "/proc", 2, "mount -t proc"),
        ({"unread": "process_vm_readv is refused"}, "reading in place", 1, "SYS_PTRACE"),
        ({"files": (256, 256)}, "open files", 1, "file_region"),
        ({"files": (256, 4096)}, "open files", 1, "`ulimit -n 4096`"),
        ({"files": (256, None)}, "open files", 1, "`ulimit -n unlimited`"),
        ({"tasks": (TaskLimit(100, 90, "x (ulimit -u)"),)}, "processes", 1, "-n 2"),
        ({"tasks": (TaskLimit(900, 9, "x"), TaskLimit(99, 90, "y"))}, "processes", 1, "--pids-limit"),
        ({"file_size": (1 << 20, 1 << 20)}, "size of files", 1, "count as files"),
        ({"file_size": (1 << 20, None)}, "size of files", 1, "ulimit -f unlimited"),
        ({"refused": {"socketpair": "Too many open files"}}, "starting ranks", 2, "sandbox"),
        ({"address_space": (4 << 30, None)}, "address space", 1, "ulimit -v"),
        ({"max_maps": 1000}, "mappings", 1, "vm.max_map_count"),
        ({"free": (memory_limits.MemoryLimit(100 << 20, "this container"),)}, "memory", 1, "--memory"),
        ({"shm": (64 << 20, 64 << 20)}, "/dev/shm", 1, "--shm-size"),
        ({"shm": (1 << 20, 8 << 30)}, "/dev/shm", 1, "file_descriptor"),
        ({"quota": 1.0, "blas": ()}, "CPUs", 1, "take turns"),
        ({"affinity": 1, "blas": ()}, "CPUs", 1, "take turns"),
        ({"quota": 2.0}, "BLAS threads", 1, "threadpool_limits(2)"),
        ({"names": (name(False),)}, "stale names", 1, "%%parallel"),
        ({"names": (name(None, "no record"),)}, "stale names", 1, "rm /dev/shm/nbp_b"),
        ({"versions": {"ipykernel": "6.9.1"}}, "versions", 1, "ipykernel>=6.29"),
        ({"strategies": {"mmap": "no room", "copy": ""}}, "strategy mmap", 1, "%sharing_strategy copy"),
        (
            {"strategies": {"file_descriptor": "sealed off", "mmap": ""}},
            "strategy file_descriptor",
            2,
            "%sharing_strategy mmap",
        ),
    ],
)
def test_what_is_wrong_is_told_with_what_to_do(
    facts: dict[str, Any], subject: str, state: int, words: str
) -> None:
    """One bad fact gives one finding that is not ok, with advice."""
    finding = found(**facts)[subject]
    assert finding.state == state
    assert words in finding.advice
    assert [f.subject for f in found(**facts).values() if f.state is not Severity.OK] == [subject]


@pytest.mark.parametrize(
    "facts",
    [
        {"files": ENDLESS},
        {"tasks": (TaskLimit(1000, 100, "x"),)},
        {"shm": None},
        {"max_maps": None},
        {"names": ()},
        {"names": (name(None, "of another user (1001)"),)},
        {"versions": {"ipykernel": ""}},
        {"versions": {"ipykernel": "7.0.0a1"}},
    ],
    ids=str,
)
def test_what_does_no_harm_is_fine(facts: dict[str, Any]) -> None:
    """Limits that do not bind, and what only an unused strategy needs, are no warning."""
    assert {finding.state for finding in found(**facts).values()} == {Severity.OK}


def test_what_this_machine_does_not_have_is_left_out() -> None:
    """Where there is no limit, or nothing that uses it, there is no row."""
    none = found(shm=None, max_maps=None)
    assert not {"/dev/shm", "mappings", "address space"} & set(none)


def test_the_worst_comes_first() -> None:
    """Problems stand above warnings, in text and HTML, and the title counts them."""
    bad = replace(GOOD, refused={"eventfd": "not here"}, shm=(0, 0), max_maps=9)
    examination = Examination(sorted(findings(bad), key=lambda finding: -finding.state))
    lines = repr(examination).splitlines()
    title = "this machine: 1 problem, 2 warnings: starting ranks, /dev/shm, mappings"
    assert lines[0] == title
    assert lines[2].split("  ")[0] == "starting ranks"
    assert max(map(len, lines[:-1])) < 110
    above, fold = examination._repr_html_().split("<details>")
    assert f'--jp-error-color1,#d32f2f)">{title}</b>' in above
    assert above.count('scope="row"') == 3
    assert "9 checks passed: " in above
    assert 'scope="row"' in fold
    assert "#d32f2f" not in Examination(found(shm=(0, 0)).values())._repr_html_(), "a warning is no failure"


def test_this_machine_can_be_looked_at() -> None:
    """A real look finds numbers that make sense, and leaves no file, name or descriptor."""
    machine = inspect_machine()
    assert machine.used_files > 0
    assert machine.used_maps > 10
    assert 1 <= machine.affinity <= machine.cpus
    assert machine.versions["Python"]
    assert machine.versions["nbparallel"]
    assert machine.strategies["copy"] == ""
    assert {finding.subject for finding in examine()} >= {"starting ranks", "open files", "/dev/shm"}


SCRIPT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from nbparallel.session.diagnostics import doctor
from nbparallel.session.diagnostics.doctor import examine
for finding in examine():
    print(int(finding.state), finding.subject, finding.seen, sep="|")
"""


@pytest.mark.slow
def test_f74_a_docker_container_is_recognised() -> None:
    """A /dev/shm of 64 MiB and a low limit of open files are two warnings; the default strategy works."""
    if reason := sandboxes.missing_reason():
        pytest.skip(reason)
    done = sandboxes.run_script(SCRIPT, sandboxes.on_small_tmpfs("/dev/shm", "64m"))
    seen = {line.split("|")[1]: line.split("|") for line in done.stdout.splitlines()}
    assert done.returncode == 0, done.stderr
    assert seen["/dev/shm"][0] == "1"
    assert "64.0 MiB of 64.0 MiB free" in seen["/dev/shm"][2]
    assert seen["open files"][0] == "1"
    assert "at most 200" in seen["open files"][2]
    assert seen["starting ranks"][0] == seen["sharing strategies"][0] == "0"


@pytest.mark.slow
def test_f74_a_shm_that_is_full_is_a_strategy_that_does_not_work() -> None:
    """A strategy is tried, not only asked: with no room for one page it is named, with the reason."""
    if reason := sandboxes.missing_reason():
        pytest.skip(reason)
    script = "open('/dev/shm/full', 'wb').write(bytes(4096))\n" + SCRIPT
    done = sandboxes.run_script(script, sandboxes.on_small_tmpfs("/dev/shm", "4k"))
    assert done.returncode == 0, done.stderr
    assert "1|strategy file_system|SharedMemoryFullError: " in done.stdout
    assert not [name for name in os.listdir("/dev/shm") if name == "full"], "that was another /dev/shm"


LEFT_BEHIND = (
    """
from pathlib import Path
Path("/dev/shm/nbp_aaaaaaaaaa_b").write_bytes(bytes(5000))
"""
    + SCRIPT
)


@pytest.mark.slow
def test_f72_a_name_that_nobody_claims_is_told_and_stays() -> None:
    """A name of another make is shown with its path and what to do, and is not removed."""
    if reason := sandboxes.missing_reason():
        pytest.skip(reason)
    script = LEFT_BEHIND + "print(Path('/dev/shm/nbp_aaaaaaaaaa_b').exists())"
    done = sandboxes.run_script(script, sandboxes.on_small_tmpfs("/dev/shm", "64m"))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "|stale names|" in line]
    assert line.startswith(
        "1|stale names|1 name (/dev/shm/nbp_aaaaaaaaaa_b), 8.0 KiB, that no process is known"
    )
    assert done.stdout.endswith("True\n")


@pytest.mark.slow
def test_f74_no_proc_and_refused_calls_are_problems_not_crashes() -> None:
    """The doctor works where next to nothing can be read, and where a sandbox refuses what ranks need."""
    if reason := sandboxes.missing_reason():
        pytest.skip(reason)
    done = sandboxes.run_script(SCRIPT, sandboxes.on_small_tmpfs("/proc", "64k"))
    assert done.returncode == 0, done.stderr
    assert "2|/proc|there is none" in done.stdout
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: system calls cannot be refused")
    refuse = ["strace", "-f", "-qq", "-o", os.devnull]
    refuse += ["-e", "inject=memfd_create:error=EPERM", "-e", "inject=pidfd_open:error=ENOSYS"]
    refuse += ["-e", "inject=process_vm_readv:error=EPERM"]
    done = sandboxes.run_script(SCRIPT, refuse)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "|starting ranks|" in line]
    assert line.startswith("2|")
    assert "pidfd_open is refused: Function not implemented" in line
    assert "memfd_create is refused: Operation not permitted" in line
    assert "1|reading in place|process_vm_readv is refused: Operation not permitted" in done.stdout
    assert "1|strategy file_descriptor|" in done.stdout, "a default that works was chosen instead"
    assert "1|strategy file_region|" in done.stdout


def test_the_doctor_says_whether_ranks_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call was tried; what turned it off is named."""
    assert inspect_machine().unread == ""
    (finding,) = [f for f in findings(GOOD, read_in_place=False) if f.subject == "reading in place"]
    assert "turned off by %config NbParallel.read_in_place = False" in finding.seen
    monkeypatch.setenv("NBP_READ_IN_PLACE", "0")
    assert "turned off by NBP_READ_IN_PLACE=0" in found()["reading in place"].seen


@pytest.mark.parametrize(
    ("scope", "user", "refused"), [("1", 1000, 0), ("2", 1000, 1), ("2", 0, 0), ("3", 0, 1)]
)
def test_yama_may_refuse_reading(
    monkeypatch: pytest.MonkeyPatch, scope: str, user: int, refused: int
) -> None:
    """From scope 2 on ranks cannot allow it to each other; the scope is named."""
    monkeypatch.setattr(doctor, "read_text", lambda path: scope if path.endswith("ptrace_scope") else "")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert ("ptrace_scope is " + scope in inspect_machine().unread) == bool(refused)
