"""The machine and the container, as the system describes them: memory, processors, limits of this process.

Standard library only, for the supervisor as well.  All readers survive a system that lacks what they read.

Some facts about cgroups (cgroups(7), proc_pid_mountinfo(5)):

* every ancestor's limit counts as well;
* without a cgroup namespace the path in /proc/self/cgroup is the host's: the mount's root, a field of
  /proc/self/mountinfo, has to be removed from it.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PAUSE_SECONDS = 0.001
"""Between two tries to poll."""
TRIES = 100
"""Then nothing is ready, as far as can be known."""
ROOM = 2 << 20
"""Bytes that a socket is asked to hold."""
JOINED_NBYTES = 1 << 16
"""So many are rather copied than sent by several calls."""

ReadText = Callable[[str], str]


def ready(poll: select.poll, milliseconds: float | None = None) -> list[tuple[int, int]]:
    """Return what `poll.poll` does, trying again while the system lacks the memory (poll(2): ENOMEM)."""
    for _ in range(TRIES):
        try:
            return poll.poll(milliseconds)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            time.sleep(PAUSE_SECONDS)
    return []


def is_ready(fd: int, seconds: float | None = 0) -> bool:
    """Return whether a descriptor is readable within `seconds` (None: wait for it).

    Of a pidfd: whether its process has ended.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(ready(poll, None if seconds is None else seconds * 1000))


def roomy_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that hold large frames, so far as the system lets them: fewer hand-overs.

    ``net.core.wmem_max`` bounds it, which is 208 KiB on many systems (socket(7)).
    """
    pair = socket.socketpair()
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
    return pair


def send_all(sock: socket.socket, *parts: bytes | memoryview) -> None:
    """Send parts one behind the other; short ones joined: the process that waits for them wakes up once."""
    if sum(memoryview(part).nbytes for part in parts) <= JOINED_NBYTES:
        parts = (b"".join(parts),)
    for part in parts:
        sock.sendall(part)


def signal_of(code: int | None) -> str | None:
    """Return the name of the signal that an exit code stands for, as `subprocess` has it; None: for none.

    >>> signal_of(-9), signal_of(1), signal_of(None)
    ('SIGKILL', None, None)
    """
    if code is None or code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def is_debugged() -> bool:
    """Return whether a debugger (pydevd: JupyterLab's, VS Code's) rewrites the command lines of children."""
    patched = getattr(sys.modules.get("_posixsubprocess"), "fork_exec", None)
    return getattr(patched, "__module__", "").endswith("pydev_monkey")


def without_debugger() -> AbstractContextManager[object]:
    """Let this thread start processes in the block as they are: they have no debugger to connect to.

    pydevd would rewrite the command line of each child that looks like Python; what it starts then waits for
    a debugger, and is another process than the one whose parent and descriptors we know.
    """
    skip = getattr(sys.modules.get("_pydev_bundle.pydev_monkey"), "skip_subprocess_arg_patch", None)
    return nullcontext() if skip is None else skip()


def do_all(*steps: Callable[[], object]) -> None:
    """Call every step, whatever the others raise; then raise what the first one of them raised."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:  # noqa: BLE001  it is raised below
            first = first or error
    if first is not None:
        raise first


def read_text(path: str) -> str:
    """Return a small file's text; `OSError` if there is none."""
    # UTF-8 is there from the start; another codec would be imported when it is first used, and that may
    # fail just when the system is short of memory.
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def key_values(text: str) -> dict[str, int]:
    """Return the numbers of lines such as ``name 12`` and ``name: 12 kB``."""
    pairs = (line.replace(":", "").split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}


def available_memory(read: ReadText = read_text) -> tuple[int, int, int] | None:
    """Return the machine's memory in bytes: available, free swap, all; None if the system does not say."""
    try:
        fields = key_values(read("/proc/meminfo"))
        available = fields["MemAvailable"]
    except (OSError, KeyError):
        return None
    return available << 10, fields.get("SwapFree", 0) << 10, fields.get("MemTotal", 0) << 10


def cgroups(controller: str, read: ReadText = read_text) -> Iterator[tuple[str, int]]:
    """Yield (directory, 1 or 2) of this process's cgroup of a controller (``memory``), and its ancestors."""
    try:
        memberships = [line.split(":", 2) for line in read("/proc/self/cgroup").splitlines()]
        mounts = [_mount(line) for line in read("/proc/self/mountinfo").splitlines() if " - cgroup" in line]
    except OSError:
        return
    for _, controllers, path in memberships:
        for root, point, kind, options in mounts:
            version = 2 if kind == "cgroup2" and not controllers else 1
            if version == 1 and not (
                kind == "cgroup" and controller in controllers.split(",") and controller in options
            ):
                continue
            inside = os.path.relpath(path, root) if path.startswith(root.rstrip("/") + "/") else "."
            directory = os.path.normpath(os.path.join(point, inside))
            while True:
                yield directory, version
                if directory == point or len(directory) <= len(point):
                    break
                directory = os.path.dirname(directory)


def _mount(line: str) -> tuple[str, str, str, list[str]]:
    """Return a mount's root, point, kind and superblock options (proc_pid_mountinfo(5))."""
    before, _, after = line.partition(" - ")
    fields, rest = before.split(), after.split()
    return fields[3], fields[4], rest[0], rest[-1].split(",")


