"""Output of a rank, streams and displays, in order.

File descriptors 1 and 2 are pipes that the *kernel* reads: C code, child processes and a crash's last output
come through although no Python thread of the rank can run.  Rich outputs travel as frames on the socket.
Two roads would lose the order, hence one rule: **a frame is sent, and the other stream is written, only when
both pipes are empty**; the kernel in turn reads the socket before a pipe.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import io
import os
import pickle
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import numpy as np

from nbparallel.channel import Channel
from nbparallel.errors import ChannelClosedError
from nbparallel.wire.frames import Kind
from nbparallel.wire.inspection import Completions, NamespaceReport
from nbparallel.wire.messages import Display, Message, ObservedPart, Stream

_OURS = "nbparallel."
_EVERYWHERE = frozenset({"builtins", "datetime"})
"""Modules whose classes every Python has."""
_PLAIN: dict[type, Callable[[Any], Any]] = {  # `str(obj)` may be another one of that class
    str: str.__str__,
    bytes: lambda obj: bytes(memoryview(obj)),
    int: int.__int__,
    float: float.__float__,
    dict: lambda obj: dict(dict.items(obj)),
    list: lambda obj: list(list.__iter__(obj)),
    tuple: lambda obj: tuple(tuple.__iter__(obj)),
}


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Decide about what is not exactly one of Python's own plain kinds."""
        kind = obj if isinstance(obj, type) else type(obj)
        module = str(kind.__module__)
        if module.startswith(_OURS):
            return NotImplemented
        if kind is not obj:
            plain = _plain(obj)
            if plain is not None:
                return type(plain), (plain,)
        if module in _EVERYWHERE and not isinstance(obj, FunctionType):
            return NotImplemented
        raise TypeError(
            f"an object of class {kind.__name__} cannot be shown in the notebook: what a display is made of "
            "(_repr_mimebundle_, display(…, raw=True)) has to be text, bytes, numbers, lists and dicts"
        )


def _plain(obj: Any) -> Any:
    """Return the value of an object of a class that is derived from a plain one; else None."""
    for kind, value_of in _PLAIN.items():
        if isinstance(obj, kind):
            return value_of(obj)
    return obj.item() if isinstance(obj, np.bool_ | np.integer | np.floating) else None


def pickle_message(message: Message | NamespaceReport | Completions) -> bytes:
    """Return the bytes of a message to the notebook.

    Raises
    ------
    TypeError
        There is something in it that the notebook could not read.
    """
    stream = io.BytesIO()
    _Pickler(stream, 5).dump(message)
    return stream.getvalue()


DRAIN_SECONDS = 5.0
"""A kernel that reads nothing for so long is stopped: order is given up, nothing else."""
FLUSH_BYTES = 8192
"""A line longer than this is written in pieces."""
_WIDGET = "application/vnd.jupyter.widget-view+json"
_libc = ctypes.CDLL(None)


def _unread(fd: int) -> int:
    """Return how many bytes wait in the pipe (FIONREAD works at both ends: pipe(7))."""
    count = array.array("i", [0])
    with contextlib.suppress(OSError):  # user code has closed it
        fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


