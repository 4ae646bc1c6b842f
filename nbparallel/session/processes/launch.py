"""Launch of the supervisor, which can begin before anything else is imported here.

The template's imports take as long as the notebook's.  Started first, both run in parallel on two cores; so
this module and its imports stay small (a test checks).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from nbparallel.channel import Channel
from nbparallel.errors import ChannelClosedError, StartError
from nbparallel.wire import system
from nbparallel.wire.frames import Kind
from nbparallel.wire.system import do_all, without_debugger
from nbparallel.wire.units import size_text

# Limits of the machine: how many ranks it can hold, and how many CPUs this process may use.

# Refusals: what the system did not give when ranks were to be started, and which limit was in the way.


@contextlib.contextmanager
def as_start_error(what: str) -> Iterator[None]:
    """Raise `StartError` if the system refuses `what` inside of the block."""
    try:
        yield
    except OSError as error:
        raise start_error(what, error) from error
    except AttributeError as error:  # a Python that was built on a system without the call
        raise start_error(what, OSError(errno.ENOSYS, str(error))) from error
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise start_error(what, OSError(errno.EAGAIN, str(error))) from error


_CAUSES = {
    errno.ENFILE: "this machine has too many open files (sysctl fs.file-max); close some",
    **dict.fromkeys(
        (errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT),
        "this machine or container is short of memory; delete large variables, end other programs, or run "
        "fewer ranks",
    ),
    **dict.fromkeys(
        (errno.EPERM, errno.EACCES, errno.ENOSYS),
        "it takes Linux 5.3 or newer, and a container whose seccomp profile allows it (Docker's does since "
        "20.10)",
    ),
}
"""Why the system refuses, and what to do, by the number of its error."""


def start_error(what: str, error: OSError) -> StartError:
    """Return the error that says what the system refused, why, and what to do."""
    number = error.errno or 0
    cause = _CAUSES.get(number) or os.strerror(number)
    if number == errno.EAGAIN:
        cause = f"{_tasks()}; run fewer ranks, end other programs, or raise the limit"
    elif number == errno.EMFILE:
        most = system.process_limit(resource.RLIMIT_NOFILE)[0]
        cause = f"this process may have {most} open files; close some, or raise the limit (ulimit -n)"
    elif number == errno.EFBIG:
        most = system.process_limit(resource.RLIMIT_FSIZE)[0] or 0
        cause = (
            f"shared memory counts as a file, and the limit of {size_text(most)} on the size of files is too "
            "low; start the notebook or script without it (ulimit -f unlimited)"
        )
    return StartError(f"the system refused {what} ({error.strerror or error}): {cause}")


def _tasks() -> str:
    limit = min(system.task_limits(), key=lambda limit: limit.most - limit.used, default=None)
    if limit is None:
        return "the system has no room for more processes and threads"
    return f"there are {limit.used} processes and threads of the {limit.most} that {limit.where}"


RANK_BYTES = 24 << 20
"""Private memory of a rank at rest (9 MB forked, 23 MB as a fresh interpreter), rounded up."""
RANK_FILES = 6
"""Descriptors that the kernel holds for one rank: socket, two pipes, pidfd, and room for segments."""
BESIDE_RANKS = 4
"""Processes and threads beside the ranks: the supervisor, the process that ranks are forked from, the one
between the two for a moment, and the session's thread."""
USED_FILES = 64
"""Descriptors that this process has open, where /proc does not say it."""
MOST_RANKS = 512
"""The control segment holds a ring for every ordered pair of ranks; beyond this it grows too large."""


def usable_cpus() -> int:
    """Return how many CPUs this process may use: affinity and cgroup quota, at least 1."""
    return system.usable_cpus(system.affine_cpus())


def check_world_size(world_size: int, running: int = 0) -> None:
    """Refuse a number of ranks that this machine cannot hold.

    Parameters
    ----------
    world_size : int
        Number of ranks wanted.
    running : int
        How many of them exist already.

    Raises
    ------
    TypeError
        It is no integer.
    ValueError
        It is below 1, or more than the machine can hold; the message says which limit and what fits.
    """
    if isinstance(world_size, bool) or not hasattr(world_size, "__index__"):
        raise TypeError(f"the number of ranks must be an integer, not {type(world_size).__name__}")
    world_size = world_size.__index__()
    if world_size < 1:
        raise ValueError(f"there must be at least 1 rank, not {world_size}")
    new = world_size - running
    for most, reason in _limits(world_size, running):
        if new > 0 and world_size > most:
            fitting = f"at most {most} do" if most > 0 else "not even one does"
            raise ValueError(
                f"{world_size} ranks do not fit this machine: {reason}; {fitting}. "
                f"More ranks than CPUs ({usable_cpus()} here) seldom help."
            )


