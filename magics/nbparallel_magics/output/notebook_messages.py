"""Messages that the notebook itself showed in a cell, to repeat them after ``clear_output``.

Clearing removes everything that a cell has shown, also what did not come from ranks: a ``print`` before
``%parallel``, a ``--local`` run, a thread of the notebook.  All of it passes through the kernel's one
`jupyter_client.session.Session`, which is where it is recorded.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


class IdleInterrupt:
    """The stop button between two cells: it interrupts what ranks run in the background or for a subshell.

    ipykernel ignores SIGINT while it handles no message: it puts back what it found before the first one
    (`Kernel.pre_handler_hook` and `post_handler_hook`).  While the extension is loaded that is our handler,
    which does nothing while nothing runs.

    Parameters
    ----------
    kernel : ipykernel.kernelbase.Kernel
    interrupt : callable
        Interrupts the cell that runs; called in the signal handler, so it may take no lock.
    """

    def __init__(self, kernel: Any, interrupt: Callable[[], None]) -> None:
        self._kernel, self._interrupt = kernel, interrupt

    def install(self) -> None:
        """Interrupt cells from now on, unless a library has put a handler of its own there."""
        if getattr(self._kernel, "saved_sigint_handler", None) is signal.SIG_IGN:
            self._kernel.saved_sigint_handler = self._handle

    def remove(self) -> None:
        """Have SIGINT ignored between cells again."""
        if getattr(self._kernel, "saved_sigint_handler", None) == self._handle:
            self._kernel.saved_sigint_handler = signal.SIG_IGN

    def _handle(self, *_: object) -> None:
        self._interrupt()
