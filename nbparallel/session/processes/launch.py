"""Launch of the supervisor, which can begin before anything else is imported here.

The template's imports take as long as the notebook's.  Started first, both run in parallel on two cores; so
this module and its imports stay small (a test checks).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from functools import partial

from nbparallel.channel import Channel
from nbparallel.errors import ChannelClosedError
from nbparallel.session.processes import process_context
from nbparallel.session.processes.process_context import process_attributes
from nbparallel.session.processes.refusals import as_start_error
from nbparallel.wire.frames import Kind
from nbparallel.wire.system import do_all, ready, without_debugger


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
"""Bound for the exit of a supervisor that no session uses; then it is killed."""


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

    session: str
    seed: int
    log: int
    control: Channel
    segments: Channel
    popen: subprocess.Popen[bytes]

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
            with as_start_error("a process for the supervisor"), _interrupts_blocked(), without_debugger():
                self.popen = subprocess.Popen(
                    [*process_context.supervisor_argv(), *map(str, inherited)],
                    stdin=subprocess.DEVNULL,
                    stdout=self.log,
                    stderr=self.log,
                    pass_fds=inherited,
                    start_new_session=True,  # out of the kernel's process group, which Jupyter signals
                    cwd="/",
                    env=process_context.environment(self.session, self.seed & 0xFFFF_FFFF),
                )
            ours.pop_all()
        hello = {
            "pid": self._pid,
            "session": self.session,
            "start_method": start_method,
            "template": process_context.template_argv(),
            "engine": process_context.engine_argv(),
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
        do_all(self._close, self._await_end)

    def _await_end(self) -> None:
        if not self._ended(EXIT_SECONDS):
            self.popen.kill()
        self.popen.wait()

    def _ended(self, seconds: float) -> bool:
        """Wait for the supervisor's end; `Popen.wait` with a time-out sleeps longer and longer."""
        if self.popen.poll() is not None:
            return True
        try:
            pidfd = os.pidfd_open(self.popen.pid)
        except OSError:  # there is no descriptor left
            return False
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(ready(poll, seconds * 1000))
        finally:
            os.close(pidfd)

    def _close(self) -> None:
        do_all(self.control.close, self.segments.close, partial(os.close, self.log))


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT here and in a process that is started: it could end that before it has its own session."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _channel(ours: contextlib.ExitStack, given: contextlib.ExitStack) -> tuple[Channel, socket.socket]:
    """Return both ends of a socketpair, which the stacks close."""
    with as_start_error("a pair of sockets"):
        mine, theirs = Channel.pair()
    ours.callback(mine.close)
    given.callback(theirs.close)
    return Channel(mine), theirs