def check_ranks_per_cpu(world_size: int, most: int) -> None:
    """Refuse more ranks than `most` for each CPU that this process may use.

    Raises
    ------
    ValueError
        The message says how many CPUs there are, and which setting of the notebook allows so many ranks.
    """
    cpus = usable_cpus()
    if world_size > most * cpus:
        raise ValueError(
            f"{world_size} ranks on {cpu_count_text(cpus)}: they would wait for a CPU most of the time, so "
            f"at most {most * cpus} are started here, {most} for each CPU; to insist: "
            f"%config NbParallel.ranks_per_cpu = {-(-world_size // cpus)}"
        )


def cpu_count_text(cpus: int) -> str:
    """Return ``1 CPU`` or ``2 CPUs``."""
    return f"{cpus} CPU{'s' * (cpus != 1)}"


def _limits(world_size: int, running: int) -> list[tuple[int, str]]:
    limits = [(MOST_RANKS, "the segment through which ranks communicate grows with their square")]
    files, _ = system.process_limit(resource.RLIMIT_NOFILE)
    if files is not None:
        room = (files - (system.open_descriptors() or USED_FILES)) // RANK_FILES
        limits.append((running + room, f"the limit of open files is {files} (ulimit -n)"))
    threads = max(1, usable_cpus() // world_size)  # of BLAS on each rank
    for limit in system.task_limits():
        room = limit.most - limit.used - (1 if running else BESIDE_RANKS)
        text = f"{limit.used} processes and threads are there of the {limit.most} that {limit.where}"
        limits.append((running + room // threads, text))
    memory = system.available_memory()
    if memory is not None:
        free = memory[0]
        text = f"each needs about {size_text(RANK_BYTES)} and {size_text(free)} of memory are free"
        limits.append((running + free // RANK_BYTES, text))
    return limits


# Process context: command lines, environment, and the attributes that a started process inherits.
#
# A rank receives the notebook's environment, directory and search path at its start, and again when they
# change.  But what an interpreter or a module read from them earlier, and what only the system passes from
# parent to child, stays as it was when the supervisor was started.

PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
"""The directory that holds the package: a checkout or site-packages."""

_SUPERVISOR = (
    "import sys; sys.path.append(sys.argv[1]); from nbparallel.supervisor.main import main; "
    "main(*map(int, sys.argv[2:]))"
)
_ENGINE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from nbparallel.engine.{} import {} as main; "
    "main(*map(int, sys.argv[2:]))"
)


def supervisor_argv() -> list[str]:
    """Return the supervisor's command line without its descriptors.

    ``-I -S -E``: no user site, no site-packages, no ``PYTHON*``: nothing of the user's is loaded.
    """
    return [sys.executable, "-I", "-S", "-E", "-c", _SUPERVISOR, PACKAGE_PARENT]


def engine_argvs() -> dict[str, list[str]]:
    """Return the command lines of the template, and of a rank that is not forked.

    They have the notebook's search path, but not its directory.
    """
    path = [entry for entry in sys.path if entry and os.path.isabs(entry)]
    words = json.dumps(path if PACKAGE_PARENT in path else [*path, PACKAGE_PARENT])
    starts = {"template": ("template", "main"), "engine": ("main", "spawned")}
    return {
        name: [sys.executable, "-P", "-c", _ENGINE.format(*start), words] for name, start in starts.items()
    }


BLAS_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def environment(session: str, hash_seed: int) -> dict[str, str]:
    """Return the environment of the supervisor and, through it, of the template.

    BLAS has one thread while the template forks; a rank sets its own number afterwards and gets the
    notebook's environment back.
    """
    values = dict(os.environ)
    values.update(dict.fromkeys(BLAS_VARIABLES, "1"))
    values["NBP_SESSION"] = session
    values.pop("NBP_CLIENT", None)  # of a session in which this process may run
    values.setdefault("PYTHONHASHSEED", str(hash_seed))
    return values


_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


def process_attributes() -> tuple[object, ...]:
    """Return what a process that is started now inherits (0.05 ms); equal ones make equal processes."""
    return (
        engine_argvs(),
        dict(os.environ),  # all of it: a library can read any variable when it is imported
        os.sched_getaffinity(0),
        os.getpriority(os.PRIO_PROCESS, 0),
        tuple(map(resource.getrlimit, _LIMITS)),
        _creation_mask(),
        os.getresuid(),
        os.getresgid(),
    )


def _creation_mask() -> str:
    """Return the umask from ``/proc``: `os.umask` can only read it by setting it."""
    try:
        with open("/proc/self/status") as file:
            return next((line for line in file if line.startswith("Umask")), "")
    except OSError:
        return ""


def _shell() -> Any:
    # another thread may be half-way through the import
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get_ipython is None else get_ipython()


def notebook_colors() -> str:
    """Return the notebook's colour scheme, so that tracebacks look alike."""
    return str(getattr(_shell(), "colors", "nocolor"))


def has_magics() -> bool:
    """Return whether `%share` can be written where the session is."""
    shell = _shell()
    return shell is not None and shell.find_line_magic("share") is not None


def free_port() -> int:
    """Return a port at which no program listens now; 0 where there is no network."""
    try:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port: int = sock.getsockname()[1]
    except OSError:
        return 0
    return port


EXIT_SECONDS = 2.0
"""Bound for the exit of a supervisor; then it is killed, and its ranks die with it."""


class SupervisorLaunch:
    """A supervisor's process with the notebook's ends of its sockets.

    Owns all of it until a `SupervisorClient` takes it over; otherwise call `terminate`.

    Parameters
    ----------
    start_method : {"forkserver", "spawn"}
    folder : str
        Temporary folder of this process, which the supervisor removes if this process is killed.
    semaphores : str
        What the names of its semaphores begin with, which are removed then, too.

    Attributes
    ----------
    session : str
        Id of the session, 56 random bits.
    seed : int
        Entropy of the session: random streams and hash seed derive from it.
    waited : bool
        Whether it was started long before its use, so that it may have ended.

    Notes
    -----
    It has no thread, and does nothing in a forked child of this process.
    """

    def __init__(self, start_method: str = "forkserver", folder: str = "", semaphores: str = "") -> None:
        self.start_method = start_method
        self.session = secrets.token_hex(7)
        self.seed = secrets.randbits(64)
        self.waited = False
        self._pid = os.getpid()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as given:
            with as_start_error("memfd_create"):
                # output of supervisor and template, for the error message of a failed start
                self.log = os.memfd_create("nbp-log", os.MFD_CLOEXEC)
            ours.callback(os.close, self.log)
            with as_start_error("pidfd_open"):
                kernel = os.pidfd_open(os.getpid())
            given.callback(os.close, kernel)
            self.control, control = _channel(ours, given)
            self.segments, segments = _channel(ours, given)
            inherited = [control.fileno(), segments.fileno(), kernel, self.log]
            self._process_attributes = process_attributes()
            # a process that is started could be ended by SIGINT before it has its own session
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            given.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
            with as_start_error("a process for the supervisor"), without_debugger():
                self.popen = subprocess.Popen(
                    [*supervisor_argv(), *map(str, inherited)],
                    stdin=subprocess.DEVNULL,
                    stdout=self.log,
                    stderr=self.log,
                    pass_fds=inherited,
                    start_new_session=True,  # out of the kernel's process group, which Jupyter signals
                    cwd="/",
                    env=environment(self.session, self.seed & 0xFFFF_FFFF),
                )
            ours.pop_all()
        hello = {
            "pid": self._pid,
            "session": self.session,
            "start_method": start_method,
            **engine_argvs(),
            "folder": folder,
            "semaphores": semaphores,
        }
        with contextlib.suppress(ChannelClosedError):  # it has ended: what waits for it reads why in the log
            self.control.send(Kind.HELLO, json.dumps(hello).encode(), abandon=lambda: True)

    def is_current(self, start_method: str) -> bool:
        """Return whether the supervisor runs, and this process still has the attributes that it inherited."""
        return (
            start_method == self.start_method
            and self.popen.poll() is None
            and process_attributes() == self._process_attributes
        )

    def terminate(self) -> None:
        """End a supervisor that no session uses, and its children."""
        if os.getpid() != self._pid:
            return
        self.control.shut_down()  # makes it exit, also if a forked child of ours has the socket open
        do_all(
            self.control.close,
            self.segments.close,
            partial(os.close, self.log),
            partial(await_exit, self.popen),
        )


def await_exit(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has exited; kill it if it does not in time."""
    try:
        process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    except ChildProcessError:
        pass  # code of the notebook has reaped it


def _channel(ours: contextlib.ExitStack, given: contextlib.ExitStack) -> tuple[Channel, socket.socket]:
    """Return both ends of a socketpair, which the stacks close."""
    with as_start_error("a pair of sockets"):
        mine, theirs = Channel.pair()
    ours.callback(mine.close)
    given.callback(theirs.close)
    return Channel(mine), theirs
