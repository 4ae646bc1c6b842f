"""SupervisorClient: the notebook's end of the supervisor: requests to it, reports from it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from nbparallel.channel.channel import SegmentClient
from nbparallel.errors import ChannelClosedError, StartError
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.processes.launch import SupervisorLaunch, as_start_error, await_exit, start_error
from nbparallel.session.processes.rank_handle import CLOSED_SOCKETS, EventLoop, RankDeath, RankHandle
from nbparallel.supervisor.children import environment, kill_where
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.inspection import CompletionRequest, Completions, LedgerRow, NamespaceReport, read_report
from nbparallel.wire.system import ReadText, cgroups, do_all, is_debugged, is_ready, read_text

# Queries: what idle ranks and the supervisor are asked beside the tasks, one query at a time.

PATIENCE_SECONDS = 1.0
"""Time for a reply: an idle rank takes a millisecond, a stopped or just busy one is not waited for."""
SLICE_SECONDS = 0.05
"""Longest wait before it is checked whether the processes that have not replied still live."""


class QueryChannel:
    """One query at a time and its replies, matched by number.

    Notes
    -----
    `ask` may be called from any thread but the one that calls `take`.  An interrupt raises when it returns.
    """

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._changed = threading.Condition()
        self._number = 0
        self._replies: list[Any] = []

    def ask(
        self, send: Callable[[int], None], incomplete: Callable[[list[Any]], bool], patience: float
    ) -> list[Any]:
        """Send a query under a new number; return the replies that came within `patience` seconds.

        Parameters
        ----------
        incomplete : callable
            Whether a reply is missing in the list of replies, and can still come.
        """
        deadline = time.monotonic() + patience
        with InterruptCounter():  # an interrupt must not come between a lock and its release
            if not self._one_at_a_time.acquire(timeout=patience):
                return []
            try:
                with self._changed:
                    self._number += 1
                    self._replies = []
                send(self._number)
                with self._changed:
                    while incomplete(self._replies) and (left := deadline - time.monotonic()) > 0:
                        self._changed.wait(min(left, SLICE_SECONDS))
                    return list(self._replies)
            finally:
                self._one_at_a_time.release()

    def take(self, number: int, reply: Any) -> None:
        """Take a reply; drop it if its query was given up."""
        with self._changed:
            if number == self._number:
                self._replies.append(reply)
                self._changed.notify_all()


class RankQueries(QueryChannel):
    """Queries to idle ranks: their names, or completions; a busy rank is never waited for.

    Replies that `take` gets are pairs of a rank and what it has sent.
    """

    def names(
        self, handles: Sequence[RankHandle], patience: float = PATIENCE_SECONDS
    ) -> dict[int, NamespaceReport]:
        """Return the names of those ranks that are idle and reply in time, by rank."""
        return self._ask_idle(handles, patience, Kind.INSPECT, lambda number: number)

    def complete(self, handle: RankHandle, text: str, cursor: int, patience: float) -> Completions:
        """Return the completions of `text` in an idle rank's shell; none if it does not reply in time."""
        replies: dict[int, Completions] = self._ask_idle(
            [handle], patience, Kind.COMPLETE, lambda number: CompletionRequest(number, text, cursor)
        )
        return replies.get(handle.rank, Completions(0, ()))

    def _ask_idle(
        self, handles: Sequence[RankHandle], patience: float, kind: Kind, query: Callable[[int], Any]
    ) -> dict[int, Any]:
        asked: list[RankHandle] = []

        def send(number: int) -> None:
            asked.extend(
                handle
                for handle in handles
                if handle.usable and not handle.busy and handle.alive and handle.offer(kind, query(number))
            )

        def incomplete(replies: list[Any]) -> bool:
            replied = {rank for rank, _ in replies}
            return any(handle.alive and handle.rank not in replied for handle in asked)

        return dict(self.ask(send, incomplete, patience))


# Orphans of a session whose supervisor is dead: processes that user code on its ranks started.
#
# While the supervisor lives it ends them itself (it is a subreaper).  Afterwards they are found by the
# session's mark in their environment, which holds 50 random bits.

LIMIT_SECONDS = 1.0
"""How long new ones (a killed process's children) are looked for."""


def kill_by_session_mark(session: str) -> None:
    """Kill every process of this session, and theirs, until there is none."""
    mark = f"NBP_SESSION={session}".encode()
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline and kill_where(lambda pid: mark in environment(pid))[0]:
        time.sleep(0.005)  # a bounded poll: killed processes take a moment to leave /proc


