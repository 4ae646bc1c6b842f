"""What the notebook itself shows in a cell, so that it can be shown again after ``clear_output``.

Clearing takes everything that a cell has shown, also what did not come from ranks: a ``print`` before
``%parallel``, a ``--local`` run, a thread of the notebook.  All of it passes through the kernel's one
`jupyter_client.session.Session`, so that is where it is noted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_KINDS = frozenset(
    {"stream", "display_data", "execute_result", "update_display_data", "clear_output", "error"}
)
_LIMIT = 10_000_000
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
        self._kept: list[tuple[object, Message]] = []
        self._size = 0
        self._complete = False

    def install(self) -> None:
        """Look at what the kernel sends from now on."""
        self._session.send = self._watch

    def remove(self) -> None:
        """Undo `install`."""
        if self._session.__dict__.get("send") == self._watch:
            del self._session.send
        self._complete = False
        self._kept.clear()

    def begin_cell(self, parent: Any) -> bool:
        """Start anew; False if this is part of a cell that has begun already (a cell run by a cell)."""
        cell = _message_id(parent)
        with self._lock:
            if cell == self._cell:
                return False
            self._cell, self._size, self._complete = cell, 0, True
            self._kept.clear()
            return True

    def covers(self, parent: Any) -> bool:
        """Whether everything is kept that the cell of this message has shown."""
        return self._complete and _message_id(parent) == self._cell

    @contextmanager
    def sending_for(self, sender: object) -> Iterator[None]:
        """Say that what this thread sends now is `sender`'s."""
        self._sender.value = sender
        try:
            yield
        finally:
            self._sender.value = None

    def forget_of(self, sender: object) -> list[Message]:
        """Forget everything, and return what was not `sender`'s: it will be sent, and kept, again."""
        with self._lock:
            others = [(who, message) for who, message in self._kept if who is not sender]
            self._kept = []
            self._size = 0
        return [message for _, message in others]

    def _watch(self, stream: Any, message: Any, *args: Any, **options: Any) -> Any:
        result = self._send(stream, message, *args, **options)
        kind = message if isinstance(message, str) else message.get("msg_type")
        if kind in _KINDS and self._complete:
            if isinstance(message, str):
                content = args[0] if args else options.get("content")
                parent = args[1] if len(args) > 1 else options.get("parent")
            else:
                content, parent = message.get("content"), message.get("parent_header")
            self._keep(kind, content or {}, parent)
        return result

    def _keep(self, kind: str, content: dict[str, Any], parent: Any) -> None:
        with self._lock:
            if not self._complete or _message_id(parent) != self._cell:
                return
            if kind == "clear_output":
                self._kept.clear()
                self._size = 0
                return
            parts = content.get("data") or {}
            self._size += len(content.get("text", "")) + sum(
                len(p) for p in parts.values() if isinstance(p, str)
            )
            if self._size > _LIMIT:
                self._complete = False
                self._kept.clear()
            else:
                self._kept.append((getattr(self._sender, "value", None), (kind, content)))


def _message_id(parent: Any) -> str:
    header = (parent or {}).get("header", parent) or {}
    return str(header.get("msg_id", ""))
