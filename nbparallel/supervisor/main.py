"""The supervisor of a session: starts its processes, reaps them, and reports how each of them ended.

Started by the kernel as ``python -I -S -E``: standard library only, one thread, a session of its own, a
subreaper.  It starts the template and the ranks, watches the kernel and all of them, keeps the ledger of
segments and sends descriptors.  It never unpickles, and blocks in `poll` only.

::

    kernel ──control──┐                        control   HELLO SPAWN EPOCH STOP LEDGER -> <- READY DIED …
           ──segments─┤                        segments  REGISTER FETCH RELEASE … (the kernel is client 0)
                      supervisor ──template──  FORK -> <- TEMPLATE_READY FORKED
    rank r ──segments─┘                        ANNOUNCE -> , then as the kernel's
    client ──segments──                        (`worlds`) the same; another's INTRODUCE, its ANNOUNCE,
                                               MEET LEAVE_WORLD

The kernel's end ends everything here: its pidfd reports it, because a forked child of the kernel could hold
its sockets open.  End-of-file on one of these sockets ends everything as well; on the socket of a living
rank it is a protocol violation, and the rank is killed.  A rank's death is recorded when waitid has returned
it, or when the template died before it could name the process.  Ranks end with the supervisor by their
parent-death signal.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from nbparallel.errors import FileDescriptorLimitError, ProtocolError, SharedMemoryFullError
from nbparallel.supervisor import children
from nbparallel.supervisor.children import Orphans, adopt_orphans, mark_children
from nbparallel.supervisor.clients import Client, Clients, take
from nbparallel.supervisor.sweep import remove_leftovers, sweep_and_notify
from nbparallel.supervisor.worlds import KINDS, IntroducedClients
from nbparallel.wire.control import ControlView
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.inspection import pack_report
from nbparallel.wire.segments import Announce

# The template process, from which ranks are forked, as the supervisor handles it.


class TemplateProcess:
    """One template after the other.

    Parameters
    ----------
    clients : Clients
        Read the template's socket.
    log : int
        Descriptor for its output.
    on_fork : callable
        ``on_fork(client, pid)``, called for every rank that it has forked.
    on_refused : callable
        ``on_refused(client, errno)``, called for every rank that it could not fork.

    Attributes
    ----------
    pid : int
        0: none has been started, or the last one has died.
    ready : bool
        Whether the last one has imported what ranks need.
    """

    def __init__(
        self,
        clients: Clients,
        log: int,
        on_fork: Callable[[int, int], None],
        on_refused: Callable[[int, int], None],
    ) -> None:
        self._clients, self._log = clients, log
        self._on_fork, self._on_refused = on_fork, on_refused
        self.client: Client | None = None
        """None: it takes no requests."""
        self.pid = 0
        self.ready = False

    def start(self, argv: Sequence[str]) -> None:
        """Start one; `OSError` if the system refuses it."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = children.start(
                [*argv, str(theirs.fileno()), str(os.getpid())],
                [theirs.fileno()],
                stdout=self._log,
                stderr=self._log,
            )
        self.client, self.ready = Client(self._clients, mine, self), False

    def fork(self, rank: int, client: int, fds: Sequence[int]) -> None:
        """Request a rank, which gets the descriptors `fds`."""
        assert self.client is not None, "the caller has started one"
        self.client.outbox.send(Kind.FORK, json.dumps({"rank": rank, "client": client}).encode(), fds)

    def is_lost(self, pid: int) -> bool:
        """Whether template `pid`, which was to fork a rank, cannot do it any more.

        One that never was ready is a failed start, which is reported as such.
        """
        return self.ready if self.client is None else self.pid != pid

    def close(self) -> None:
        """Disconnect: at the end of its socket the template exits."""
        if self.client is not None:
            self._clients.forget(self.client)
            self.client = None

    def exited(self) -> None:
        """Read what it had still sent, after it has died."""
        self.pid = 0
        if self.client is not None:
            self._clients.drain(self.client)
        self.close()

    def received(self, client: Client, frame: Frame) -> None:
        """Act on its frame."""
        if frame.kind is Kind.TEMPLATE_READY:
            self.ready = True
        elif frame.kind is Kind.FORKED:
            fields = json.loads(frame.payload)
            if fields["pid"]:
                self._on_fork(fields["client"], fields["pid"])
            else:
                self._on_refused(fields["client"], fields["errno"])

    def disconnected(self, client: Client, error: Exception | None) -> None:
        """Act on the end of its socket, or on damage."""
        self.close()


