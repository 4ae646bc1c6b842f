"""The template process, from which ranks are forked, as the supervisor handles it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence

from nbparallel.supervisor import children
from nbparallel.supervisor.event_loop import Outbox, SupervisorEventLoop, take
from nbparallel.wire.frames import Frame, Kind


class TemplateProcess:
    """One template after the other.

    Parameters
    ----------
    event_loop : SupervisorEventLoop
        Watches the template's socket.
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
        event_loop: SupervisorEventLoop,
        log: int,
        on_fork: Callable[[int, int], None],
        on_refused: Callable[[int, int], None],
    ) -> None:
        self._event_loop, self._log = event_loop, log
        self._on_fork, self._on_refused = on_fork, on_refused
        self._socket: socket.socket | None = None
        self._outbox: Outbox | None = None
        self.pid = 0
        self.ready = False

    @property
    def connected(self) -> bool:
        """Whether it takes requests."""
        return self._socket is not None

    def start(self, argv: Sequence[str]) -> None:
        """Start one; `OSError` if the system refuses it."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self.pid = children.start(
                    [*argv, str(theirs.fileno()), str(os.getpid())],
                    [theirs.fileno()],
                    stdout=self._log,
                    stderr=self._log,
                    new_group=True,
                )
            except OSError:
                mine.close()
                raise
        self._socket, self.ready = mine, False
        self._outbox = self._event_loop.add_socket(mine, self._on_frame)

    def fork(self, rank: int, client: int, fds: Sequence[int]) -> None:
        """Request a rank, which gets the descriptors `fds`."""
        assert self._outbox is not None, "the caller has started one"
        self._outbox.send(Kind.FORK, json.dumps({"rank": rank, "client": client}).encode(), fds)

    def is_lost(self, pid: int) -> bool:
        """Whether template `pid`, which was to fork a rank, cannot do it any more.

        One that never was ready is a failed start, which is reported as such.
        """
        return self.pid != pid if self.connected else self.ready

    def close(self) -> None:
        """Disconnect: at the end of its socket the template exits."""
        if self._socket is not None:
            self._event_loop.forget(self._socket)
            self._socket = self._outbox = None

    def exited(self) -> None:
        """Read what it had still sent, after it has died."""
        self.pid = 0
        while self._socket is not None and isinstance(frame := take(self._socket), Frame):
            self._handle(frame)
        self.close()

    def _on_frame(self) -> None:
        assert self._socket is not None
        frame = take(self._socket)
        if frame is None:
            self.close()
        elif isinstance(frame, Frame):
            self._handle(frame)

    def _handle(self, frame: Frame) -> None:
        try:
            if frame.kind is Kind.TEMPLATE_READY:
                self.ready = True
            elif frame.kind is Kind.FORKED:
                fields = json.loads(frame.payload)
                if fields["pid"]:
                    self._on_fork(fields["client"], fields["pid"])
                else:
                    self._on_refused(fields["client"], fields["errno"])
        finally:
            frame.close()
