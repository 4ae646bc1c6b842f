"""Facts about this machine, container and process that decide whether ranks work well."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata

from nbparallel.channel import Channel
from nbparallel.distributed.runtime.peer_memory import YAMA_SCOPE, read_memory
from nbparallel.sharing import get_sharing_strategy
from nbparallel.sharing.memory import memory_limits
from nbparallel.sharing.strategies import registry
from nbparallel.sharing.strategies.strategy import Strategy
from nbparallel.supervisor import sweep
from nbparallel.supervisor.sweep import StaleName
from nbparallel.wire.system import (
    TaskLimit,
    affine_cpus,
    cgroup_quota,
    mapping_limit,
    open_descriptors,
    process_limit,
    read_text,
    task_limits,
)

SHM = "/dev/shm"
PACKAGES = ("nbparallel", "ipython", "ipykernel", "numpy")


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """One of the process's limits (getrlimit(2)); None: unlimited."""

    soft: int | None
    """What holds."""
    hard: int | None
    """How far this user may raise it."""


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
        files=ResourceLimit(*process_limit(resource.RLIMIT_NOFILE)),
        used_files=open_descriptors() or 0,
        processes=ResourceLimit(*process_limit(resource.RLIMIT_NPROC)),
        tasks=tuple(task_limits()),
        file_size=ResourceLimit(*process_limit(resource.RLIMIT_FSIZE)),
        address_space=ResourceLimit(*process_limit(resource.RLIMIT_AS)),
        max_maps=mapping_limit(),
        used_maps=_read("/proc/self/maps").count("\n"),
        free=tuple(memory_limits.limits()),
        shm=_shm(),
        cpus=os.cpu_count() or 1,
        affinity=affine_cpus(),
        quota=cgroup_quota(),
        blas=_blas(),
        refused={name: reason for name, attempt in _CALLS.items() if (reason := _why_refused(attempt))},
        unread=_why_unread(),
        strategies={name: _why_not(strategy) for name, strategy in registry.strategies().items()},
        strategy=get_sharing_strategy(),
        names=sweep.look().left,
        versions={"Python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        system=_system(),
    )


def _read(path: str) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""


def _shm() -> tuple[int, int] | None:
    try:
        room = os.statvfs(SHM)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize


def _blas() -> tuple[tuple[str, int], ...]:
    import numpy as np  # noqa: F401  its BLAS is the one that matters, and is loaded with it
    from threadpoolctl import threadpool_info

    return tuple((str(pool["internal_api"]), int(pool["num_threads"])) for pool in threadpool_info())


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _memfd() -> None:
    os.close(os.memfd_create("nbp-look", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


def _eventfd() -> None:
    os.close(os.eventfd(0, os.EFD_CLOEXEC))


def _socketpair() -> None:
    for end in Channel.pair():
        end.close()


def _thread() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


_CALLS: Mapping[str, Callable[[], None]] = {
    "pidfd_open": _pidfd,
    "memfd_create": _memfd,
    "eventfd": _eventfd,
    "socketpair": _socketpair,
    "a thread": _thread,
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
    if (error := read_memory(os.getpid(), ctypes.addressof(word), found)) is not None:
        return f"process_vm_readv is refused: {os.strerror(error.number)}"
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
        if package != "nbparallel":
            return ""
    import nbparallel  # run from a checkout

    return nbparallel.__version__


def _system() -> str:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        name = platform.system()
    return f"{name}, kernel {platform.release()}, {platform.machine()}"
