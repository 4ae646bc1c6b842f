"""Output stays below the rate at which a Jupyter server drops it, whichever cells it is for."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from nbparallel_magics.output import publisher
from nbparallel_magics.output.publisher import KernelPublisher, Pacer

WINDOW = 0.3
"""Seconds; the server's is 3."""


@pytest.mark.slow
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
    monkeypatch.setattr(publisher, "PACER", Pacer(1000, WINDOW))
    for cell in range(3):
        KernelPublisher(kernel, {"header": {"msg_id": str(cell)}}).stream("stdout", "x" * 700)
    first, second, third = (when for when, _ in sent)
    assert second - first >= 0.9 * WINDOW
    assert third - second >= 0.9 * WINDOW


@pytest.mark.parametrize("character", ["x", "\0", "é"])
def test_a_long_text_is_few_messages_each_within_the_rate(
    monkeypatch: pytest.MonkeyPatch, character: str
) -> None:
    """A front end renders all text again for each; what JSON makes longer is counted as it is sent."""
    sent: list[str] = []

    def send(socket: Any, kind: str, content: Any, *rest: Any) -> None:
        sent.append(content["text"])

    kernel = SimpleNamespace(
        session=SimpleNamespace(send=send), iopub_socket=None, _topic=lambda kind: kind.encode()
    )
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    text = "x" * 1_000_000 + character * 400_000
    KernelPublisher(kernel, {"header": {"msg_id": "0"}}).stream("stdout", text)
    assert "".join(sent) == text
    sizes = [len(json.dumps(part)) for part in sent]
    assert max(sizes) <= 1_200_000
    assert len(sizes) <= len(json.dumps(text)) // 1_000_000 + 2
