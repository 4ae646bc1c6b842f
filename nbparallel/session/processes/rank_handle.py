"""RankHandle: the notebook's end of one rank: its socket, its pipes and its pidfd."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import os
import pickle
import re
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from nbparallel.channel import Channel
from nbparallel.errors import ChannelClosedError, ProtocolError
from nbparallel.session.names.notebook_settings import current_settings
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.launch import as_start_error
from nbparallel.wire import identity
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.inspection import Completions, NamespaceReport
from nbparallel.wire.messages import (
    CELL_FILE,
    Display,
    InputRequest,
    ObservedPart,
    Outcome,
    RankMemory,
    Stream,
    WorkingContext,
)
from nbparallel.wire.system import do_all, ready, signal_of

# How a rank's process ended, and how a message describes it.


@dataclass(frozen=True, slots=True)
class RankDeath:
    """The end of a rank's process, and what is known of the cause."""

    pid: int
    """Its process id, 0 if it never had one."""
    code: int | None
    """Its exit code; negative: the number of the signal that ended it; None: not known."""
    seen: float
    """`time.monotonic` when this process received the notice."""
    refused: int = 0
    """The number of the system's error if the process could not be made (`errno`), else 0."""
    reason: str = ""
    """A known cause, as the end of a sentence that begins with ``was``; or empty."""


_LIKELY_CAUSE = {
    "SIGKILL": "was killed by SIGKILL: by hand, or by the system because memory ran out",
    "SIGSEGV": "crashed (SIGSEGV): C code touched memory that is not its own, or wrote to an array that "
    "ranks may only read (scipy with overwrite_a=True or in scipy.linalg.blas and lapack, torch after "
    "from_numpy, and np.add.at do: copy the array first, or `--share` it)",
    "SIGBUS": "crashed (SIGBUS): the memory behind a mapping is gone (was a mapped file made shorter?)",
    "SIGABRT": "aborted (SIGABRT): C code called abort()",
    "SIGFPE": "crashed (SIGFPE): C code divided by zero",
}


CLOSED_SOCKETS = (
    "ended, because code there closed file descriptors that are not its own (os.close, os.closerange), over "
    "which a rank and the notebook communicate"
)


def describe_death(end: RankDeath) -> str:
    """Return the end of a sentence: ``was killed by SIGKILL …``."""
    if end.reason:
        return f"was {end.reason}"
    if name := signal_of(end.code):
        return _LIKELY_CAUSE.get(name, f"was ended by {name}")
    if end.code is None:
        return "ended; its exit status is unknown"
    return f"ended with exit code {end.code} (os._exit, or C code that calls exit)"


BEGIN = "Fatal Python error"
_FRAME = "  File "
_CELL_FRAME = re.compile(rf'"{CELL_FILE}\d+-\d+>", line (\d+)')


def stderr_excerpt(stderr: str) -> tuple[str, int | None]:
    """Return what is worth showing of a dead rank's stderr, and the cell's line if faulthandler names it.

    Of faulthandler's report that is the user's part of the stack: what called the cell is ours.
    """
    lines = stderr.strip().splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith(BEGIN)), None)
    if begin is None:
        return "\n".join(lines[-10:]), None
    shown = lines[max(0, begin - 5) : begin]
    for line in lines[begin:]:
        found = _CELL_FRAME.search(line) if line.startswith(_FRAME) else None
        shown.append(line if found is None else _CELL_FRAME.sub(r"of the cell, line \1", line))
        if found is not None:
            return "\n".join(shown[:20]), int(found[1])
    return "\n".join(shown[:20]), None


