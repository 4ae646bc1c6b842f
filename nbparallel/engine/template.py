"""The template: one process with every import done and the shell made, from which ranks are forked.

A rank is forked twice (through a short-lived intermediate), so that it becomes a child of the supervisor,
which is a subreaper.  The rank waits on the intermediate's pidfd: when that fires it *has* been adopted,
and only then does it arm its parent-death signal.  The template has one thread and lets BLAS have one
(``OPENBLAS_NUM_THREADS=1`` at import), because a fork copies no other thread.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import sys
from typing import NoReturn

from nbparallel.channel import Channel
from nbparallel.errors import ChannelClosedError
from nbparallel.supervisor.children import die_with_parent
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.system import is_ready

ADOPTION_SECONDS = 30.0
"""A generous bound for an intermediate that only has to exit."""


def main(fd: int, supervisor: int) -> NoReturn:
    """Serve FORK frames until the supervisor is gone."""
    channel = Channel.from_fd(fd)
    os.set_inheritable(fd, False)
    gc.disable()  # hardly anything is garbage yet; a collection takes 10 of 200 ms
    from nbparallel.engine.main import prepare  # numpy, IPython, cloudpickle: what every rank needs

    prepare()
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page of these objects
    gc.enable()
    channel.send(Kind.TEMPLATE_READY)
    with contextlib.suppress(ChannelClosedError):
        while True:
            select.select([channel], [], [])  # no time-out: the template exits when the supervisor exits
            frame = channel.receive_nowait()
            if frame is not None:
                _fork_rank(channel, frame, supervisor)
    sys.stderr.flush()
    os._exit(0)


def _fork_rank(channel: Channel, frame: Frame, supervisor: int) -> None:
    """Fork a rank and name its process to the supervisor, or the error with which the system refused it."""
    request = json.loads(frame.payload)
    try:
        number = _fork_twice(channel, frame, request["client"], supervisor)
        refused = max(0, -number)
    except OSError as error:
        number, refused = 0, error.errno or errno.EAGAIN
    finally:
        frame.close()
    channel.send(Kind.FORKED, json.dumps({**request, "pid": max(0, number), "errno": refused}).encode())


def _fork_twice(channel: Channel, frame: Frame, client: int, supervisor: int) -> int:
    """Return the rank's pid; 0 if the intermediate was killed, or the negative `errno` of its fork."""
    with contextlib.ExitStack() as ends:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        ends.callback(os.close, read_end)
        try:
            intermediate = os.fork()
            if not intermediate:
                _intermediate(channel, frame, client, supervisor, read_end, write_end)
        finally:
            os.close(write_end)
        number = int(os.read(read_end, 32) or b"0")  # ends when the intermediate has
        os.waitpid(intermediate, 0)
        return number


def _intermediate(
    channel: Channel, frame: Frame, client: int, supervisor: int, read_end: int, write_end: int
) -> NoReturn:
    try:
        try:
            me = os.pidfd_open(os.getpid())
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        if pid:
            os.write(write_end, str(pid).encode())
            os._exit(0)
        os.close(read_end)
        os.close(write_end)
        channel.close()
        if not is_ready(me, ADOPTION_SECONDS):
            os._exit(1)
        os.close(me)
        die_with_parent(supervisor)
        os.setpgid(0, 0)  # no session of its own: see `supervisor.children.start`
        from nbparallel.engine.main import serve

        serve(*frame.fds, client=client)
    finally:
        os._exit(1)
