"""Messages of a cell: what the notebook printed before comes first, and a cell without any sends nothing."""

from __future__ import annotations

import contextlib
import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nbparallel_magics.output.cell_output import CellOutput
from nbparallel_magics.output.publisher import KernelPublisher


class Kernel:
    """A kernel that notes what is sent and flushed."""

    iopub_socket = None

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.session = SimpleNamespace(send=lambda _socket, kind, *_: self.happened.append(kind))

    def _topic(self, kind: str) -> bytes:
        return kind.encode()


class Stream(io.StringIO):
    """A stream that notes when it is flushed."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        super().__init__()
        self._kernel, self._name = kernel, name

    def flush(self) -> None:
        """Note it."""
        self._kernel.happened.append(f"flush of {self._name}")


def kernel_here(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Return a kernel in whose cell this process runs; pytest would take its streams away from a fixture."""
    made = Kernel()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Stream(made, name))
    return made


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda publisher: publisher.stream("stdout", "text"), "stream"),
        (lambda publisher: publisher.display({}, {}, {}), "display_data"),
        (lambda publisher: publisher.clear(then_more=True), "clear_output"),
    ],
)
def test_what_the_notebook_printed_comes_first(monkeypatch: pytest.MonkeyPatch, act: Any, kind: str) -> None:
    """Whatever is sent first: both streams are flushed before it, and not again."""
    kernel = kernel_here(monkeypatch)
    publisher = KernelPublisher(kernel, {})
    act(publisher)
    act(publisher)
    assert kernel.happened == ["flush of stdout", "flush of stderr", kind, kind]


def test_a_cell_that_shows_nothing_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush waits for the kernel's other thread, which takes as long as the rest of an empty cell."""
    kernel = kernel_here(monkeypatch)
    CellOutput(KernelPublisher(kernel, {})).finish()
    assert kernel.happened == []


def test_clearing_first_hears_what_the_notebook_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a line that the notebook has printed, but not sent, would be taken for shown, and cleared."""
    kernel = kernel_here(monkeypatch)
    notebook: Any = SimpleNamespace(
        forget_of=lambda _: kernel.happened.append("look") or [],
        sending_for=lambda _: contextlib.nullcontext(),
    )
    KernelPublisher(kernel, {}, notebook).clear(then_more=False)
    assert kernel.happened == ["flush of stdout", "flush of stderr", "look", "clear_output"]