# Out-of-memory kills, as the system counts them: whether a killed rank was one of them.
#
# Some facts (mm/oom_kill.c; Documentation/admin-guide/cgroup-v1/memory.rst, cgroup-v2.rst; proc_vmstat(5)):
#
# * the count rises before the process is signalled: a read after a death includes that death;
# * a container's count is ``oom_kill`` in ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1), the
#   machine's is in ``/proc/vmstat``; a kill counts in both, whichever of them was out of memory;
# * kills by programs that act earlier (systemd-oomd, earlyoom) count nowhere.

POLL_SECONDS = 0.1
"""Shortest time between two reads before tasks: one takes a tenth of the time of a short task."""

_MACHINE = "/proc/vmstat"
"""The file with the machine's own count."""


class OomKillCounter:
    """The count of out-of-memory kills where the ranks run.

    Notes
    -----
    Thread-safe in effect: with `poll` and `explain` at the same time one explanation can be missing.
    """

    def __init__(self, read: ReadText = read_text) -> None:
        self._read = read
        self._file = next((path for path in _files(read) if self._count(path) is not None), "")
        self._seen, self._read_at = 0, -math.inf
        self.poll()

    def poll(self) -> None:
        """Read the count, of which a later rise explains a later death, unless that was done a moment ago.

        A script can run a thousand tasks a second.
        """
        if (now := time.monotonic()) - self._read_at >= POLL_SECONDS:
            self._seen, self._read_at = self._count(self._file) or 0, now

    def explain(self) -> str:
        """Return the cause of a kill as the end of ``was …``; empty if the system did not run out of memory.

        Each kill explains one death.
        """
        count = self._count(self._file) or 0
        if count <= self._seen:
            return ""
        self._seen += 1
        where = "this machine's" if self._file == _MACHINE else "this container's"
        return (
            f"killed by the system because memory ran out ({where} count of such kills has risen): take less "
            "at a time, share arrays instead of copying them, or use fewer ranks"
        )

    def _count(self, path: str) -> int | None:
        with contextlib.suppress(OSError, ValueError):  # not counted there, or the container hides it
            for line in self._read(path).splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return None


def _files(read: ReadText) -> Iterator[str]:
    """Yield the files that can hold the count, the innermost cgroup first."""
    for directory, version in cgroups("memory", read):
        yield f"{directory}/{'memory.events' if version == 2 else 'memory.oom_control'}"
    yield _MACHINE


NOT_DEBUGGED = "the notebook's debugger does not see ranks: put `breakpoint()` into a cell to stop on them"
"""What is said when ranks start below a debugger."""


