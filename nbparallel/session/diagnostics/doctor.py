"""The doctor: what about this machine stands in the way of ranks, and what to do about it.

`findings` is a function of the facts alone, so that every sentence can be tested on any machine.
"""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nbparallel.session.diagnostics.machine import Machine, ResourceLimit, look
from nbparallel.supervisor.owner_liveness import Liveness
from nbparallel.supervisor.sweep import StaleName
from nbparallel.table import Table
from nbparallel.wire.units import size_text

FILES_FREE = 512
"""Fewer free descriptors than this are used up by a few hundred large arrays, at two for each."""
PROCESSES = 256
"""A rank is one process, and libraries start threads, which count as well."""
MAPS_FREE = 10_000
"""Every shared array that is not packed costs a mapping; the usual limit is 65,530."""
MEMORY_FREE = 1 << 30
SMALL_SHM = 1 << 30
"""Docker gives 64 MiB unless it is told otherwise."""
WIDTH = 76
"""Characters of a line."""
OLDEST_IPYKERNEL = (6, 29)


class Severity(enum.IntEnum):
    """How bad it is."""

    OK = 0
    WARNING = 1
    """Works, until something grows."""
    PROBLEM = 2
    """Ranks, or the sharing strategy in force, will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    """What."""
    state: Severity
    """How bad it is."""
    seen: str
    """What was seen."""
    advice: str = ""
    """What to do; empty if there is nothing to do."""


class Examination(tuple[Finding, ...]):
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
        rows = [(f.subject, f.state.name.lower(), _paragraphs(f)) for f in self]
        title = f"this machine: {', '.join(wrong)}" if wrong else "this machine: nothing stands in the way"
        return Table(title, ("what", "state", "seen, and what to do"), rows)

    def __repr__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()


def _paragraphs(finding: Finding) -> str:
    advice = f"→ {finding.advice}" if finding.advice else ""
    return "\n".join(line for part in (finding.seen, advice) for line in textwrap.wrap(part, WIDTH))


def examine(start_method: str = "forkserver") -> Examination:
    """Look at this machine and return what was found; starts nothing and changes nothing.

    Examples
    --------
    >>> examination = examine()
    >>> all(finding.advice for finding in examination if finding.state is not State.OK)
    True
    """
    return Examination(sorted(findings(look(), start_method), key=lambda finding: -finding.state))


def findings(machine: Machine, start_method: str = "forkserver") -> Iterator[Finding]:
    """Yield what the facts about a machine mean."""
    yield _starting(machine, start_method)
    if not machine.proc:
        seen = "there is none: ranks cannot be given arrays for reading only, and limits are not known"
        yield Finding("/proc", Severity.PROBLEM, seen, "in a container or chroot: mount -t proc proc /proc")
    yield from _strategies(machine)
    yield from _memory(machine)
    yield _shm(machine)
    yield _files(machine)
    yield _processes(machine)
    yield _maps(machine)
    if machine.address_space.soft is not None:
        seen = f"a process may use {size_text(machine.address_space.soft)} of addresses (ulimit -v)"
        advice = "shared arrays count once in every process that maps them: `ulimit -v unlimited`"
        yield Finding("address space", Severity.WARNING, seen, advice)
    yield _cpus(machine)
    yield _blas(machine)
    yield from _stale(machine)
    yield _remove_ipc(machine)
    yield _locked(machine)
    yield _huge_pages(machine)
    yield _versions(machine)


def _starting(machine: Machine, start_method: str) -> Finding:
    if not machine.refused:
        return Finding("starting ranks", Severity.OK, f"start method {start_method}; nothing is refused")
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
            f"{', '.join(usable)} work here; {machine.strategy} is in force",
        )
    for name, reason in missing.items():
        state = Severity.PROBLEM if name == machine.strategy else Severity.WARNING
        other = next((n for n in usable if n != "copy"), "copy")
        yield Finding(f"strategy {name}", state, reason, f"use another one: %sharing_strategy {other}")


def _memory(machine: Machine) -> Iterator[Finding]:
    for limit in machine.free:
        state = Severity.OK if limit.free >= MEMORY_FREE else Severity.WARNING
        advice = "delete large variables, close other programs, or raise the limit (Docker: --memory)"
        yield Finding(
            "memory", state, f"{size_text(limit.free)} free on {limit.where}", advice if state else ""
        )


def _shm(machine: Machine) -> Finding:
    if machine.shm is None:
        return Finding("/dev/shm", Severity.OK, "there is none; only the strategy file_system would use it")
    free, size = machine.shm
    seen = f"{size_text(free)} of {size_text(size)} free; only the strategy file_system lies there"
    if min(free, size) >= SMALL_SHM:
        return Finding("/dev/shm", Severity.OK, seen)
    return Finding(
        "/dev/shm",
        Severity.WARNING,
        seen,
        "in a container start it with more (docker run --shm-size=4g), elsewhere `mount -o remount,size=4g "
        "/dev/shm`; or stay with file_descriptor, which does not need it",
    )


def _files(machine: Machine) -> Finding:
    limit, used = machine.files, machine.used_files
    seen = f"{used} in use of at most {_text(limit.soft)} a process"
    if limit.soft is None or limit.soft - used >= FILES_FREE:
        return Finding("open files", Severity.OK, seen)
    return Finding(
        "open files", Severity.WARNING, seen, _raise("-n", limit, "or %sharing_strategy file_region")
    )


def _processes(machine: Machine) -> Finding:
    limit = machine.processes
    seen = f"this user may have {_text(limit.soft)} processes and threads"
    if machine.root or limit.soft is None or limit.soft >= PROCESSES:
        return Finding("processes", Severity.OK, seen)
    return Finding("processes", Severity.WARNING, seen, _raise("-u", limit, "or run few ranks: -n 2"))


def _maps(machine: Machine) -> Finding:
    if machine.max_maps is None:
        return Finding("mappings", Severity.OK, "the system sets no limit")
    seen = f"{machine.used_maps:,} in use of at most {machine.max_maps:,} a process (vm.max_map_count)"
    if machine.max_maps - machine.used_maps >= MAPS_FREE:
        return Finding("mappings", Severity.OK, seen)
    return Finding(
        "mappings",
        Severity.WARNING,
        seen,
        "as root `sysctl vm.max_map_count=262144`, or %sharing_strategy file_region for many arrays",
    )


def _cpus(machine: Machine) -> Finding:
    usable = usable_cpus(machine)
    seen = f"{usable} usable of {machine.cpus}"
    if machine.affinity < machine.cpus:
        seen += f"; this process may run on {machine.affinity} (affinity, as taskset and Slurm set it)"
    if machine.quota is not None:
        seen += f"; the container may use the time of {machine.quota:g} (cgroup quota)"
    if usable > 1:
        return Finding("CPUs", Severity.OK, seen)
    return Finding(
        "CPUs",
        Severity.WARNING,
        seen,
        "ranks take turns here: everything works, nothing gets faster; give the container or job more",
    )


def usable_cpus(machine: Machine) -> int:
    """Return how many CPUs ranks can use at once."""
    return max(1, machine.affinity if machine.quota is None else min(machine.affinity, int(machine.quota)))


def _blas(machine: Machine) -> Finding:
    usable = usable_cpus(machine)
    libraries = ", ".join(f"{name} {threads}" for name, threads in machine.blas) or "none loaded"
    seen = f"threads of libraries in the notebook: {libraries}; each rank gets its share of {usable}"
    if all(threads <= usable for _, threads in machine.blas):
        return Finding("BLAS threads", Severity.OK, seen)
    return Finding(
        "BLAS threads",
        Severity.WARNING,
        seen,
        f"more threads than CPUs slow each other down: start the notebook with OMP_NUM_THREADS={usable}",
    )


def _stale(machine: Machine) -> Iterator[Finding]:
    """Yield what is to be said about names that no living session of this user needs."""
    dead = [name for name in machine.names if name.liveness is Liveness.DEAD]
    unknown = [name for name in machine.names if name.liveness is Liveness.UNKNOWN]
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
            f"{_names_text(names)} that nobody is known to need: {reason}",
            "" if others else f"if `fuser {names[0].path}` shows no process, remove it: rm {names[0].path}",
        )
    if not dead and not unknown:
        yield Finding("stale names", Severity.OK, "none: no ended session has left shared memory behind")


def _names_text(names: Sequence[StaleName]) -> str:
    count = f"{len(names):,} names" if len(names) != 1 else f"1 name ({names[0].path})"
    return f"{count}, {size_text(sum(name.nbytes for name in names))},"


def _remove_ipc(machine: Machine) -> Finding:
    if machine.remove_ipc is None:
        return Finding(
            "RemoveIPC", Severity.OK, "no systemd here: names of shared memory stay when you log out"
        )
    if not machine.remove_ipc or machine.uid < 1000:
        return Finding(
            "RemoveIPC", Severity.OK, "systemd leaves names of shared memory when this user logs out"
        )
    seen = "systemd removes this user's names in /dev/shm with the last login"
    if machine.strategy != "file_system":
        return Finding("RemoveIPC", Severity.OK, f"{seen}; {machine.strategy} has none there")
    return Finding(
        "RemoveIPC",
        Severity.WARNING,
        seen,
        "arrays stay, but cannot be opened by name any more: RemoveIPC=no in /etc/systemd/logind.conf, "
        "`loginctl enable-linger`, or %sharing_strategy file_descriptor",
    )


def _locked(machine: Machine) -> Finding:
    soft = machine.locked.soft
    size = "any amount" if soft is None else size_text(soft)
    return Finding("locked memory", Severity.OK, f"{size} may be locked (ulimit -l); nbparallel locks none")


def _huge_pages(machine: Machine) -> Finding:
    if not machine.huge_pages:
        return Finding("huge pages", Severity.OK, "the system has none for shared memory; not needed")
    seen = f"for shared memory: {machine.huge_pages} (shmem_enabled); not needed"
    if machine.huge_pages in ("never", "deny"):
        seen += ", large arrays are touched faster for the first time with `advise`"
    return Finding("huge pages", Severity.OK, seen)


def _versions(machine: Machine) -> Finding:
    known = ", ".join(f"{name} {version or 'missing'}" for name, version in machine.versions.items())
    seen = f"{known}; {machine.system}"
    ipykernel = machine.versions.get("ipykernel", "")
    if not ipykernel or _numbers(ipykernel) >= OLDEST_IPYKERNEL:
        return Finding("versions", Severity.OK, seen)
    return Finding("versions", Severity.WARNING, seen, 'pip install --upgrade "ipykernel>=6.29"')


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)


def _text(number: int | None) -> str:
    return "any number" if number is None else f"{number:,}"


def _raise(flag: str, limit: ResourceLimit, otherwise: str) -> str:
    """Return how a limit is raised, as far as this user may."""
    if limit.hard is None or limit.soft is None or limit.hard > limit.soft:
        most = "unlimited" if limit.hard is None else str(limit.hard)
        return f"before the notebook starts: `ulimit {flag} {most}`; {otherwise}"
    return (
        f"ask the administrator for more (Docker: --ulimit, systemd: Limit…=), this user may not; {otherwise}"
    )
