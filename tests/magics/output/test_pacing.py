"""Output stays below the rate at which a Jupyter server drops it, whichever cells it is for."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from nbparallel_magics.output import publisher
from nbparallel_magics.output.publisher import KernelPublisher, Pacer

WINDOW = 0.3
"""Seconds; the server's is 3."""


@pytest.mark.alone
def test_two_cells_share_one_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server counts a kernel's bytes, so what the second cell sends waits for the first one's window."""
    sent: list[tuple[float, int]] = []

    def send(socket: Any, kind: str, content: Any, *rest: Any) -> None:
        sent.append((time.monotonic(), len(content["text"])))

    kernel = SimpleNamespace(
        session=SimpleNamespace(send=send), iopub_socket=None, _topic=lambda kind: kind.encode()
    )
    monkeypatch.setenv("JPY_SESSION_NAME", "notebook.ipynb")
    monkeypatch.setattr(publisher, "_PACER", Pacer(1000, WINDOW))
    for cell in range(3):
        KernelPublisher(kernel, {"header": {"msg_id": str(cell)}}).stream("stdout", "x" * 700)
    first, second, third = (when for when, _ in sent)
    assert second - first >= 0.9 * WINDOW
    assert third - second >= 0.9 * WINDOW