class RankProcess(Client):
    """A rank's process, from SPAWN to its death.

    Attributes
    ----------
    inode : int
        Of its end of the segment socket, which what it forks has open too.
    protocol_error : str
        How it broke the protocol, for which it was killed.
    closed_socket : bool
        Whether it closed its socket and went on, for which it was killed.
    refused : int
        The system's error (`errno`) if its process could not be made, else 0.
    """

    rank = 0
    announced = dead = closed_socket = False
    template = inode = refused = 0
    protocol_error = ""

    def kill(self) -> None:
        """Kill it, now or when its process is known."""
        self.doomed = True
        if self.pid and not self.dead:  # a child, so that no other process has its number
            os.kill(self.pid, signal.SIGKILL)


LEAVE_SECONDS = 0.5
"""How long ranks may take to exit after STOP before they are killed."""
MOST_UNNAMED_EXITS = 1000
"""How many exits are kept of pids that the template has not named yet."""


class Supervisor:
    """Owns every child and all clients."""

    def __init__(self, control: socket.socket, segments: socket.socket, kernel: int, log: int) -> None:
        self._kernel, self._log = kernel, log
        self._clients = Clients(lambda text: os.write(log, f"{text}\n".encode()))
        self._event_loop = self._clients.event_loop
        self._ranks: dict[int, RankProcess] = {}
        self._unnamed_exits: dict[int, int] = {}
        """Exit codes, by pid."""
        self._template = TemplateProcess(self._clients, log, self._set_pid, self._on_refused)
        self._control_view: ControlView | None = None
        self._options: dict[str, Any] = {}
        self._grace: float | None = None
        self._orphans = Orphans()
        self._control = Client(self._clients, control, self)
        self._sweep: Iterator[None] | None = None
        self._clients.admit(Client(self._clients, segments, self), 0)
        self._introduced = IntroducedClients(self._clients)
        self._event_loop.add(kernel, lambda: self._leave(0.0))
        self._children_changed, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._event_loop.add(self._children_changed, self._on_children)

    # the loop ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the kernel sends STOP or has exited; leave no child behind."""
        try:
            while self._grace is None:
                self._clients.work(block=self._sweep is None)
                if self._sweep is not None and next(self._sweep, True):
                    self._sweep = None
        finally:
            self._introduced.end_all()
            children.end_all(self._grace or 0.0)
            self._receive_last_names()
            self._clients.server.close()
            remove_leftovers(self._options, self._kernel)

    def _receive_last_names(self) -> None:
        """Read which names dead ranks had still announced: the server removes all that it knows of."""
        for number, client in self._clients.by_number.items():
            with suppress(ProtocolError):
                while client.socket.fileno() >= 0 and isinstance(frame := take(client.socket), Frame):
                    for item in self._clients.server.receive(number, frame):
                        item.close()

    def _leave(self, grace: float) -> None:
        self._grace = grace
        self._template.close()

    # the kernel -------------------------------------------------------------------------------------

    def _on_control(self, frame: Frame) -> None:
        if frame.kind is Kind.HELLO:
            self._options = json.loads(frame.payload)
            mark_children(os.getppid())
            if self._options["start_method"] == "forkserver":
                self._start_template()
            self._control.outbox.send(Kind.HELLO, json.dumps({"pid": os.getpid()}).encode())
            self._sweep = sweep_and_notify(partial(self._control.outbox.send, Kind.SWEPT))
        elif frame.kind is Kind.SPAWN:
            self._spawn(frame)
        elif frame.kind is Kind.EPOCH:
            if self._control_view is not None:
                self._control_view.close()
            self._control_view = ControlView(frame.fds[0])
        elif frame.kind is Kind.KILL:
            rank = self._ranks.get(json.loads(frame.payload)["client"])
            if rank is not None:
                rank.kill()
        elif frame.kind is Kind.LEDGER:
            report = pack_report(self._clients.server.rows(), self._introduced.rows())
            # the question ends after a second
            with suppress(SharedMemoryFullError, FileDescriptorLimitError):
                self._control.outbox.send(Kind.LEDGER, report, sequence=frame.sequence)
        elif frame.kind is Kind.STOP:
            self._leave(LEAVE_SECONDS)

    # ranks ------------------------------------------------------------------------------------------

    def _start_template(self) -> None:
        try:
            self._template.start(self._options["template"])
        except OSError as error:
            self._report_template(None, error.errno or 0)

    def _spawn(self, frame: Frame) -> None:
        """Start a rank; what the system refuses is the end of that rank, not of the supervisor."""
        fields = json.loads(frame.payload)
        number = fields["client"]
        try:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self._report_death(number, refused=error.errno or 0)
            return
        rank = self._ranks[number] = RankProcess(self._clients, mine, self)
        rank.rank, rank.inode = fields["rank"], os.fstat(theirs.fileno()).st_ino
        self._clients.admit(rank, number)
        with theirs:
            try:
                self._start_rank(rank, [*frame.fds, theirs.fileno()])
            except OSError as error:
                self._on_refused(number, error.errno or 0)

    def _start_rank(self, rank: RankProcess, fds: list[int]) -> None:
        channel, stdout, stderr, segments = fds
        if self._options["start_method"] == "spawn":
            words = [*self._options["engine"], *map(str, (channel, segments, rank.number, os.getpid()))]
            pid = children.start(words, [channel, segments], stdout=stdout, stderr=stderr)
            self._set_pid(rank.number, pid)
            return
        if self._template.client is None:
            self._template.start(self._options["template"])
        rank.template = self._template.pid
        self._template.fork(rank.rank, rank.number, fds)

    def _on_refused(self, client: int, number: int) -> None:
        """Report a rank whose process could not be made; `number` is the system's error."""
        if (rank := self._ranks.get(client)) is not None and not rank.pid:
            rank.refused = number
            self._on_rank_exit(rank, None)

    def _set_pid(self, client: int, pid: int) -> None:
        if (rank := self._ranks.get(client)) is None:
            return
        rank.pid = pid
        self._orphans.forget_pid(pid)
        if pid in self._unnamed_exits:
            self._on_rank_exit(rank, self._unnamed_exits.pop(pid))
        elif rank.doomed:
            rank.kill()

    def received(self, client: Client, frame: Frame) -> None:
        """Act on a frame of the kernel or a rank."""
        if client is self._control:
            self._on_control(frame)
        elif frame.kind is Kind.ANNOUNCE:
            self._on_announce(client.number, frame)
        elif frame.kind in KINDS:
            self._introduced.received(client, frame)
        else:
            self._clients.pass_on(client, frame)

    def _on_announce(self, client: int, frame: Frame) -> None:
        rank, pid = self._ranks.get(client), Announce.unpack(frame.payload).pid
        if rank is None or rank.announced:
            raise ProtocolError("a second ANNOUNCE frame on one connection")
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise ProtocolError(f"an ANNOUNCE frame of process {pid}: {error.strerror}") from error
        try:
            # only a child of ours: waitid says ECHILD for any other
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            rank.pid, rank.announced = pid, True
            if rank.doomed:
                rank.kill()
            self._orphans.forget_pid(pid)
            fields = {"rank": rank.rank, "client": client, "pid": pid, "template": self._template.pid}
            self._control.outbox.send(Kind.READY, json.dumps(fields).encode(), [pidfd])
            self._event_loop.once(pidfd, self._on_children)  # a debugger that detaches may lose a SIGCHLD
            rank.pidfd, pidfd = pidfd, -1
        except ChildProcessError:
            raise ProtocolError(f"process {pid} is no child of the supervisor") from None
        finally:
            self._event_loop.close(pidfd)

    def disconnected(self, client: Client, error: Exception | None) -> None:
        """Act on the end of a rank's socket: as a rule it has died, which waitid is about to report.

        A living one is killed: it could neither share memory nor report what it uses.  So is one that broke
        the protocol; the others go on.  If the template died before it could name the process, nothing else
        will come.
        """
        if not isinstance(client, RankProcess):
            if error is None:  # the kernel has ended, whose pidfd may be a moment late
                self._leave(0.0)
            return
        if error is not None:
            client.protocol_error = client.protocol_error or str(error)
        self._clients.forget(client)
        if self._template.is_lost(client.template) and not client.pid and not client.dead:
            self._on_rank_exit(client, None)
        elif client.pid and not client.dead:
            client.closed_socket = not (client.protocol_error or children.is_exiting(client.pid))
            os.kill(client.pid, signal.SIGKILL)  # its exit status, if it has one already, stays what it is

    # deaths -----------------------------------------------------------------------------------------

    def _on_children(self) -> None:
        try:
            os.read(self._children_changed, 4096)
        except BlockingIOError:
            pass
        sessions = {rank.pid for rank in self._ranks.values() if rank.pid}
        for pid, code in children.reap(sessions):
            if pid == self._template.pid:
                self._on_template_exit(code)
                continue
            for rank in list(self._ranks.values()):
                if rank.pid == pid:
                    self._on_rank_exit(rank, code)
                    break
            else:  # a rank that the template has not named yet, or an adopted process
                self._unnamed_exits[pid] = code
                while len(self._unnamed_exits) > MOST_UNNAMED_EXITS:
                    del self._unnamed_exits[next(iter(self._unnamed_exits))]
        self._orphans.end({self._template.pid, *(rank.pid for rank in self._ranks.values())})

    def _on_template_exit(self, code: int) -> None:
        self._template.exited()
        if not self._template.ready:
            self._report_template(code)
            return
        for rank in list(self._ranks.values()):
            if not rank.pid and rank.socket.fileno() < 0:
                self._on_rank_exit(rank, None)

    def _report_template(self, code: int | None, refused: int = 0) -> None:
        fields = {"code": code, "refused": refused}
        self._control.outbox.send(Kind.START_FAILED, json.dumps(fields).encode())

    def _on_rank_exit(self, rank: RankProcess, code: int | None) -> None:
        """Record a rank's death everywhere; None: the template died before it could name the process."""
        rank.dead = True
        self._event_loop.close(rank.pidfd)
        rank.pidfd = -1
        self._orphans.rank_died(self._options["session"], rank.number, rank.pid, rank.inode)
        self._clients.drain(rank)  # what it registered before it died counts
        self._ranks.pop(rank.number, None)
        if self._control_view is not None and rank.rank < self._control_view.world_size:
            self._control_view.write_death(rank.rank, code)
        self._clients.end(rank)
        self._introduced.end_with(rank.number)
        why = {"protocol_error": rank.protocol_error, "closed_socket": rank.closed_socket}
        self._report_death(rank.number, code, pid=rank.pid, refused=rank.refused, **why)

    def _report_death(self, client: int, code: int | None = None, **more: object) -> None:
        """Notify the kernel of the end of a rank, which may never have been a process."""
        fields = {
            "client": client, "code": code,
            "pid": 0, "refused": 0, "protocol_error": "", "closed_socket": False, **more,
        }  # fmt: skip
        self._control.outbox.send(Kind.DIED, json.dumps(fields).encode())


def main(control: int, segments: int, kernel: int, log: int) -> None:
    """Run a supervisor over inherited descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops one that came before it had its own session
    children.become_supervisor(control, segments, kernel, log)
    adopt_orphans()
    children.use_batch_scheduling()
    Supervisor(socket.socket(fileno=control), socket.socket(fileno=segments), kernel, log).run()


if __name__ == "__main__":  # pragma: no cover  (the kernel starts it by `-c`)
    main(*(int(word) for word in sys.argv[1:5]))
