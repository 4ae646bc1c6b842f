"""Facts about this machine, container and process that decide whether ranks work well."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata

from nbparallel.channel import Channel
from nbparallel.distributed.runtime.peer_memory import YAMA_SCOPE, allow_reading, read_memory
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
CHILD_SECONDS = 5.0
"""Bound for a child of the doctor's, which takes milliseconds."""


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
    uid: int
    """The user."""
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
    remove_ipc: bool | None
    """Whether systemd removes names of shared memory when the user logs out; None without systemd."""
    versions: Mapping[str, str]
    """Of Python and its packages; empty: not installed."""
    system: str
    """Operating system and kernel."""


def inspect_machine() -> Machine:
    """Inspect this machine; allocates one page of shared memory with each strategy, and frees it."""
    return Machine(
        proc=os.path.isdir("/proc/self/fd"),
        uid=os.geteuid(),
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
        remove_ipc=_remove_ipc(),
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
    """Let one child of this process read a word of another one, as ranks do; return why that failed."""
    word = bytearray(os.urandom(8))
    address = ctypes.addressof(ctypes.c_char.from_buffer(word))  # the same in both children
    ready, says_ready = os.pipe()
    stays, ends = os.pipe()

    def be_read() -> int:
        os.close(ends)
        os.close(ready)
        allow_reading(os.getppid())
        os.write(says_ready, b"1")
        os.read(stays, 1)  # until the parent has closed the other end
        return 0

    def read() -> int:
        os.close(ends)
        os.close(says_ready)  # else nothing would show that the other child has ended without a word
        os.read(ready, 1)
        found = bytearray(8)
        error = read_memory(children[0], address, found)
        return error.number if error is not None else 0 if found == word else errno.ESRCH

    children: list[int] = []
    descriptors = [ready, stays, ends, says_ready]
    try:
        for work in (be_read, read):
            children.append(_fork(work))
        os.close(descriptors.pop())
        number = _exit_code(children.pop())
    except OSError as error:
        return f"it could not be tried: {error.strerror}"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        for child in children:
            _exit_code(child)
    if number <= 0:
        return f"it could not be tried: a child ended by signal {-number}" if number else ""
    scope = _read(YAMA_SCOPE).strip()
    why = f" (kernel.yama.ptrace_scope is {scope})" if scope not in ("", "0") else ""
    return f"process_vm_readv is refused: {os.strerror(number)}{why}"


def _exit_code(child: int) -> int:
    """Wait for a child and return its exit code; one that another thread's lock keeps is killed."""
    deadline = time.monotonic() + CHILD_SECONDS
    while not (found := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            found = os.waitpid(child, 0)
            break
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(found[1])


_one_catches = threading.Lock()
"""Threads that catch warnings at the same time end each other's filters: a fork whose warning is an error
leaves a child for which nothing waits."""


def _fork(work: Callable[[], int]) -> int:
    """Return the process of a child that does this, and exits with what it returns."""
    with _one_catches, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the child does not need
        child = os.fork()
    if child:
        return child
    code = errno.ECANCELED
    try:
        code = work()
    finally:
        os._exit(code)


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


def _remove_ipc() -> bool | None:
    """Return systemd-logind's RemoveIPC, which is on by default (logind.conf(5))."""
    if not os.path.isdir("/run/systemd/system"):
        return None
    found = True
    folder = "/etc/systemd/logind.conf.d"
    more = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    for path in ("/etc/systemd/logind.conf", *(f"{folder}/{name}" for name in more)):
        for line in _read(path).splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "RemoveIPC":
                found = value.strip().lower() not in ("no", "false", "off", "0", "n", "f")
    return found


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