class RankStream(io.TextIOBase):
    """Text stream over file descriptor 1 or 2.

    Notes
    -----
    Any thread may write, and its text lands in the cell that runs.  While none does, text of a thread that an
    earlier task started is sent on the socket with that task's number, so that it lands in the thread's cell.
    """

    def __init__(self, output: RankOutput, fd: int, name: str) -> None:
        super().__init__()
        self._output = output
        self._fd = fd
        self._label, self.name = name, f"<{name}>"
        self._pending: list[str] = []
        self._size = 0
        self.buffer = _Buffer(self, fd)

    encoding = "utf-8"
    errors = "backslashreplace"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        task = self._output.foreign_task()
        if task is not None:
            self._output.send_late(task, self._label, text)
            return len(text)
        self._output.turn_to(self)
        self._pending.append(text)
        self._size += len(text)
        if self._size > FLUSH_BYTES or "\n" in text or "\r" in text:
            self.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        self.write("".join(lines))  # the base class flushes each

    def flush(self) -> None:
        if self._pending:
            pending, self._pending, self._size = self._pending, [], 0
            self.write_bytes("".join(pending).encode("utf-8", "backslashreplace"))

    def write_bytes(self, data: bytes) -> None:
        """Write all of `data`; waits while the pipe is full, which slows a tight print loop down."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


class _Buffer(io.RawIOBase):
    """``sys.stdout.buffer``: bytes go straight to the pipe, after the text before them."""

    def __init__(self, stream: RankStream, fd: int) -> None:
        super().__init__()
        self._stream, self._fd = stream, fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        self._stream.flush()
        view = memoryview(data).cast("B")
        self._stream.write_bytes(bytes(view))
        return len(view)


class RankOutput:
    """Both streams and the frames of one rank; keeps them in order."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self.stdout = RankStream(self, 1, "stdout")
        self.stderr = RankStream(self, 2, "stderr")
        self._last = self.stdout
        self.task = 0
        """Number of the task that runs, or ran last."""
        self.runs = False
        """Whether the user's code runs in it: all that threads write is the task's then."""

    def put_back(self) -> None:
        """Make these Python's streams again: a cell may have put others there, or None."""
        sys.stdout, sys.stderr = self.stdout, self.stderr

    def foreign_task(self) -> int | None:
        """Return the task that started the calling thread, if it is an earlier one and no cell runs."""
        if self.runs:
            return None
        task: int | None = getattr(threading.current_thread(), "_nbparallel_task", None)
        return task if task is not None and task != self.task and os.getpid() == self._pid else None

    def turn_to(self, stream: RankStream) -> None:
        """Switch to `stream` after the other stream's text has been read."""
        if stream is not self._last:
            self._last.flush()
            self._last = stream
            self._wait_until_read()

    def flush(self) -> None:
        """Write what both streams hold."""
        self.stdout.flush()
        self.stderr.flush()

    def _wait_until_read(self) -> None:
        deadline = time.monotonic() + DRAIN_SECONDS
        pause = 0.0
        while (_unread(1) or _unread(2)) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause + 2e-5, 1e-3)

    def settle(self) -> None:
        """Write everything, C's buffers included, and wait until the kernel has read it."""
        self.flush()
        _libc.fflush(None)  # printf of an extension is buffered by the C library, not by us
        self._wait_until_read()

    def display(
        self,
        kind: str,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        transient: dict[str, Any] | None = None,
    ) -> None:
        """Send a rich output, after everything that was printed before it."""
        if os.getpid() != self._pid:  # a forked child has no socket; its text still goes through the pipe
            text = data.get("text/plain")
            if text:
                self.stdout.write(f"{text}\n")
            return
        if _WIDGET in data and len(data) > 1:
            # its model lives in this process: a front end would say "model not found" instead of the text
            data = {kind: content for kind, content in data.items() if kind != _WIDGET}
        task = self.foreign_task()
        self.settle()
        message = Display(self.task if task is None else task, kind, data, metadata or {}, transient or {})
        self._channel.send(Kind.DISPLAY, pickle_message(message), sequence=message.number)

    def send_observed(self, observer: str, log: Any) -> None:
        """Send a part of an observer's log; nothing from a forked child, which is no rank."""
        if os.getpid() == self._pid:
            message = ObservedPart(self.task, observer, log)
            self._channel.send(Kind.OBSERVED, pickle_message(message), sequence=message.number)

    def send_late(self, task: int, name: str, text: str) -> None:
        """Send what a thread of an earlier task printed while no cell runs."""
        with contextlib.suppress(ChannelClosedError):  # no reader is left
            self._channel.send(Kind.STREAM, pickle_message(Stream(task, name, text)), sequence=task)


def mark_threads(output: RankOutput) -> None:
    """Let every thread remember which task started it."""
    start = threading.Thread.start

    def start_marked(self: threading.Thread) -> None:
        parent = getattr(threading.current_thread(), "_nbparallel_task", None)
        self._nbparallel_task = output.task if parent is None else parent  # type: ignore[attr-defined]
        start(self)

    threading.Thread.start = start_marked  # type: ignore[method-assign]
