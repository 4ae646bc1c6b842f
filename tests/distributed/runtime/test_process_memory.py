"""Reading another process's memory: what is read, how a refusal is told, and that no more is written."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed.runtime import peer_memory
from nbparallel.distributed.runtime.peer_memory import ReadFailure, allow_reading, read_memory

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


def test_another_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes of a forked child's copy arrive, in one call or many; none beside the buffer is written."""
    x = np.arange(100_001, dtype=np.uint8)
    ready, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        x[...] ^= 0xFF
        allow_reading(os.getppid())
        os.write(says, b"1")
        signal.pause()
    try:
        os.read(ready, 1)
        for most in (peer_memory.MOST_NBYTES, 4096, 999):
            monkeypatch.setattr(peer_memory, "MOST_NBYTES", most)
            found = np.full(x.size + 2, 7, np.uint8)
            assert read_memory(pid, address(x), found[1:-1]) is None
            assert (found[1:-1] == x ^ 0xFF).all()
            assert found[0] == found[-1] == 7
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(says)


def test_a_process_that_has_ended() -> None:
    """It is gone, reaped or not."""
    x = np.zeros(8, np.uint8)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):
        error = read_memory(pid, address(x), np.zeros(8, np.uint8))
        assert error is not None
        assert (error.failure, error.number) == (ReadFailure.GONE, errno.ESRCH)
        if _ == 0:
            os.waitpid(pid, 0)


def test_no_memory_there(child: int) -> None:
    """Address 0, one beyond all, and the hole behind a mapping are unreadable."""
    page = 4096
    memory = ctypes.CDLL(None).mmap
    memory.restype = ctypes.c_void_p
    memory.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    start = memory(None, 4 * page, 0, 0x22, -1, 0)  # PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS
    for pid, where in ((child, 0), (child, 1), (child, (1 << 64) - 8), (HERE, start)):
        error = read_memory(pid, where, np.zeros(16, np.uint8))
        assert error is not None
        assert error.failure is ReadFailure.UNREADABLE, (pid, where)
        assert str(error) == "Bad address"
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), page, 3) == 0
    found = np.full(2 * page, 7, np.uint8)
    error = read_memory(HERE, start, found)
    assert error is not None
    assert error.failure is ReadFailure.UNREADABLE
    assert not found[:page].any(), "what could be read was"
    assert ctypes.CDLL(None).munmap(ctypes.c_void_p(start), 4 * page) == 0


def test_what_cannot_be_filled() -> None:
    """Read-only memory is refused before anything happens; nothing is read into nothing."""
    x = np.arange(8, dtype=np.uint8)
    assert read_memory(HERE, 1, np.zeros(0, np.uint8)) is None
    with pytest.raises((TypeError, BufferError, ValueError)):
        read_memory(HERE, address(x), bytes(8))


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
