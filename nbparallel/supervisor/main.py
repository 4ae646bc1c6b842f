"""The supervisor's loop.

Started by the kernel as ``python -I -S -E``: standard library only, one thread, a session of its own, a
subreaper.  It starts the template and the ranks, watches the kernel and all of them, reaps them, says who
died of what, keeps the ledger of segments and hands out descriptors.  It never unpickles and never waits
for anybody but in `poll`.

::

    kernel ──control──┐                        control   HELLO SPAWN EPOCH STOP LEDGER -> <- READY DIED …
           ──segments─┤                        segments  REGISTER FETCH RELEASE … (the kernel is client 0)
                      supervisor ──template──  FORK -> <- TEMPLATE_READY FORKED
    rank r ──segments─┘                        ANNOUNCE -> , then as the kernel's

Who dies takes the others along as DESIGN says: the kernel's end (seen by pidfd, not by end-of-file, which a
forked child of the kernel could hide) ends everything here; ranks end with us by their parent-death signal.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

from nbparallel.errors import ProtocolError
from nbparallel.supervisor import children
from nbparallel.supervisor.children import RankProcess, adopt_orphans, reset_signals
from nbparallel.supervisor.event_loop import SupervisorEventLoop, readable, take, take_or_end
from nbparallel.supervisor.ledger.segment_server import Reply, SegmentServer
from nbparallel.supervisor.orphans import Orphans, mark_children
from nbparallel.supervisor.sweep import BackgroundSweep
from nbparallel.wire.control import ControlView
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.identity import unpack_pid

LEAVE_SECONDS = 0.5
"""How long ranks that were told to leave may take before they are killed."""
FRAMES_QUEUED = 1000
"""More than a socket's buffer holds (some 280 of the smallest)."""
UNKNOWN_DEATHS = 1000
"""Exit statuses kept for pids that the template has not named yet."""


