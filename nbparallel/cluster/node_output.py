"""Output of a host's ranks on its way to the notebook: folded, so that events are few."""

from __future__ import annotations

import threading
from typing import Any

from nbparallel.cluster.contract import NodePort
from nbparallel.cluster.host_messages import send_message
from nbparallel.session.output import TaskOutput
from nbparallel.wire.messages import Display

FOLD_SECONDS = 0.01
"""How long text waits for more of it after an event; the first after a pause does not wait."""
FOLDED = 12 << 10
"""Characters that are sent without waiting any longer."""
NOTE = "note"


class NodeOutput(TaskOutput):
    """The output of one task, which is sent as events of ``(rank, kind, text or Display)``.

    Its thread ends with `close`; what comes later is sent immediately.
    """

    def __init__(self, port: NodePort, number: int) -> None:
        super().__init__(number, None)
        self._port = port
        self._items: list[tuple[int, str, Any]] = []
        self._characters = 0
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._send_folded, name="nbparallel-output", daemon=True).start()

    # docstrings inherited

    def stream(self, rank: int, name: str, text: str) -> None:
        self._add(rank, name, text, len(text))

    def display(self, rank: int, message: Display) -> None:
        self._add(rank, message.kind, message, FOLDED)

    def note(self, text: str) -> None:
        self._add(-1, NOTE, text, len(text))

    def _add(self, rank: int, kind: str, what: Any, characters: int) -> None:
        with self._changed:
            if isinstance(what, str) and kind != NOTE and self._items and self._items[-1][:2] == (rank, kind):
                what = self._items.pop()[2] + what
            self._items.append((rank, kind, what))
            self._characters += characters
            if self._closed or self._characters >= FOLDED:
                self._flush()
            else:
                self._changed.notify()

    def _flush(self) -> None:
        """Send what there is, in order; the lock is held."""
        if self._items:
            items, self._items, self._characters = self._items, [], 0
            send_message(self._port.emit, "output", self.number, items)

    def _send_folded(self) -> None:
        with self._changed:
            while not self._closed:
                self._changed.wait_for(lambda: self._items or self._closed)
                self._flush()
                self._changed.wait_for(lambda: self._closed, FOLD_SECONDS)

    def close(self) -> None:
        """Send what there is (idempotent)."""
        with self._changed:
            self._closed = True
            self._flush()
            self._changed.notify()