def affine_cpus() -> int:
    """Return how many CPUs this process may run on (sched_getaffinity(2))."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cgroup_quota() -> float | None:
    """Return how many CPUs' worth of time the container may use, at least 1; None: no limit."""
    try:  # version 2
        quota, period = read_text("/sys/fs/cgroup/cpu.max").split()
        return None if quota == "max" else max(1.0, int(quota) / int(period))
    except (OSError, ValueError):
        pass
    try:  # version 1
        base = "/sys/fs/cgroup/cpu"
        limit = int(read_text(f"{base}/cpu.cfs_quota_us"))
        return None if limit <= 0 else max(1.0, limit / int(read_text(f"{base}/cpu.cfs_period_us")))
    except (OSError, ValueError):
        return None


def usable_cpus(cpus: int) -> int:
    """Return how many of `cpus` the container's quota leaves, at least 1."""
    quota = cgroup_quota()
    return max(1, cpus if quota is None else min(cpus, int(quota)))


def process_limit(number: int) -> tuple[int | None, int | None]:
    """Return the soft and the hard limit of a ``resource.RLIMIT_…``; None: unlimited."""
    soft, hard = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft, None if hard == resource.RLIM_INFINITY else hard


class TaskLimit(NamedTuple):
    """A limit on processes and threads together."""

    most: int
    """How many there may be."""
    used: int
    """How many there are."""
    where: str
    """Whose limit, and which, as the end of a sentence."""


def task_limits(read: ReadText = read_text) -> Iterator[TaskLimit]:
    """Yield every limit on processes and threads that holds for this process."""
    most, _ = process_limit(resource.RLIMIT_NPROC)
    if most is not None and not _may_exceed_task_limit(read):
        yield TaskLimit(most, tasks_of_user(most, read), "this user may have (ulimit -u)")
    for directory, _ in cgroups("pids", read):
        try:
            text = read(f"{directory}/pids.max").strip()
            if text.isdigit():  # else "max"
                used = int(read(f"{directory}/pids.current"))
                yield TaskLimit(int(text), used, "this container may have (pids.max of its cgroup)")
        except (OSError, ValueError):
            continue


def _may_exceed_task_limit(read: ReadText) -> bool:
    """Return whether RLIMIT_NPROC does not hold: for the machine's root (copy_process in kernel/fork.c)."""
    try:
        return os.getuid() == 0 and read("/proc/self/uid_map").split() == ["0", "0", str(2**32 - 1)]
    except OSError:
        return os.getuid() == 0


def tasks_of_user(most: int, read: ReadText) -> int:
    """Return how many processes and threads this user has; of all users, where that is far below `most`."""
    try:
        everyone = int(read("/proc/loadavg").split()[3].partition("/")[2])
        if 2 * everyone < most:
            return everyone
    except (OSError, ValueError, IndexError):
        pass
    count, user = 0, os.getuid()
    try:
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return 0
    for pid in pids:
        try:
            status = os.stat(f"/proc/{pid}/task")
        except OSError:
            continue  # it has ended
        if status.st_uid == user:
            count += status.st_nlink - 2  # a folder for each thread
    return count


def file_system_room(path: str) -> tuple[int, int] | None:
    """Return how many bytes are free where a path lies, and how many there are; None if there is none."""
    try:
        extent = os.statvfs(path)
    except OSError:
        return None
    return extent.f_bavail * extent.f_frsize, extent.f_blocks * extent.f_frsize


def open_descriptors() -> int | None:
    """Return how many descriptors this process has open; None without /proc."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


def mapping_limit() -> int | None:
    """Return how many mappings a process may have (vm.max_map_count); None if the system does not say."""
    try:
        return int(read_text("/proc/sys/vm/max_map_count"))
    except (OSError, ValueError):
        return None


THREAD_VARIABLES = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "POLARS_MAX_THREADS", "VECLIB_MAXIMUM_THREADS")
"""What libraries read when they are loaded: OpenBLAS, MKL, BLIS, torch and numexpr the first, unless a
variable of their own is set."""


def threads_from_environment(library: str) -> int:
    """Return the number of threads that a library reads from the environment; 0: none that makes sense."""
    text = os.environ.get(f"{library.upper()}_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    first = text.partition(",")[0].strip()  # a list is for nested regions of OpenMP
    return int(first) if first.isdecimal() else 0


class ImportHook:
    """Calls a function when a module is loaded; both may be named only, so that nothing is loaded before."""

    def __init__(self, module: str, function: str | Callable[[], object]) -> None:
        self._module, self._function = module, function

    def install(self) -> None:
        """Wait for the module, or call the function now if it is there."""
        if self._module in sys.modules:
            self._call()
        elif not any(isinstance(hook, ImportHook) and hook._module == self._module for hook in sys.meta_path):
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what others find for the module, with the call behind it; None for each other module."""
        if name != self._module:
            return None
        import importlib.util  # the supervisor needs none of it

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._call()

            loader.exec_module = exec_module
        return spec

    def _call(self) -> None:
        function = self._function
        if isinstance(function, str):
            module, _, name = function.rpartition(".")
            function = getattr(import_module(module), name)
        function()


IMPORT_HOOKS = (ImportHook("joblib.parallel", "nbparallel.multiprocessing.workers.register_joblib"),)
"""What packages get of ours in processes and ranks, when they are loaded there."""
