"""Messages of a cell: what the notebook printed before comes first, and a cell without any sends nothing."""

from __future__ import annotations

import io
import os
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nbparallel_magics.output.cell_output import CellOutput
from nbparallel_magics.output.layout import Screen
from nbparallel_magics.output.publisher import KernelPublisher, PlainPublisher


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


class Terminal(io.StringIO):
    """A terminal of 20 columns and 4 lines."""

    def isatty(self) -> bool:
        """Be one."""
        return True

    def lines(self) -> list[str]:
        """Return what is to be seen."""
        screen = Screen()
        # erasing below is clearing each of those lines; the screen has no code for it
        screen.feed(self.getvalue().replace("\x1b[J", "\x1b[K\n\x1b[K\n\x1b[K\n\x1b[K\x1b[3A\r"))
        ended, begun = screen.end()
        return [line.text for line in ended if line.text] + [begun] * bool(begun)


def test_lines_that_change_stay_below_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text goes above them, too long ones are cut so that they can be taken back; the last state is whole."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((20, 4)))
    publisher = PlainPublisher(SimpleNamespace())
    assert publisher.can_live
    publisher.stream("stdout", "before\n")
    publisher.live("[rank 0] 1 %\n[rank 1] 1 %", last=False)
    publisher.stream("stdout", "text\n")
    publisher.live("[rank 0] 2 %\n[rank 1] 2 %", last=False)
    assert terminal.lines() == ["before", "text", "[rank 0] 2 %", "[rank 1] 2 %"]
    publisher.stream("stdout", "no end")
    assert terminal.lines() == ["before", "text", "no end"]
    publisher.stream("stdout", ", now\n")
    assert terminal.lines() == ["before", "text", "no end, now", "[rank 0] 2 %", "[rank 1] 2 %"]
    publisher.live("x" * 30 + "\n1\n2\n3", last=False)
    assert terminal.lines() == ["before", "text", "no end, now", "1", "2", "3"]
    publisher.live("x" * 30, last=False)
    assert terminal.lines()[-1] == "x" * 19
    publisher.live("x" * 30, last=True)
    publisher.stream("stdout", "after\n")
    assert terminal.lines() == ["before", "text", "no end, now", "x" * 30, "after"]
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not publisher.can_live