class Supervisor:
    """Owns every child, the ledger and the sockets to all of them."""

    def __init__(self, control: socket.socket, segments: socket.socket, kernel: int, log: int) -> None:
        self._kernel, self._log = kernel, log
        self._watch = SupervisorEventLoop()
        self._ranks: dict[int, RankProcess] = {}
        self._unknown: dict[int, children.ChildExit] = {}
        self._template_pid = 0
        self._template: socket.socket | None = None
        self._template_ready = False
        self._control_view: ControlView | None = None
        self._options: dict[str, Any] = {}
        self._grace: float | None = None
        self._orphans = Orphans()
        self._server = SegmentServer()
        self._control = control
        self._control_box = self._watch.add_socket(control, self._on_control)
        self._sweeping = BackgroundSweep(lambda said: self._control_box.send(Kind.SWEPT, said))
        self._segment_boxes = {0: self._watch.add_socket(segments, lambda: self._on_segments(0))}
        self._segment_sockets = {0: segments}
        self._server.client_joined(0)
        self._watch.add(kernel, lambda: self._leave(0.0))
        self._children_changed, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._watch.add(self._children_changed, self._on_children)

    # the loop ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the kernel stops us or is gone; leave no child behind."""
        try:
            while self._grace is None:
                self._watch.wait(block=not (self._sweeping.pending or self._server.unsettled))
                self._settle()
                self._sweeping.step()
        finally:
            children.end_all(self._grace or 0.0)
            self._hear_last_words()
            self._server.close()

    def _hear_last_words(self) -> None:
        """Learn which names the dead had still announced: the desk removes what it knows."""
        for client, sock in self._segment_sockets.items():
            while sock.fileno() >= 0 and isinstance(frame := take_or_end(sock), Frame):
                try:
                    for item in self._server.receive(client, frame):
                        item.close()
                except ProtocolError:
                    break
                finally:
                    frame.close()

    def _leave(self, grace: float) -> None:
        self._grace = grace
        if self._template is not None:  # the end of its socket is the template's sign to go
            self._watch.forget(self._template)
            self._template = None

    # the kernel -------------------------------------------------------------------------------------

    def _on_control(self) -> None:
        frame = take(self._control)
        if frame is False:
            return
        if frame is None:  # the kernel closed its end; its pidfd may be a moment late
            self._leave(0.0)
            return
        assert isinstance(frame, Frame)
        try:
            if frame.kind is Kind.HELLO:
                self._options = json.loads(frame.payload)
                mark_children(os.getppid())
                if self._options["start_method"] == "forkserver":
                    self._start_template()
                self._control_box.send(Kind.HELLO, json.dumps({"pid": os.getpid()}).encode())
                self._sweeping.begin()
            elif frame.kind is Kind.SPAWN:
                self._spawn(frame)
            elif frame.kind is Kind.EPOCH:
                if self._control_view is not None:
                    self._control_view.close()
                self._control_view = ControlView(frame.fds[0])
            elif frame.kind is Kind.KILL:
                rank = self._ranks.get(json.loads(frame.payload)["client"])
                if rank is not None and rank.pid:
                    os.kill(rank.pid, signal.SIGKILL)
            elif frame.kind is Kind.LEDGER:
                for page in self._server.report():
                    self._control_box.send(Kind.LEDGER, page, sequence=frame.sequence)
            elif frame.kind is Kind.STOP:
                self._leave(LEAVE_SECONDS)
        finally:
            frame.close()

    # the template -----------------------------------------------------------------------------------

    def _start_template(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [*self._options["template"], str(theirs.fileno()), str(os.getpid())]
        self._template_pid = children.start(
            argv, [theirs.fileno()], stdout=self._log, stderr=self._log, new_session=True
        )
        theirs.close()
        self._template, self._template_ready = mine, False
        self._template_box = self._watch.add_socket(mine, self._on_template)

    def _on_template(self) -> None:
        assert self._template is not None
        frame = take(self._template)
        if frame is False:
            return
        if frame is None:
            self._watch.forget(self._template)
            self._template = None
            return
        assert isinstance(frame, Frame)
        try:
            if frame.kind is Kind.TEMPLATE_READY:
                self._template_ready = True
            elif frame.kind is Kind.FORKED:
                said = json.loads(frame.payload)
                self._set_pid(said["client"], said["pid"])
        finally:
            frame.close()

    # ranks ------------------------------------------------------------------------------------------

    def _spawn(self, frame: Frame) -> None:
        said = json.loads(frame.payload)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client = said["client"]
        rank = RankProcess(
            said["rank"], client, mine, self._watch.add_socket(mine, lambda: self._on_segments(client))
        )
        self._ranks[client] = rank
        rank.inode = os.fstat(theirs.fileno()).st_ino
        self._segment_sockets[client], self._segment_boxes[client] = mine, rank.outbox
        self._server.client_joined(client)
        channel, stdout, stderr = frame.fds
        with theirs:
            if self._options["start_method"] == "spawn":
                argv = [*self._options["engine"], *map(str, (channel, theirs.fileno(), client, os.getpid()))]
                pid = children.start(
                    argv, [channel, theirs.fileno()], stdout=stdout, stderr=stderr, new_session=True
                )
                self._set_pid(client, pid)
                return
            if self._template is None:
                self._start_template()
            assert self._template is not None
            rank.template = self._template_pid
            self._template_box.send(
                Kind.FORK,
                json.dumps({"rank": said["rank"], "client": client}).encode(),
                [channel, stdout, stderr, theirs.fileno()],
            )

    def _set_pid(self, client: int, pid: int) -> None:
        if (rank := self._ranks.get(client)) is None:
            return
        rank.pid = pid
        self._orphans.rank_lives(pid)
        death = self._unknown.pop(pid, None)
        if death is not None:
            self._bury(rank, death)

    def _on_segments(self, client: int) -> bool:
        """Act on a client's next frame; return False if it could not be read now."""
        sock = self._segment_sockets.get(client)
        if sock is None or sock.fileno() < 0:
            return True
        try:
            frame = take(sock)
            if frame is False:
                return False
            if frame is None:
                self._lost_socket(client)
                return True
            assert isinstance(frame, Frame)
            try:
                if frame.kind is Kind.ANNOUNCE:
                    self._on_announce(client, frame)
                else:
                    self._watch.linger = frame.kind is Kind.HOLD
                    self._deliver(self._server.receive(client, frame))
            finally:
                frame.close()
        except ProtocolError as error:
            # a rank that talks nonsense is ended; the others go on (FAULTS F83)
            os.write(self._log, f"client {client} broke the protocol: {error}\n".encode())
            rank = self._ranks.get(client)
            if rank is not None:
                rank.nonsense = rank.nonsense or str(error)
                self._lost_socket(client)
        return True

    def _deliver(self, outgoing: list[Reply]) -> None:
        for item in outgoing:
            box = self._segment_boxes.get(item.client)
            try:
                if box is not None:
                    box.send(item.kind, item.payload, item.fds, sequence=item.sequence)
            finally:
                item.close()

    def _settle(self) -> None:
        """Decide what depends on who says what, after everybody has been heard.

        Who learnt of a segment did so after its REGISTER was sent, and who let go of one after the HOLD of
        whoever got it: one pass over all sockets settles it.  What comes up in the pass is the next one's.
        """
        if not self._server.unsettled:
            return
        turn = self._server.mark()
        waiting = readable(*(sock for sock in self._segment_sockets.values() if sock.fileno() >= 0))
        for client, heard in list(self._segment_sockets.items()):
            for _ in range(FRAMES_QUEUED if heard.fileno() in waiting else 0):
                sock = self._segment_sockets.get(client)
                if sock is None or not readable(sock):
                    break
                if not self._on_segments(client):
                    return  # the system has no memory for a message: another time
        self._deliver(self._server.settle(turn))

    def _on_announce(self, client: int, frame: Frame) -> None:
        rank, pid = self._ranks.get(client), unpack_pid(frame.payload)
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
            self._orphans.rank_lives(pid)
            said = {"rank": rank.rank, "client": client, "pid": pid, "template": self._template_pid}
            self._control_box.send(Kind.READY, json.dumps(said).encode(), [pidfd])
            self._watch.once(pidfd, self._on_children)  # a debugger that lets go of us may lose a SIGCHLD
            rank.pidfd, pidfd = pidfd, -1
        except ChildProcessError:
            raise ProtocolError(f"process {pid} is no child of the supervisor") from None
        finally:
            self._watch.close(pidfd)

    def _lost_socket(self, client: int) -> None:
        """End of file from a rank: as a rule it has died, which waitid is about to tell.

        One that lives is ended: it could neither share memory nor say what it uses.  If the template died
        before it could name the process nothing else will come.
        """
        if (rank := self._ranks.get(client)) is None:  # client 0: without it the session's memory is nobody's
            self._leave(0.0)
            return
        self._watch.forget(rank.socket)
        self._segment_sockets.pop(client, None)
        self._segment_boxes.pop(client, None)
        # one that never was ready is a failed start, told as such
        orphaned = self._template_ready if self._template is None else rank.template != self._template_pid
        if orphaned and not rank.pid and not rank.dead:
            self._bury(rank, None)
        elif rank.pid and not rank.dead:
            os.kill(rank.pid, signal.SIGKILL)  # its exit status, if it has one already, stays what it is

    # deaths -----------------------------------------------------------------------------------------

    def _on_children(self) -> None:
        try:
            os.read(self._children_changed, 4096)
        except BlockingIOError:
            pass
        sessions = {rank.pid for rank in self._ranks.values() if rank.pid}
        for death in children.reap(sessions):
            if death.pid == self._template_pid:
                self._template_died(death)
                continue
            for rank in list(self._ranks.values()):
                if rank.pid == death.pid:
                    self._bury(rank, death)
                    break
            else:  # a rank that the template has not named yet, or an adopted stranger
                self._unknown[death.pid] = death
                while len(self._unknown) > UNKNOWN_DEATHS:
                    del self._unknown[next(iter(self._unknown))]
        self._orphans.end({self._template_pid, *(rank.pid for rank in self._ranks.values())})

    def _template_died(self, death: children.ChildExit) -> None:
        self._template_pid = 0
        if self._template is not None:
            while isinstance(frame := take(self._template), Frame):
                if frame.kind is Kind.FORKED:
                    said = json.loads(frame.payload)
                    self._set_pid(said["client"], said["pid"])
                elif frame.kind is Kind.TEMPLATE_READY:
                    self._template_ready = True
                frame.close()
            self._watch.forget(self._template)
            self._template = None
        if not self._template_ready:
            said = {"exit_code": death.exit_code, "signal": death.signal_number}
            self._control_box.send(Kind.START_FAILED, json.dumps(said).encode())
            return
        for rank in list(self._ranks.values()):
            if not rank.pid and rank.socket.fileno() < 0:
                self._bury(rank, None)

    def _bury(self, rank: RankProcess, death: children.ChildExit | None) -> None:
        rank.dead = True
        self._watch.close(rank.give_pidfd())
        self._orphans.rank_died(self._options["session"], rank.client, rank.pid, rank.inode)
        while rank.socket.fileno() >= 0 and readable(rank.socket):
            self._on_segments(rank.client)  # what it registered before it died counts
        self._ranks.pop(rank.client, None)
        if self._control_view is not None and rank.rank < self._control_view.world_size:
            self._control_view.write_death(
                rank.rank,
                exit_code=death.exit_code if death else None,
                signal=death.signal_number if death else None,
            )
        self._deliver(self._server.client_gone(rank.client))
        self._watch.forget(rank.socket)
        self._segment_sockets.pop(rank.client, None)
        self._segment_boxes.pop(rank.client, None)
        said = {
            "rank": rank.rank,
            "client": rank.client,
            "pid": rank.pid,
            "announced": rank.announced,
            "exit_code": death.exit_code if death else None,
            "signal": death.signal_number if death else None,
            "nonsense": rank.nonsense,
        }
        self._control_box.send(Kind.DIED, json.dumps(said).encode())


def main(control: int, segments: int, kernel: int, log: int) -> None:
    """Run a supervisor over inherited descriptors."""
    reset_signals()
    adopt_orphans()
    children.raise_file_limit()
    children.use_batch_scheduling()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for fd in (control, segments, kernel, log):
        os.set_inheritable(fd, False)
    Supervisor(socket.socket(fileno=control), socket.socket(fileno=segments), kernel, log).run()


if __name__ == "__main__":  # pragma: no cover  (the kernel starts it by `-c`)
    main(*(int(word) for word in sys.argv[1:5]))
