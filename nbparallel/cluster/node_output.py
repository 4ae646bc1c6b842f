"""Output of a host's ranks on its way to the notebook: folded, so that events are few."""

from __future__ import annotations

import threading
from typing import Any

from nbparallel.cluster.contract import NodePort
from nbparallel.cluster.host_messages import OutputItem, send_message
from nbparallel.wire.messages import Display

FOLD_SECONDS = 0.01
"""How long text waits for more of it."""
FOLDED = 12 << 10
"""Characters that are sent without waiting any longer."""


class NodeOutput:
    """The sink of one task: sends what ranks print and show as events.

    Its thread ends with `close`; what comes later is sent immediately.
    """

    def __init__(self, port: NodePort, number: int) -> None:
        self._port, self._number = port, number
        self._items: list[OutputItem] = []
        self._texts: dict[tuple[int, str], list[str]] = {}
        self._characters = 0
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._send_folded, name="nbparallel-output", daemon=True).start()

    # docstrings inherited from OutputSink

    def stream(self, rank: int, name: str, text: str) -> None:
        with self._changed:
            last = self._items[-1] if self._items else None
            if last is not None and (last.rank, last.kind) == (rank, name):
                self._items[-1] = OutputItem(rank, name, last.text + text)
            else:
                self._items.append(OutputItem(rank, name, text))
            self._added(len(text))

    def display(
        self,
        rank: int,
        data: dict[str, Any],
        metadata: dict[str, Any],
        transient: dict[str, Any],
        update: bool,
    ) -> None:
        self._show(rank, "update" if update else "display", data, metadata, transient)

    def result(self, rank: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        self._show(rank, "result", data, metadata, {})

    def clear(self, rank: int, wait: bool) -> None:
        self._show(rank, "clear", {}, {"wait": wait}, {})

    def note(self, text: str) -> None:
        with self._changed:
            self._items.append(OutputItem(-1, "note", text))
            self._added(len(text))

    def finish(self) -> None:
        pass  # the kernel's own output of this task is finished when all hosts have reported

    def _show(
        self, rank: int, kind: str, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]
    ) -> None:
        with self._changed:
            display = Display(self._number, kind, data, metadata, transient)
            self._items.append(OutputItem(rank, kind, display=display))
            self._added(FOLDED)

    def _added(self, characters: int) -> None:
        self._characters += characters
        if self._closed or self._characters >= FOLDED:
            self._flush()
        else:
            self._changed.notify()

    def _flush(self) -> None:
        """Send what there is, in order; the lock is held."""
        if self._items:
            items, self._items, self._characters = self._items, [], 0
            send_message(self._port.emit, "output", self._number, items)

    def _send_folded(self) -> None:
        with self._changed:
            while not self._closed:
                self._changed.wait_for(lambda: self._items or self._closed)
                self._changed.wait_for(lambda: self._closed, FOLD_SECONDS)
                self._flush()

    def close(self) -> None:
        """Send what there is (idempotent)."""
        with self._changed:
            self._closed = True
            self._flush()
            self._changed.notify()
