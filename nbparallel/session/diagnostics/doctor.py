"""The doctor: what on this machine prevents ranks or slows them down, and what to do about it.

`findings` is a function of the facts alone, so that every sentence can be tested on any machine.
"""

from __future__ import annotations

import ctypes
import enum
import math
import os
import platform
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import nbparallel
from nbparallel.channel import Channel
from nbparallel.distributed.runtime.peer_memory import OFF, YAMA_SCOPE, read_memory
from nbparallel.errors.text.table import Table, TableView
from nbparallel.sharing import get_sharing_strategy
from nbparallel.sharing.memory import memory_limits
from nbparallel.sharing.strategies import registry
from nbparallel.sharing.strategies.strategy import Strategy
from nbparallel.supervisor.sweep import StaleName, look
from nbparallel.wire.system import (
    TaskLimit,
    affine_cpus,
    cgroup_quota,
    do_all,
    file_system_room,
    mapping_limit,
    open_descriptors,
    process_limit,
    read_text,
    task_limits,
)
from nbparallel.wire.units import size_text

# Facts about this machine, container and process that decide whether ranks work well.

SHM = "/dev/shm"
PACKAGES = ("ipython", "ipykernel", "numpy")


ResourceLimit = tuple[int | None, int | None]
"""A limit of the process (getrlimit(2)): what holds, and how far this user may raise it; None: unlimited."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found; sizes in bytes, None where the system does not say."""

    proc: bool
    """Whether there is /proc: usage of a process, and reopening descriptors for reading only."""
    files: ResourceLimit
    """Open files a process."""
    used_files: int
    """Open files of this process."""
    processes: ResourceLimit
    """Processes and threads of this user."""
    tasks: tuple[TaskLimit, ...]
    """Limits on processes and threads that hold for this process: the user's, and those of containers."""
    file_size: ResourceLimit
    """Largest file in bytes; shared memory counts as one."""
    address_space: ResourceLimit
    """Virtual memory a process."""
    max_maps: int | None
    """Mappings a process (vm.max_map_count)."""
    used_maps: int
    """Mappings of this process."""
    free: tuple[memory_limits.MemoryLimit, ...]
    """Memory that may still be taken: the machine's, and that of each container around us."""
    shm: tuple[int, int] | None
    """Free and whole size of /dev/shm."""
    cpus: int
    """CPUs of the machine."""
    affinity: int
    """Of them, those that this process may run on."""
    quota: float | None
    """How many CPUs' worth of time the container may use."""
    blas: tuple[tuple[str, int], ...]
    """Libraries that start threads of their own in this process, and how many."""
    refused: Mapping[str, str]
    """System calls that starting ranks needs and this machine refuses, with the reason."""
    unread: str
    """Why ranks cannot read each other's private memory; empty if they can."""
    strategies: Mapping[str, str]
    """Sharing strategy -> why it does not work here; empty if it does."""
    strategy: str
    """The current one."""
    names: tuple[StaleName, ...]
    """Names of segments in the file system, of living sessions and others."""
    versions: Mapping[str, str]
    """Of Python and its packages; empty: not installed."""
    system: str
    """Operating system and kernel."""


def inspect_machine() -> Machine:
    """Inspect this machine; allocates one page of shared memory with each strategy, and frees it."""
    return Machine(
        proc=os.path.isdir("/proc/self/fd"),
        files=process_limit(resource.RLIMIT_NOFILE),
        used_files=open_descriptors() or 0,
        processes=process_limit(resource.RLIMIT_NPROC),
        tasks=tuple(task_limits()),
        file_size=process_limit(resource.RLIMIT_FSIZE),
        address_space=process_limit(resource.RLIMIT_AS),
        max_maps=mapping_limit(),
        used_maps=_read("/proc/self/maps").count("\n"),
        free=tuple(memory_limits.limits()),
        shm=file_system_room(SHM),
        cpus=os.cpu_count() or 1,
        affinity=affine_cpus(),
        quota=cgroup_quota(),
        blas=_blas(),
        refused={name: reason for name, attempt in _CALLS.items() if (reason := _why_refused(attempt))},
        unread=_why_unread(),
        strategies={name: _why_not(strategy) for name, strategy in registry.strategies().items()},
        strategy=get_sharing_strategy(),
        names=look(),
        versions={"Python": platform.python_version(), "nbparallel": nbparallel.__version__}
        | {name: _version(name) for name in PACKAGES},
        system=_system(),
    )


def _read(path: str) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""


def _blas() -> tuple[tuple[str, int], ...]:
    import numpy as np  # noqa: F401  its BLAS is the one that matters, and is loaded with it
    from threadpoolctl import threadpool_info

    return tuple((str(pool["internal_api"]), int(pool["num_threads"])) for pool in threadpool_info())