class EventLoop:
    """A poll loop in a daemon thread.

    Notes
    -----
    `watch` and `call_soon` may be called from any thread, the others only from callbacks, which run in the
    loop's thread.  While nothing is due it sleeps without a time-out: an idle session costs no CPU.
    """

    def __init__(self, name: str, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._poll = select.poll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: dict[Callable[[], None], float] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        with as_start_error("an eventfd"):
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.POLLIN)

    def start(self) -> None:
        """Start the thread; `StartError` if the system refuses it."""
        with as_start_error("a thread"):
            self._thread.start()

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `fd` is readable or at its end, instead of an earlier one."""
        self.call_soon(lambda: self._register(fd, callback))

    def _register(self, fd: int, callback: Callable[[], None]) -> None:
        self._callbacks[fd] = callback
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`; only from a callback (idempotent)."""
        if self._callbacks.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def frames(self, channel: Channel) -> Iterator[Frame]:
        """Yield the frames that have come, and close each; a channel at its end is unwatched."""
        while True:
            try:
                frame = channel.receive_nowait()
            except ChannelClosedError:
                self.unwatch(channel.fileno())
                return
            if frame is None:
                return
            with contextlib.closing(frame):
                yield frame

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run `function` in the loop's thread, after the callbacks that are due."""
        self._calls.append(function)
        os.eventfd_write(self._wake, 1)

    def call_at(self, due: float, function: Callable[[], None]) -> None:
        """Run `function` at `due` (`time.monotonic`), or earlier if it was due earlier."""
        self._timers[function] = min(due, self._timers.get(function, due))

    def _run(self) -> None:
        while not self._stopping:
            timeout = None
            if self._timers:
                timeout = max(0.0, (min(self._timers.values()) - time.monotonic()) * 1000)
            for fd, _ in ready(self._poll, timeout):
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                else:
                    callback = self._callbacks.get(fd)
                    if callback is not None:
                        self._guard(callback)
            while self._calls:
                self._guard(self._calls.popleft())
            now = time.monotonic()
            for function in [function for function, due in self._timers.items() if due <= now]:
                del self._timers[function]
                self._guard(function)

    def _guard(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:  # noqa: BLE001  one bad callback must not end the thread: all would hang
            self._on_error(error)

    def stop(self) -> None:
        """End the thread and wait for it."""

        def end() -> None:
            self._stopping = True

        if self._thread.is_alive():
            self.call_soon(end)
            if threading.current_thread() is not self._thread:
                self._thread.join()
        self._stopping = True
        os.close(self._wake)


COALESCE_SECONDS = 0.05
"""Shortest time between two pieces of text: a print loop must not flood the front end."""
READ_BYTES = 1 << 16
"""Capacity of a pipe."""


class RankHandle:
    """Owns the socket, both pipes and the pidfd of one process of a rank.

    Its callbacks run in the event loop's thread; `send`, `signal` and the attributes are for any thread.
    """

    def __init__(
        self,
        rank: int,
        client: int,
        event_loop: EventLoop,
        *,
        post: Callable[[RankHandle, Any], None],
        output_of: Callable[[int], TaskOutput | None],
        on_report: Callable[[int, tuple[int, NamespaceReport | Completions]], None],
        end: Callable[[RankHandle], None],
    ) -> None:
        self.rank = rank
        self.client = client
        self.pid = 0
        self.pidfd = -1
        self.ready = False
        self.death: RankDeath | None = None
        self.ended_because = ""
        """Why the session killed it: the end of a sentence that begins with ``was``."""
        self.refusal = ""
        """Versions that it runs and the notebook does not; empty if all agree."""
        self.protocol_error = ""
        """What it sent that is no message of nbparallel; such a rank is killed."""
        self.task = 0
        """Number of the task that it runs or ran last."""
        self.busy = False
        self.memory = RankMemory()
        """Shared memory that the rank had made when it ended its last task."""
        self.sent_strategy = 0
        """Generation of the choice of sharing strategies that was sent to it; see `registry.generation`."""
        self.sent_context: WorkingContext | None = None
        """Working directory and search path that were sent to it."""
        self._event_loop = event_loop
        self.post = post
        """Called with this and what waits for events is to get."""
        self._output_of = output_of
        self._on_report = on_report
        self._end = end
        with contextlib.ExitStack() as made, as_start_error(f"the sockets and pipes of rank {rank}"):
            mine, theirs = Channel.pair()
            made.callback(mine.close)
            made.callback(theirs.close)
            out_read, out_write = _pipe(made)
            err_read, err_write = _pipe(made)
            made.pop_all()
        self.channel = Channel(mine)
        self.stderr_tail = ""
        self._pipes = {"stdout": out_read, "stderr": err_read}
        self._decoders = {
            name: codecs.getincrementaldecoder("utf-8")("backslashreplace") for name in self._pipes
        }
        self._pending: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._flushed = 0.0
        self.rank_ends: list[int] = [theirs.detach(), out_write, err_write]
        """The rank's ends: socket, stdout, stderr; to be closed with `close_theirs` when they are sent."""
        for name, fd in self._pipes.items():
            os.set_blocking(fd, False)
            event_loop.watch(fd, lambda name=name: self._on_pipe(name))  # type: ignore[misc]
        event_loop.watch(self.channel.fileno(), self._on_socket)

    def close_theirs(self) -> None:
        """Close the rank's ends here."""
        while self.rank_ends:
            os.close(self.rank_ends.pop())

    # the event loop's thread --------------------------------------------------------------------------------

    def _on_pipe(self, name: str) -> None:
        self._on_socket()  # a frame that is there was sent before these bytes were written (engine/output.py)
        self._read(name)

    def _read(self, name: str) -> bool:
        """Take what a pipe holds, at most its capacity; return whether there may be more."""
        if (fd := self._pipes.get(name)) is None:
            return False
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if text := self._decoders[name].decode(data, not data):
            self._take(name, text)
        if not data:
            self._close_pipe(name)
        return bool(data)

    def _take(self, name: str, text: str) -> None:
        if name == "stderr":
            self.stderr_tail = (self.stderr_tail + text)[-4000:]
        other = "stderr" if name == "stdout" else "stdout"
        if self._pending[other]:
            self.flush()  # keeps the order of both streams
        self._pending[name].append(text)
        now = time.monotonic()
        if now - self._flushed >= COALESCE_SECONDS:
            self.flush()
        else:
            self._event_loop.call_at(self._flushed + COALESCE_SECONDS, self.flush)

    def flush(self) -> None:
        """Pass on the text that was held back; only in the event loop's thread."""
        output = self._output_of(self.task)
        for name, pending in self._pending.items():
            if pending:
                text = "".join(pending)
                pending.clear()
                self._flushed = time.monotonic()
                if output is not None:
                    output.stream(self.rank, name, text)

    def _on_socket(self) -> None:
        if self.protocol_error:
            return
        try:
            for frame in self._event_loop.frames(self.channel):
                self._handle(frame)
        except ProtocolError as error:
            self._give_up(error)

    def _give_up(self, error: ProtocolError) -> None:
        """Kill a rank that sends malformed data: user code has damaged its socket or memory."""
        self.protocol_error = self.protocol_error or str(error)
        self._event_loop.unwatch(self.channel.fileno())
        self.channel.shut_down()
        self._end(self)

    def _handle(self, frame: Frame) -> None:
        self.flush()
        if frame.kind is Kind.RANK_READY:
            self.refusal = identity.difference(frame.payload)
            self.ready = True
            self.post(self, "ready")
            return
        message = _unpickled(frame)
        if isinstance(message, Outcome):
            if self.ended_because:
                return  # too late: its death, which is on its way, ends the task
            self._drain_pipes()
            self.busy, self.memory = False, message.memory
            self.post(self, message)
        elif isinstance(message, ObservedPart | InputRequest):
            self._drain_pipes()
            self.post(self, message)
        elif isinstance(message, NamespaceReport | Completions):
            self._on_report(message.number, (self.rank, message))
        elif isinstance(message, Display | Stream):
            output = self._output_of(message.number)
            if output is not None and isinstance(message, Display):
                output.display(self.rank, message)
            elif output is not None and isinstance(message, Stream):
                output.stream(self.rank, message.name, message.text)
        else:
            raise ProtocolError(f"a {frame.kind.name} frame with a {type(message).__name__}")

    def _drain_pipes(self) -> None:
        """Read what both pipes hold, so that an outcome or a death comes after all output of its task."""
        for name in list(self._pipes):
            while self._read(name):
                pass
        self.flush()

    def _close_pipe(self, name: str) -> None:
        fd = self._pipes.pop(name, None)
        if fd is not None:
            self._event_loop.unwatch(fd)
            os.close(fd)

    def died(self, end: RankDeath) -> None:
        """Record the end of the process; only in the event loop's thread."""
        self._on_socket()  # what it sent before it died counts
        self._drain_pipes()
        if self.ended_because:
            end = dataclasses.replace(end, reason=self.ended_because)
        self.death = end
        self.busy = False
        self.post(self, end)

    # any thread ---------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether it is ready, and its pidfd has arrived from the supervisor.

        The two messages use different sockets, and can arrive in any order.
        """
        return self.ready and self.pidfd >= 0

    @property
    def alive(self) -> bool:
        """Whether the process runs, as far as the supervisor has reported."""
        return self.death is None

    def send(self, kind: Kind, message: Any, fds: tuple[int, ...] = (), *, epoch: int = 0) -> None:
        """Send a message; it is dropped if the rank has died, which is reported soon."""
        self.send_pickled(kind, pickle.dumps(message, 5), fds, epoch=epoch)

    def send_pickled(self, kind: Kind, message: bytes, fds: tuple[int, ...] = (), *, epoch: int = 0) -> None:
        """Send a message that is pickled already; else as `send`."""
        with contextlib.suppress(ChannelClosedError):
            self.channel.send(kind, message, fds=fds, epoch=epoch, abandon=lambda: not self.alive)

    def offer(self, kind: Kind, message: Any) -> bool:
        """Send a message if the socket has room; return whether it was sent."""
        try:
            self.channel.send(kind, pickle.dumps(message, 5), abandon=lambda: True)
        except ChannelClosedError:
            return False
        return True

    def signal(self, number: int) -> None:
        """Signal exactly this process, never another one with a reused pid (pidfd_send_signal(2))."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                signal.pidfd_send_signal(self.pidfd, number)

    def kill_unless_answered(self, task: int, because: str, report: Callable[[bool], None]) -> None:
        """Kill the process if the rank has not answered `task`; its death ends the task then, no answer.

        Decided soon, in the thread that reads the answers: one that was sent before counts.  There, before
        the kill, `report` is called with whether there is one.
        """

        def decide() -> None:
            self._on_socket()
            killed = self.busy and self.task == task and self.alive
            if killed:
                self.ended_because = because
            report(killed)
            if killed:
                self._end(self)

        self._event_loop.call_soon(decide)

    def close(self) -> None:
        """Close everything; the event loop has stopped, or this is its thread."""
        do_all(
            self.close_theirs,
            *(partial(self._close_pipe, name) for name in list(self._pipes)),
            lambda: self._event_loop.unwatch(self.channel.fileno()),
            self.channel.close,
            self._close_pidfd,
        )

    def _close_pidfd(self) -> None:
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def _pipe(made: contextlib.ExitStack) -> tuple[int, int]:
    """Return both ends of a pipe, which the stack closes."""
    ends = os.pipe2(os.O_CLOEXEC)
    for end in ends:
        made.callback(os.close, end)
    return ends


def _unpickled(frame: Frame) -> object:
    try:
        message: object = pickle.loads(frame.payload)
    except Exception as error:
        raise ProtocolError(f"a {frame.kind.name} frame that cannot be read ({error})") from error
    return message


def working_context() -> WorkingContext:
    """Return this process's settings, search path and working directory, empty if that was removed."""
    try:
        directory = os.getcwd()
    except OSError:
        directory = ""
    return WorkingContext(directory, tuple(map(str, sys.path)), current_settings())  # some put a `Path` there


def send_working_context(handles: Iterable[RankHandle]) -> None:
    """Send ranks this process's working directory, search path and settings, if one has changed."""
    here = working_context()
    for handle in handles:
        if handle.sent_context != here:
            handle.sent_context = here
            handle.send(Kind.WORKING_CONTEXT, here)
