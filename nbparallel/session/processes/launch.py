"""Launch of the supervisor, which can begin before anything else is imported here.

The template's imports take as long as the notebook's.  Started first, both run in parallel on two cores; so
this module and its imports stay small (a test checks).
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import subprocess
from collections.abc import Callable

from nbparallel.channel import Channel
from nbparallel.errors import StartError
from nbparallel.session.processes import process_context
from nbparallel.session.processes.process_context import process_attributes
from nbparallel.wire.frames import Kind
from nbparallel.wire.system import ready

EXIT_SECONDS = 2.0
"""Bound for the exit of a supervisor that no session uses; then it is killed."""


class SupervisorLaunch:
    """A supervisor's process with the notebook's ends of its sockets.

    Owns all of it until a `SupervisorClient` takes it over; otherwise call `terminate`.

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

    def __init__(self, start_method: str = "forkserver") -> None:
        self.start_method = start_method
        self.session = secrets.token_hex(7)
        self.seed = secrets.randbits(64)
        self.waited = False
        self._pid = os.getpid()
        # output of supervisor and template, for the error message of a failed start
        self.log = _needed("memfd_create", lambda: os.memfd_create("nbp-log", os.MFD_CLOEXEC))
        try:
            kernel = _needed("pidfd_open", lambda: os.pidfd_open(os.getpid()))
        except BaseException:
            os.close(self.log)
            raise
        control, control_theirs = Channel.pair()
        segments, segments_theirs = Channel.pair()
        self.control, self.segments = Channel(control), Channel(segments)
        try:
            self._process_attributes = process_attributes()
            given = [control_theirs.fileno(), segments_theirs.fileno(), kernel, self.log]
            self.popen = subprocess.Popen(
                [*process_context.supervisor_argv(), *map(str, given)],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=given,
                start_new_session=True,  # out of the kernel's process group, which Jupyter signals
                cwd="/",
                env=process_context.environment(self.session, self.seed & 0xFFFF_FFFF),
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(kernel)
            control_theirs.close()
            segments_theirs.close()
        hello = {
            "session": self.session,
            "start_method": start_method,
            "template": process_context.template_argv(),
            "engine": process_context.engine_argv(),
        }
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
        self._close()
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
        self.control.close()
        self.segments.close()
        os.close(self.log)


def _needed(call: str, make: Callable[[], int]) -> int:
    """Return the descriptor that a required system call makes; StartError if the system lacks the call."""
    try:
        return make()
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        raise StartError(
            f"ranks cannot be started: {call} does not work here ({error}). It needs Linux 5.3 or newer, and "
            "a container whose seccomp profile allows it (Docker's does since 20.10)"
        ) from error