_CALLS: Mapping[str, Callable[[], None]] = {
    "pidfd_open": lambda: os.close(os.pidfd_open(os.getpid())),
    "memfd_create": lambda: os.close(os.memfd_create("nbp-look", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)),
    "eventfd": lambda: os.close(os.eventfd(0, os.EFD_CLOEXEC)),
    "socketpair": lambda: do_all(*(end.close for end in Channel.pair())),
    "a thread": lambda: threading.Thread(target=int).start(),
}


def _why_refused(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except OSError as error:
        return error.strerror or str(error)
    except RuntimeError as error:
        return str(error)
    except AttributeError:
        return f"{sys.platform} has no such call"
    return ""


def _why_unread() -> str:
    """Return why ranks cannot read each other's memory: a sandbox refuses the call, or Yama the reader."""
    word, found = ctypes.create_string_buffer(b"written", 8), bytearray(8)
    if error := read_memory(os.getpid(), ctypes.addressof(word), found):
        return f"process_vm_readv is refused: {os.strerror(error)}"
    # with scope 1 ranks allow it to each other; with 2 a process with CAP_SYS_PTRACE may, with 3 none
    scope = _read(YAMA_SCOPE).strip()
    if scope == "3" or (scope == "2" and os.geteuid() != 0):
        return f"no process may read another one's memory (kernel.yama.ptrace_scope is {scope})"
    return ""


def _why_not(strategy: Strategy) -> str:
    if strategy.unavailable_reason is not None:
        return strategy.unavailable_reason
    if not strategy.shares:
        return ""
    try:
        strategy.create(1).close()
    except Exception as error:  # noqa: BLE001  a user's own strategy may raise anything; it is reported
        return f"{type(error).__name__}: {error}"
    return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _system() -> str:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        name = platform.system()
    return f"{name}, kernel {platform.release()}, {platform.machine()}"


FILES_FREE = 512
"""Fewer free descriptors than this are used up by a few hundred large arrays."""
PROCESSES_FREE = 64
"""A rank is one process, and libraries start threads, which count as well."""
MAPS_FREE = 10_000
"""Every shared array that is not packed costs a mapping; the usual limit is 65,530."""
MEMORY_FREE = 1 << 30
SMALL_SHM = 1 << 30
"""Docker's default is 64 MiB."""
OLDEST_IPYKERNEL = (6, 29)
VERSIONS = "versions"


class Severity(enum.IntEnum):
    """How bad it is."""

    OK = 0
    WARNING = 1
    """Works, until something grows."""
    PROBLEM = 2
    """Ranks, or the current sharing strategy, will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    subject: str
    """What."""
    state: Severity
    """How bad it is."""
    seen: str
    """What was seen."""
    advice: str = ""
    """What to do; empty if there is nothing to do."""
    host: str = ""
    """The host that it is about; empty: this machine."""
    brief: str = ""
    """What was seen in some words, for where all is well; empty: the subject."""


class Examination(TableView, tuple[Finding, ...]):
    """All findings, the worst first; prints as a table."""

    __slots__ = ()

    def table(self) -> Table:
        """Return a row for each finding."""
        counts = {state: sum(finding.state is state for finding in self) for state in Severity}
        wrong = [
            f"{counts[state]} {state.name.lower()}{'s' * (counts[state] != 1)}"
            for state in (Severity.PROBLEM, Severity.WARNING)
            if counts[state]
        ]
        bad = len(self) - counts[Severity.OK]
        rows = [
            (f.host, f.subject, f.state.name.lower(), f"{f.seen}\n→ {f.advice}" if f.advice else f.seen)
            for f in self
        ]
        where = "this machine and the hosts" if any(f.host for f in self) else "this machine"
        subjects = ", ".join(dict.fromkeys(finding.subject for finding in self[:bad]))
        title = f"{where}: {', '.join(wrong) or 'nothing is wrong'}{f': {subjects}' * bool(bad)}"
        head = ("host", "what", "state", "seen, and what to do")
        passed = dict.fromkeys(f.brief or f.subject for f in self[bad:] if f.subject != VERSIONS)
        foot = f"{len(self) - bad} checks passed: {' · '.join(passed)}" * bool(passed)
        note = next((f.brief for f in self if f.subject == VERSIONS), "")
        return Table(
            title, head, rows, foot, note, "each check", bad, failed=bool(counts[Severity.PROBLEM])
        ).without_empty_columns()


def examine(
    start_method: str = "forkserver", *, read_in_place: bool = True, session: Any = None
) -> Examination:
    """Inspect this machine, and hosts of a session; starts no ranks and changes nothing.

    Examples
    --------
    >>> examination = examine()
    >>> all(finding.advice for finding in examination if finding.state is not State.OK)
    True
    """
    found = [*findings(inspect_machine(), start_method, read_in_place=read_in_place)]
    found += () if session is None else session.findings()
    return Examination(sorted(found, key=lambda finding: -finding.state))


def _at_least(enough: float, subject: str, figure: float, seen: str, remedy: str, brief: str = "") -> Finding:
    """Return the finding about a figure that must reach a minimum; less is a warning."""
    if figure >= enough:
        return Finding(subject, Severity.OK, seen, brief=brief)
    return Finding(subject, Severity.WARNING, seen, remedy)


def _limits(machine: Machine) -> Iterator[Finding]:
    """Yield what the limits are that this machine has."""
    if machine.shm is not None:
        free, size = machine.shm
        yield _at_least(
            SMALL_SHM,
            "/dev/shm",
            min(free, size),
            f"{size_text(free)} of {size_text(size)} free; only the strategy file_system allocates there",
            "in a container start it with more (docker run --shm-size=4g), elsewhere `mount -o "
            "remount,size=4g /dev/shm`; or stay with file_descriptor, which does not need it",
        )
    (files, _), used = machine.files, machine.used_files
    yield _at_least(
        FILES_FREE,
        "open files",
        math.inf if files is None else files - used,
        f"{used} in use of at most {_text(files)} a process",
        _raise("-n", machine.files, "or %sharing_strategy file_region"),
        f"{used} of {_text(files)} open files",
    )
    tightest = min(machine.tasks, key=lambda limit: limit.most - limit.used, default=None)
    yield _at_least(
        PROCESSES_FREE,
        "processes",
        math.inf if tightest is None else tightest.most - tightest.used,
        "any number of processes and threads"
        if tightest is None
        else f"{tightest.used:,} processes and threads of the {tightest.most:,} that {tightest.where}",
        _raise("-u", machine.processes, "or run few ranks: -n 2; a container: docker run --pids-limit"),
    )
    if (most := machine.file_size[0]) is not None:
        yield Finding(
            "size of files",
            Severity.WARNING,
            f"a file, and so a piece of shared memory, may have {size_text(most)} (ulimit -f)",
            _raise("-f", machine.file_size, "arrays and the ranks' own segments count as files"),
        )
    if machine.max_maps is not None:
        yield _at_least(
            MAPS_FREE,
            "mappings",
            machine.max_maps - machine.used_maps,
            f"{machine.used_maps:,} in use of at most {machine.max_maps:,} a process (vm.max_map_count)",
            "as root `sysctl vm.max_map_count=262144`, or %sharing_strategy file_region for many arrays",
        )
    if (most := machine.address_space[0]) is not None:
        yield Finding(
            "address space",
            Severity.WARNING,
            f"a process may use {size_text(most)} of addresses (ulimit -v)",
            "shared arrays count once in every process that maps them: `ulimit -v unlimited`",
        )


def _processors(machine: Machine) -> Iterator[Finding]:
    usable = max(1, int(min(machine.affinity, math.inf if machine.quota is None else machine.quota)))
    seen = f"{usable} usable of {machine.cpus}"
    if machine.affinity < machine.cpus:
        seen += f"; this process may run on {machine.affinity} (affinity, as taskset and Slurm set it)"
    if machine.quota is not None:
        seen += f"; the container may use the time of {machine.quota:g} (cgroup quota)"
    remedy = "ranks take turns here: everything works, nothing gets faster; give the container or job more"
    yield _at_least(2, "CPUs", usable, seen, remedy, f"{usable} CPUs")
    libraries = ", ".join(f"{name} {threads}" for name, threads in machine.blas) or "none loaded"
    yield _at_least(
        max((threads for _, threads in machine.blas), default=0),
        "BLAS threads",
        usable,
        f"threads of libraries in the notebook: {libraries}; each rank gets its share of {usable} unless "
        "OMP_NUM_THREADS is set",
        "more threads than CPUs slow each other down: "
        f"`import threadpoolctl; threadpoolctl.threadpool_limits({usable})`",
    )


def _versions(machine: Machine) -> Finding:
    known = ", ".join(f"{name} {version or 'missing'}" for name, version in machine.versions.items())
    ipykernel = machine.versions.get("ipykernel", "")
    recent = not ipykernel or _numbers(ipykernel) >= OLDEST_IPYKERNEL
    advice = 'pip install --upgrade "ipykernel>=6.29"'
    python, numpy = (machine.versions.get(name, "?") for name in ("Python", "numpy"))
    brief = f"Python {python} · numpy {numpy} · {machine.system.partition(',')[0]}"
    return replace(_at_least(True, VERSIONS, recent, f"{known}; {machine.system}", advice), brief=brief)


def findings(
    machine: Machine, start_method: str = "forkserver", *, read_in_place: bool = True
) -> Iterator[Finding]:
    """Yield what the facts about a machine mean; nothing about what it does not have and does not need."""
    yield _starting(machine, start_method)
    if not machine.proc:
        seen = "there is none: ranks cannot be given arrays for reading only, and limits are not known"
        yield Finding("/proc", Severity.PROBLEM, seen, "in a container or chroot: mount -t proc proc /proc")
    yield from _strategies(machine)
    yield _reading(machine, read_in_place=read_in_place)
    yield from _memory(machine)
    yield from _limits(machine)
    yield from _processors(machine)
    yield _versions(machine)
    yield from _stale(machine)


def _starting(machine: Machine, start_method: str) -> Finding:
    if not machine.refused:
        seen = f"start method {start_method}; nothing is refused"
        return Finding("starting ranks", Severity.OK, seen, brief=f"ranks start by {start_method}")
    seen = "; ".join(f"{call} is refused: {reason}" for call, reason in machine.refused.items())
    return Finding(
        "starting ranks",
        Severity.PROBLEM,
        seen,
        "ranks need Linux 5.3 or newer and a sandbox that lets these calls through (Docker: a newer version, "
        "or --security-opt seccomp=unconfined)",
    )


def _strategies(machine: Machine) -> Iterator[Finding]:
    missing = {name: reason for name, reason in machine.strategies.items() if reason}
    usable = [name for name in machine.strategies if name not in missing]
    if usable:
        yield Finding(
            "sharing strategies",
            Severity.OK,
            f"{', '.join(usable)} work here; {machine.strategy} is the current one",
            brief=f"strategies that work: {len(usable)}",
        )
    for name, reason in missing.items():
        state = Severity.PROBLEM if name == machine.strategy else Severity.WARNING
        other = next((n for n in usable if n != "copy"), "copy")
        yield Finding(f"strategy {name}", state, reason, f"use another one: %sharing_strategy {other}")


def _reading(machine: Machine, *, read_in_place: bool) -> Finding:
    copied = "large private arrays are copied into shared memory, which takes up to twice as long"
    if not read_in_place or os.environ.get(OFF) == "0":
        how = f"{OFF}=0 in the environment" if read_in_place else "%config NbParallel.read_in_place = False"
        return Finding("reading in place", Severity.OK, f"turned off by {how}: {copied}")
    if not machine.unread:
        seen = "ranks read each other's large private arrays where they lie, in one copy"
        return Finding("reading in place", Severity.OK, seen)
    return Finding(
        "reading in place",
        Severity.WARNING,
        f"{machine.unread}: {copied}",
        "if that matters: in a container a newer Docker, or --cap-add SYS_PTRACE; elsewhere, as root, "
        "`sysctl kernel.yama.ptrace_scope=1`",
    )


def _memory(machine: Machine) -> Iterator[Finding]:
    for limit in machine.free:
        state = Severity.OK if limit.free >= MEMORY_FREE else Severity.WARNING
        advice = "delete large variables, close other programs, or raise the limit (Docker: --memory)"
        seen = f"{size_text(limit.free)} free on {limit.where}"
        yield Finding("memory", state, seen, advice if state else "", brief=seen)


def _stale(machine: Machine) -> Iterator[Finding]:
    """Yield findings about names that no living session of this user needs."""
    dead = [name for name in machine.names if name.needed is False]
    unknown = [name for name in machine.names if name.needed is None]
    if dead:
        yield Finding(
            "stale names",
            Severity.WARNING,
            f"{_names_text(dead)} of sessions that ended without cleaning up",
            "any %%parallel cell that starts ranks removes them",
        )
    for reason in dict.fromkeys(name.reason for name in unknown):
        names = [name for name in unknown if name.reason == reason]
        others = reason.startswith("of another user")
        yield Finding(
            "stale names",
            Severity.OK if others else Severity.WARNING,
            f"{_names_text(names)} that no process is known to need: {reason}",
            "" if others else f"if `fuser {names[0].path}` shows no process, remove it: rm {names[0].path}",
        )
    if not dead and not unknown:
        yield Finding("stale names", Severity.OK, "none: no ended session has left shared memory behind")


def _names_text(names: Sequence[StaleName]) -> str:
    count = f"{len(names):,} names" if len(names) != 1 else f"1 name ({names[0].path})"
    return f"{count}, {size_text(sum(name.nbytes for name in names))},"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in version.split(".")[:2])


def _text(number: int | None) -> str:
    return "any number" if number is None else f"{number:,}"


def _raise(flag: str, limit: ResourceLimit, otherwise: str) -> str:
    """Return how a limit is raised, as far as this user may."""
    soft, hard = limit
    if hard is None or soft is None or hard > soft:
        most = "unlimited" if hard is None else str(hard)
        return f"before the notebook starts: `ulimit {flag} {most}`; {otherwise}"
    return (
        f"ask the administrator for more (Docker: --ulimit, systemd: Limit…=), this user may not; {otherwise}"
    )
