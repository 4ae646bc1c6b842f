"""Starting, reaping and ending the supervisor's children."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial

from nbparallel.wire.identity import Process, has_ended, process_of, process_state

# The process table, as ``/proc`` shows it: pids, environments, open descriptors; and killing without a race.
#
# Standard library only: the supervisor uses it, and the session when the supervisor is dead.


def pids() -> list[int]:
    """Return the pids of all visible processes; none without /proc."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []


def environment(pid: int) -> frozenset[bytes]:
    """Return the environment that a process was executed with; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return frozenset(file.read().split(b"\0"))
    except OSError:
        return frozenset()


def descriptors(pid: int) -> frozenset[str]:
    """Return what the open descriptors of a process refer to."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    except OSError:
        pass  # the process exited, or closed one, while it was read
    return frozenset(found)


def kill_where(matches: Callable[[int], bool]) -> tuple[int, int]:
    """Kill every process but this one whose pid `matches`.

    The pidfd is opened before the process is checked again, so that a reused pid is never signalled.

    Returns
    -------
    found, killed : int
        How many matched, and how many of them got SIGKILL.
    """
    found = killed = 0
    for pid in pids():
        if pid == os.getpid() or not matches(pid):
            continue
        found += 1
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue  # it has exited, or there are no descriptors left
        try:
            if matches(pid):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                killed += 1
        except OSError:
            pass  # it has exited, or belongs to another user
        finally:
            os.close(pidfd)
    return found, killed


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Arm SIGKILL for the death of `parent`; exit immediately if it has died already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


SENT_BY_PEOPLE = (
    *(getattr(signal, f"SIG{name}") for name in (
        "INT", "HUP", "TERM", "QUIT", "USR1", "USR2", "ALRM", "VTALRM", "PROF", "IO", "PWR", "XCPU", "STKFLT",
    ) if hasattr(signal, f"SIG{name}")),
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)  # fmt: skip
"""Signals that end a process, and that people, terminals and timers send: a supervisor ignores them."""


def reset_signals() -> None:
    """Undo what exec passes on: blocked signals and ignored ones.

    An ignored SIGCHLD would make the system throw exit statuses away (waitpid(2)).
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals():
        with suppress(OSError, ValueError):  # SIGKILL, SIGSTOP and the C library's own cannot be changed
            if signal.getsignal(number) is signal.SIG_IGN and number != signal.SIGPIPE:
                signal.signal(number, signal.SIG_DFL)


def become_supervisor(*fds: int) -> None:
    """Prepare a process that supervises others: people's signals do not end it, `fds` are its own."""
    reset_signals()
    raise_file_limit()
    for number in SENT_BY_PEOPLE:
        signal.signal(number, signal.SIG_IGN)
    for fd in fds:
        os.set_inheritable(fd, False)


def start(argv: Sequence[str], keep: Sequence[int], *, stdout: int, stderr: int) -> int:
    """Fork and execute `argv`, which dies with us; return its pid.

    It leads a process group, but not a session (setsid(2)): the scheduler would give each its own share of
    the processors (sched(7), *The autogroup feature*), and a rank that waits for
    another one yields its processor only to processes of its own share.

    The caller must have one thread.  `keep` lists the descriptors that the child inherits under the same
    number; standard input is empty.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(parent)
        reset_signals()
        for undo in _undo:
            undo()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for fd in keep:
            os.set_inheritable(fd, True)
        os.execv(argv[0], list(argv))
    except BaseException as error:  # noqa: BLE001  (a forked child must not return into the caller's code)
        os.write(2, f"nbparallel could not start {argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


_undo: list[Callable[[], object]] = []
"""What gives a child the user's own limits and policy back."""


def raise_file_limit() -> None:
    """Raise the limit of open files as far as allowed: the supervisor keeps a descriptor of every segment."""
    limits = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _undo.append(partial(resource.setrlimit, resource.RLIMIT_NOFILE, limits))


def use_batch_scheduling() -> None:
    """Schedule this process as SCHED_BATCH (sched(7)), so that it does not preempt the process that woke it.

    Most messages need no immediate answer, and where ranks share processors with the supervisor it would take
    the time of processes that others wait for.  A process that waits for an answer sleeps and leaves it the
    processor.
    """
    try:
        policy, parameters = os.sched_getscheduler(0), os.sched_param(0)
        if policy == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, parameters)
            _undo.append(partial(os.sched_setscheduler, 0, policy, parameters))
    except (OSError, AttributeError):
        pass  # not Linux, or forbidden: it is a matter of speed only


def reap(sessions: set[int]) -> Iterator[tuple[int, int]]:
    """Yield pid and exit code of every child that has ended (negative: of a signal), without waiting.

    A child in `sessions` leads a session of its own: what it started is ended with it, *before* it is
    reaped, because its pid (and so the number of its process group) cannot be reused until then.
    """
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None:
            return
        pid = info.si_pid
        if pid in sessions:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it left no process behind
        _, status = os.waitpid(pid, 0)
        yield pid, os.waitstatus_to_exitcode(status)


