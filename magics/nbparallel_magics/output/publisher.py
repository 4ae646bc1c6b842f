"""Where output goes: ordinary messages of the notebook's kernel, or the text of a terminal.

Some facts about ipykernel, 6.31 to 7.4:

* what a thread prints is filed under the cell that runs *now*; only a message that is sent with the parent
  header of its own cell lands there, whatever else runs;
* `Session.send` and the IOPub socket may be used from any thread;
* ``clear_output`` with ``wait`` takes effect at the next output, so that nothing flickers;
* the Jupyter server *drops* output beyond 1,000,000 bytes/s, counted over 3 s.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import os
import shutil
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from nbparallel.errors.text.table import muted

# Messages that the notebook itself showed in a cell, to repeat them after ``clear_output``.
#
# Clearing removes everything that a cell has shown, also what did not come from ranks: a ``print`` before
# ``%parallel``, a ``--local`` run, a thread of the notebook.  All of it passes through the kernel's one
# `jupyter_client.session.Session`, which is where it is recorded.

_KINDS = frozenset(
    {"stream", "display_data", "execute_result", "update_display_data", "clear_output", "error"}
)
_LIMIT = 10 << 20
"""Characters that are kept of one cell; a cell that shows more is never cleared."""

Message = tuple[str, dict[str, Any]]


class NotebookOutput:
    """Keeps the messages of the cell that runs, each with its sender."""

    def __init__(self, kernel: Any) -> None:
        self._session = kernel.session
        self._send = self._session.send
        self._lock = threading.Lock()
        self._sender = threading.local()
        self._cell = ""
        self._held: dict[object, tuple[object, Message]] = {}
        self._size = 0
        self._complete = False

    def install(self) -> None:
        """Observe what the kernel sends from now on."""
        self._session.send = self._watch

    def remove(self) -> None:
        """Undo `install`."""
        if self._session.__dict__.get("send") == self._watch:
            del self._session.send
        self._complete = False
        self._held.clear()

    def begin_cell(self, parent: Any) -> bool:
        """Reset; False if this is part of a cell that has begun already (a cell run by a cell)."""
        cell = _message_id(parent)
        with self._lock:
            if cell == self._cell:
                return False
            self._cell, self._size, self._complete = cell, 0, True
            self._held.clear()
            return True

    def covers(self, parent: Any) -> bool:
        """Whether all messages of this message's cell are recorded."""
        return self._complete and _message_id(parent) == self._cell

    @contextmanager
    def sending_for(self, sender: object) -> Iterator[None]:
        """Attribute what this thread sends now to `sender`."""
        self._sender.value = sender
        try:
            yield
        finally:
            self._sender.value = None

    def forget_of(self, sender: object) -> list[Message]:
        """Forget everything, and return what was not `sender`'s: it will be sent, and recorded, again."""
        with self._lock:
            others = [(source, message) for source, message in self._held.values() if source is not sender]
            self._held.clear()
            self._size = 0
        return [message for _, message in others]

    def _watch(self, *args: Any, **options: Any) -> Any:
        result = self._send(*args, **options)
        if self._complete:
            given = dict(zip(("stream", "msg_or_type", "content", "parent"), args, strict=False)) | options
            message = given.get("msg_or_type")
            if isinstance(message, str):
                self._keep(message, given.get("content"), given.get("parent"))
            elif isinstance(message, dict):
                self._keep(message.get("msg_type"), message.get("content"), message.get("parent_header"))
        return result

    def _keep(self, kind: Any, content: Any, parent: Any) -> None:
        if kind not in _KINDS or not isinstance(content, dict):
            return
        with self._lock:
            if not self._complete or _message_id(parent) != self._cell:
                return
            if kind == "clear_output":
                self._held.clear()
                self._size = 0
                return
            sender = getattr(self._sender, "value", None)
            key: object = object()
            if kind == "update_display_data":  # only the last one of a display is shown again
                key = (sender, (content.get("transient") or {}).get("display_id"))
                _, (_, replaced) = self._held.get(key, (None, (kind, {})))
                self._size -= sum(len(p) for p in _texts(replaced))
            self._size += sum(len(p) for p in _texts(content))
            if self._size > _LIMIT:
                self._complete = False
                self._held.clear()
            else:
                self._held[key] = (sender, (kind, content))