class SupervisorClient:
    """Owns the supervisor's process, the control channel and the notebook's segment channel.

    Parameters
    ----------
    launch : SupervisorLaunch
        The process, which belongs to this object from now on.
    on_start_failed : callable
        Called in the event loop's thread with the error when the template could not start.
    on_death : callable
        Called in the event loop's thread when the supervisor ended without being asked to.
    """

    def __init__(
        self,
        launch: SupervisorLaunch,
        event_loop: EventLoop,
        *,
        on_start_failed: Callable[[StartError], None],
        on_death: Callable[[], None],
    ) -> None:
        self._session = launch.session
        self._event_loop = event_loop
        self._on_start_failed, self._on_death = on_start_failed, on_death
        self._ranks: dict[int, RankHandle] = {}
        self.template_pid = 0
        self.oom_kills = OomKillCounter()
        self.notes: deque[str] = deque()
        """Lines for the user, shown when the next cell ends."""
        if is_debugged():
            self.notes.append(NOT_DEBUGGED)
        self.stopping = False
        self.dead = False
        self._popen, self._log = launch.popen, launch.log
        self.control = launch.control
        self.broker = SegmentClient(launch.segments, client=0)
        self.pid = self._popen.pid
        with as_start_error("pidfd_open"):
            self._pidfd = os.pidfd_open(self.pid)
        self._ledger = QueryChannel()
        event_loop.watch(self._pidfd, self._on_pidfd)
        event_loop.watch(self.control.fileno(), self._on_control)

    def ended(self, milliseconds: float = 0) -> bool:
        """Wait up to `milliseconds` for the end of the process; return whether it has ended."""
        return self.dead or is_ready(self._pidfd, milliseconds / 1000)

    # requests -----------------------------------------------------------------------------------------

    def spawn(self, handle: RankHandle) -> None:
        """Start a rank's process; READY or DIED reports whether that worked."""
        self._ranks[handle.client] = handle
        self._send(Kind.SPAWN, {"rank": handle.rank, "client": handle.client}, handle.rank_ends)
        handle.close_theirs()

    def epoch(self, control_segment: int, epoch: int) -> None:
        """Send the control segment, in which the supervisor records deaths."""
        self.control.send(Kind.EPOCH, fds=[control_segment], epoch=epoch, abandon=lambda: self.dead)

    def kill(self, handle: RankHandle) -> None:
        """Kill a rank."""
        self._send(Kind.KILL, {"client": handle.client})

    def _send(
        self, kind: Kind, message: dict[str, Any], fds: list[int] | None = None, *, sequence: int = 0
    ) -> None:
        with contextlib.suppress(ChannelClosedError):  # it has ended, which its pidfd reports
            self.control.send(
                kind,
                json.dumps(message).encode(),
                fds=fds or (),
                sequence=sequence,
                abandon=lambda: self.dead,
            )

    def ledger(self, patience: float = PATIENCE_SECONDS) -> tuple[LedgerRow, ...] | None:
        """Return the rows of the supervisor's ledger; None if they do not come within `patience` seconds."""
        replies = self._ledger.ask(
            lambda number: self._send(Kind.LEDGER, {}, sequence=number),
            lambda found: not (found or self.dead),
            patience,
        )
        return replies[0] if replies else None

    def log(self) -> str:
        """Return the end of the output of supervisor and template."""
        return (
            os.pread(self._log, 4000, max(0, os.fstat(self._log).st_size - 4000))
            .decode("utf-8", "backslashreplace")
            .strip()
        )

    # the event loop's thread --------------------------------------------------------------------------------

    def _on_control(self) -> None:
        for frame in self._event_loop.frames(self.control):
            self._handle(frame)

    def _handle(self, frame: Frame) -> None:
        if frame.kind is Kind.LEDGER:
            self._ledger.take(frame.sequence, read_report(frame.payload)[0])
            return
        report = json.loads(frame.payload) if frame.payload else {}
        if frame.kind is Kind.READY:
            handle = self._ranks.get(report["client"])
            if handle is not None:
                handle.pid = report["pid"]
                handle.pidfd = frame.fds.pop(0)
                self.template_pid = report["template"]
                handle.post(handle, "changed")
        elif frame.kind is Kind.DIED:
            handle = self._ranks.pop(report["client"], None)
            if handle is not None:
                handle.protocol_error = handle.protocol_error or report["protocol_error"]
                code, refused = report["code"], report["refused"]
                reason = self._reason(handle, code) or CLOSED_SOCKETS * report["closed_socket"]
                handle.died(RankDeath(report["pid"], code, time.monotonic(), refused, reason))
        elif frame.kind is Kind.SWEPT:
            self.notes.extend(report["sentences"])
        elif frame.kind is Kind.START_FAILED:
            self._on_start_failed(_start_failure(report))

    def _reason(self, handle: RankHandle, code: int | None) -> str:
        if handle.protocol_error:
            return (
                f"ended: it sent malformed data ({handle.protocol_error}); has code on it written to "
                "descriptors or memory that are not its own?"
            )
        return self.oom_kills.explain() if code == -signal.SIGKILL else ""

    def _on_pidfd(self) -> None:
        self._on_control()  # deaths that it reported before its own
        self._event_loop.unwatch(self._pidfd)
        self.dead = True
        if not self.stopping:
            self._on_death()
        for handle in list(self._ranks.values()):
            # they died with it (parent-death signal); their exit status is unknown
            handle.died(RankDeath(handle.pid, -signal.SIGKILL, time.monotonic()))
        self._ranks.clear()

    # the end ------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End ranks, template and supervisor; return when all have ended (2 s at most)."""
        self.stopping = True
        with contextlib.suppress(ChannelClosedError):
            self.control.send(Kind.STOP, abandon=lambda: True)
        await_exit(self._popen)
        self.dead = True
        kill_by_session_mark(self._session)

    def close(self) -> None:
        """Close every descriptor; the event loop has stopped."""
        do_all(
            self.control.close,
            self.broker.close,
            partial(os.close, self._pidfd),
            partial(os.close, self._log),
        )


def _start_failure(report: dict[str, Any]) -> StartError:
    """Return the error about a template that did not start."""
    if report["refused"]:
        number = report["refused"]
        return start_error("the process that ranks are forked from", OSError(number, os.strerror(number)))
    code = report["code"]
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    return StartError(f"the template process ended with {how}")