def children() -> list[int]:
    """Return the pids of all children, adopted ones included; they stay reserved until reaped."""
    pid = os.getpid()
    try:
        with open(f"/proc/self/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [child for child in pids() if (state := process_state(child)) and state.parent == pid]


def end_all(grace_seconds: float, limit_seconds: float = 10.0) -> None:
    """Wait `grace_seconds` for all children to leave, then kill and reap until there are none.

    Killing one makes its children ours (we are a subreaper), hence again and again.  The limit is for
    processes that the system itself cannot end (uninterruptible sleep).
    """
    now = time.monotonic()
    kill_from, give_up = now + grace_seconds, now + limit_seconds
    while time.monotonic() < give_up:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() >= kill_from:
            for pid in children():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)  # a bounded poll: the loop ends by reaping or by its limit


def is_exiting(pid: int) -> bool:
    """Whether a process has begun to exit, or is gone, or nothing is known of it."""
    state = process_state(pid)
    return state is None or state.exiting


# Orphans: processes that user code on a rank had started, and whose rank is dead.
#
# Whatever a rank started becomes the supervisor's child when its own parents have ended (a subreaper adopts).
# Its rank is known by what a process cannot easily lose, even after ``setsid`` and two forks:
#
# * its process group (setpgid(2)) is the one that the rank led; or
# * it was executed, and its environment names the rank's client number; or
# * it was only forked, and has the rank's end of a socket open: exec closes it, fork does not.
#
# A child's pid is not reused before it has been reaped, so the process that was inspected is the one killed.

SESSION, CLIENT, OWNER = "NBP_SESSION", "NBP_CLIENT", "NBP_OWNER"
"""Environment variables of every process below a session: its id, its rank's client number, its owner."""


def mark_children(notebook: int) -> None:
    """Mark every process below this one, the supervisor, with its owner, by an environment variable."""
    owners = (process_of(notebook), process_of(os.getpid()))
    os.environ[OWNER] = " ".join([_namespaces(), *(f"{owner.pid}:{owner.started}" for owner in owners)])


def _namespaces() -> str:
    """Return where pids and start times mean what they mean here; empty where the system does not say."""
    try:
        return ":".join(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("pid", "time"))
    except OSError:
        return ""


class Orphans:
    """The dead ranks of one session, and the processes that they left running."""

    def __init__(self) -> None:
        self._dead: list[tuple[int, frozenset[bytes], str]] = []
        """Their pids, what the environment of their children has, and what these have open."""

    def rank_died(self, session: str, client: int, pid: int, inode: int) -> None:
        """Record the death of a rank; `inode` is that of its segment socket."""
        marks = frozenset({f"{SESSION}={session}".encode(), f"{CLIENT}={client}".encode()})
        self._dead.append((pid, marks, f"socket:[{inode}]"))

    def forget_pid(self, pid: int) -> None:
        """Record that a pid of a dead rank was reused."""
        self._dead = [dead for dead in self._dead if dead[0] != pid]

    def end(self, living: Collection[int]) -> None:
        """Kill the children that dead ranks left; call it whenever a child has ended."""
        if not self._dead:
            return
        for pid in children():
            if pid not in living and self._is_orphan_of_rank(pid):
                os.kill(pid, signal.SIGKILL)

    def _is_orphan_of_rank(self, pid: int) -> bool:
        state = process_state(pid)
        if state is None or state.letter in "ZX":
            return False
        groups, marks, sockets = zip(*self._dead, strict=True)
        if state.group in groups:
            return True
        variables = environment(pid)
        return any(mark <= variables for mark in marks) or not descriptors(pid).isdisjoint(sockets)


def orphans_text(count: int) -> str:
    """Return the line about orphans that were ended; empty if there were none."""
    if not count:
        return ""
    return f"ended {count} process{'es' if count > 1 else ''} that a killed session had left running"


def end_orphans() -> int:
    """Kill the processes of sessions whose notebook and supervisor are dead for sure; return how many.

    Their environment names both.
    """
    return kill_where(_is_orphan)[1]


def _is_orphan(pid: int) -> bool:
    mark = f"{OWNER}=".encode()
    for variable in environment(pid):
        if variable.startswith(mark):
            place, *owners = os.fsdecode(variable[len(mark) :]).split(" ")
            return bool(place and owners) and place == _namespaces() and all(map(_has_ended, owners))
    return False


def _has_ended(owner: str) -> bool:
    pid, _, started = owner.partition(":")
    return pid.isdecimal() and started.isdecimal() and has_ended(Process(int(pid), int(started)))