def _texts(content: dict[str, Any]) -> Iterator[str]:
    data = content.get("data")
    parts = [content.get("text"), *(data.values() if isinstance(data, dict) else ())]
    return (part for part in parts if isinstance(part, str))


def _message_id(parent: Any) -> str:
    header = (parent or {}).get("header", parent) or {}
    return str(header.get("msg_id", ""))


_LARGEST_MESSAGE = 1_100_000
"""Bytes of JSON in one stream message: two are below the server's limit.  A larger text is sent in several,
and a front end renders all of it again for each."""
_SERVER_WINDOW = 3.0
"""Seconds over which the Jupyter server counts."""
_SERVER_BYTES = 2_400_000
"""Bytes in that window that are safely below the server's limit of 3,000,000."""


@functools.cache
def is_logged(parent: int | None = None) -> bool:
    """Whether papermill started this kernel: its log keeps what is cleared, and would show all output twice.

    Parameters
    ----------
    parent : int, optional
        The process that started it, by default this one's parent.
    """
    try:
        with open(f"/proc/{parent or os.getppid()}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:  # no /proc: then nothing is known
        return False
    return any(os.path.basename(word) == b"papermill" for word in words)


class Pacer:
    """Keeps output below the rate at which the Jupyter server begins to drop it."""

    def __init__(self, nbytes: int = _SERVER_BYTES, window: float = _SERVER_WINDOW) -> None:
        self._nbytes, self._window = nbytes, window
        self._sent: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    def wait_for(self, nbytes: int) -> None:
        """Wait until `nbytes` more may be sent, at most one window."""
        with self._lock:
            now = time.monotonic()
            end = now + self._window
            while now < end:
                while self._sent and self._sent[0][0] <= now - self._window:
                    self._sent.popleft()
                if not self._sent or sum(size for _, size in self._sent) + nbytes <= self._nbytes:
                    break
                time.sleep(max(0.01, self._sent[0][0] + self._window - now))
                now = time.monotonic()
            self._sent.append((now, nbytes))


PACER = Pacer()
"""The server counts what a kernel sends, whichever cell it is for."""


class KernelPublisher:
    """Sends messages of the cell during which it was made, also after its end; from any thread."""

    separate_streams = True
    """Whether stdout and stderr are shown apart, so that one cannot end in the other's line."""
    renders_again = True
    """Whether more text of a stream makes what is there be rendered again."""
    can_live = True
    """Whether `live` can replace what it has shown."""

    def __init__(self, kernel: Any, parent: Any, notebook: NotebookOutput | None = None) -> None:
        self._kernel, self._parent, self._notebook = kernel, parent, notebook
        self._live = ""  # the display_id of the lines that change
        # only kernels that a Jupyter server started have this variable; others have no limit
        self._pacer = PACER if "JPY_SESSION_NAME" in os.environ else None
        self._before: tuple[Any, ...] = (sys.stdout, sys.stderr)
        """What the notebook has printed there is sent before anything of ours."""

    @property
    def can_clear(self) -> bool:
        """Whether what was shown can be cleared."""
        return self._notebook is not None and self._notebook.covers(self._parent) and not is_logged()

    def stream(self, name: str, text: str) -> None:
        """Show text of ``stdout`` or ``stderr``."""
        start = 0
        while start < len(text):
            length = _LARGEST_MESSAGE
            while (nbytes := len(json.dumps(part := text[start : start + length]))) > _LARGEST_MESSAGE:
                length = min(length, len(part)) * _LARGEST_MESSAGE // nbytes - 1
            start += len(part)
            if self._pacer:
                self._pacer.wait_for(nbytes)
            self._send("stream", {"name": name, "text": part})

    def note(self, text: str) -> None:
        """Show lines of our own, which stand back where the front end can show that."""
        if is_logged():
            self.stream("stdout", text)
        else:
            self.display({"text/plain": text.rstrip("\n"), "text/html": muted(text)}, {}, {})

    def display(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None:
        """Show a rich display."""
        self._send_display("display_data", data, metadata, transient)

    def update(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None:
        """Replace a display by its ``display_id``."""
        self._send_display("update_display_data", data, metadata, transient)

    def live(self, text: str, *, last: bool) -> None:
        """Show lines in the place of those of the last call; after `last` in a new place."""
        known, self._live = self._live, self._live or f"nbparallel-live-{uuid.uuid4().hex}"
        show = self.update if known else self.display
        show({"text/plain": text}, {}, {"display_id": self._live})
        if last:
            self._live = ""

    def clear(self, *, then_more: bool) -> None:
        """Clear what this cell showed, keeping what the notebook itself showed in it."""
        self._live = ""
        self._send_what_came_before()
        kept = self._notebook.forget_of(self) if self._notebook else []
        self._send("clear_output", {"wait": then_more or bool(kept)})
        for kind, content in kept:
            self._send(kind, content, sender=None)

    def _send_what_came_before(self) -> None:
        for stream in self._before:
            stream.flush()  # not when we are made: it waits for another thread, and many cells show nothing
        self._before = ()

    def _send_display(self, kind: str, *parts: dict[str, Any]) -> None:
        content = dict(zip(("data", "metadata", "transient"), parts, strict=True))
        if self._pacer:
            self._pacer.wait_for(sum(len(v) for v in content["data"].values() if isinstance(v, str)))
        self._send(kind, content)

    def _send(self, kind: str, content: dict[str, Any], sender: object = ...) -> None:
        self._send_what_came_before()
        content = _sendable(content)
        with (
            self._notebook.sending_for(self if sender is ... else sender) if self._notebook else nullcontext()
        ):
            self._kernel.session.send(
                self._kernel.iopub_socket, kind, content, self._parent, self._kernel._topic(kind)
            )


def _sendable(value: Any) -> Any:
    """Return what JSON and UTF-8 can hold: bytes (pictures) as base64, lone surrogates escaped."""
    if isinstance(value, dict):
        return {_sendable(key): _sendable(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sendable(part) for part in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


class PlainPublisher:
    """Prints: in a terminal, under ``%%capture``, or in a kernel that is not ipykernel."""

    # docstrings inherited from KernelPublisher

    separate_streams = False
    renders_again = False
    can_clear = False

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._live: list[str] = []
        self._drawn = 0  # how many of these lines are on the screen, as the last ones
        self._open = False  # whether the line above them has no end

    @property
    def can_live(self) -> bool:
        return bool(sys.stdout.isatty())

    def stream(self, name: str, text: str) -> None:
        self._wipe()
        stream = sys.stderr if name == "stderr" else sys.stdout
        stream.write(text)
        stream.flush()
        self._open = not text.endswith("\n")
        self._draw()

    def note(self, text: str) -> None:
        self.stream("stdout", text)

    def display(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any],
        transient: dict[str, Any],
        *,
        update: bool = False,
    ) -> None:
        self._wipe()
        self._shell.display_pub.publish(data, metadata, transient=transient, update=update)
        self._draw()

    def update(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None:
        self.display(data, metadata, transient, update=True)

    def live(self, text: str, *, last: bool) -> None:
        self._wipe()
        self._live = text.splitlines()
        self._draw(last=last)

    def _wipe(self) -> None:
        """Move up to the first of the lines that change, and clear from there (ECMA-48)."""
        if self._drawn:
            sys.stdout.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _draw(self, *, last: bool = False) -> None:
        if not self._live or (self._open and not last):
            return
        lines, size = self._live, shutil.get_terminal_size()
        if not last:  # a line that is wrapped would count as two, and one that has left the screen stays
            lines = [line[: size.columns - 1] for line in lines[-(size.lines - 1) :]]
        sys.stdout.write("\n" * self._open + "".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        self._drawn, self._open = len(lines), False
        if last:
            self._live, self._drawn = [], 0

    def clear(self, *, then_more: bool) -> None:
        raise NotImplementedError("a terminal keeps what it shows")


Publisher = KernelPublisher | PlainPublisher
"""Destination of a cell's output; may be called from any thread."""


def publisher_for(shell: Any, notebook: NotebookOutput | None) -> Publisher:
    """Return the publisher for the shell in which a cell has just begun."""
    if is_ipykernel(shell) and hasattr(sys.stdout, "set_parent"):  # else it is being captured
        return KernelPublisher(shell.kernel, shell.get_parent(), notebook)
    return PlainPublisher(shell)


def is_ipykernel(shell: Any) -> bool:
    """Whether messages can be sent for a cell of this shell."""
    kernel = getattr(shell, "kernel", None)
    return hasattr(kernel, "session") and hasattr(kernel, "iopub_socket") and hasattr(shell, "get_parent")
