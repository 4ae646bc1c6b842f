"""Reading another process's memory: what is read, how a refusal is told, and that no more is written."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed.runtime import peer_memory
from nbparallel.distributed.runtime.peer_memory import allow_reading, read_memory

HERE = os.getpid()


def address(x: np.ndarray[Any, Any]) -> int:
    """Return where an array lies."""
    return int(x.__array_interface__["data"][0])


@pytest.fixture
def child() -> Iterator[int]:
    """Return a child that sleeps."""
    pid = os.fork()
    if pid == 0:
        allow_reading(os.getppid())
        signal.pause()
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_process_that_has_ended() -> None:
    """It is gone, reaped or not."""
    x = np.zeros(8, np.uint8)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):
        assert read_memory(pid, address(x), np.zeros(8, np.uint8)) == errno.ESRCH
        if _ == 0:
            os.waitpid(pid, 0)


@pytest.mark.parametrize(("scope", "asked"), [("1\n", True), ("0\n", False), ("2\n", False), (None, False)])
def test_yama(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, scope: str | None, asked: bool) -> None:
    """Only with Yama's scope 1 a process names who may read it."""
    path = tmp_path / "ptrace_scope"
    if scope is not None:
        path.write_text(scope)
    calls: list[tuple[Any, ...]] = []

    class Library:
        """Notes what would be called."""

        def prctl(self, *arguments: Any) -> int:
            """Note it."""
            calls.append((arguments[0], arguments[1].value))
            return 0

    monkeypatch.setattr(peer_memory, "YAMA_SCOPE", str(path))
    monkeypatch.setattr(peer_memory.ctypes, "CDLL", lambda *_, **__: Library())
    allow_reading(4321)
    assert calls == ([(0x59616D61, 4321)] if asked else [])
