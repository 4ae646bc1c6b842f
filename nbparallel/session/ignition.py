"""Ignition: a supervisor that is started before anything else is imported here.

The template's imports take as long as ours.  Started first, both run side by side on two cores; so this
module and what it imports stay small (a test looks).
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import subprocess
from collections.abc import Callable

from nbparallel.channel import Channel
from nbparallel.errors import StartError
from nbparallel.session import boot
from nbparallel.wire.frames import Kind

GO_SECONDS = 2.0
"""How long a supervisor that nobody took may take to end."""


class Ignition:
    """A supervisor's process on its way, with the kernel's ends of its sockets.

    Owns all of it until a `SupervisorProcess` takes it over; otherwise call `put_out`.

    Attributes
    ----------
    session : str
        Id of the session, 56 random bits.
    seed : int
        Entropy of the session: random streams and hash seed derive from it.
    """

    def __init__(self, start_method: str = "forkserver") -> None:
        self.start_method = start_method
        self.session = secrets.token_hex(7)
        self.seed = secrets.randbits(64)
        # what supervisor and template say before they can say it properly; read when a start fails
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
            given = [control_theirs.fileno(), segments_theirs.fileno(), kernel, self.log]
            self.popen = subprocess.Popen(
                [*boot.supervisor_argv(), *map(str, given)],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=given,
                start_new_session=True,  # Jupyter signals the kernel's process group; this is none of it
                cwd="/",
                env=boot.environment(self.session, self.seed & 0xFFFF_FFFF),
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
            "template": boot.template_argv(),
            "engine": boot.engine_argv(),
        }
        self.control.send(Kind.HELLO, json.dumps(hello).encode(), abandon=lambda: True)

    def put_out(self) -> None:
        """End the supervisor that nobody took."""
        self._close()  # the end of its control socket is its sign to go, with all it has started
        try:
            self.popen.wait(GO_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    def _close(self) -> None:
        self.control.close()
        self.segments.close()
        os.close(self.log)


def _needed(call: str, make: Callable[[], int]) -> int:
    """Return what a system call gives without which there are no ranks, or say so."""
    try:
        return make()
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        raise StartError(
            f"ranks cannot be started: {call} does not work here ({error}). It needs Linux 5.3 or newer, and "
            "a container whose seccomp profile allows it (Docker's does since 20.10)"
        ) from error
