"""Calls of a manager's objects, of which an interrupt leaves nothing behind.

With the library the answer to an interrupted call stays in the connection: the next call takes it for its
own, or waits behind one that does not end.  Here

::

    proxy's process   ProxyEnd.recv is interrupted      a call that waits: its answer is refused immediately
                      ProxyEnd.send, the next call      any other: its answer is awaited and dropped
                                                        none came, or it was refused: a new connection
    manager           ServedEnd.send cannot send        returns what the call took from a queue, or
                                                        a lock, and locks that only this thread can release

So an item that an abandoned ``get`` takes is there for the next one, and a lock is free.  The same holds for
a process that was killed while it waited.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing import connection as library
from multiprocessing import managers, process
from typing import Any

from nbparallel.errors import NbParallelError
from nbparallel.multiprocessing.connection import Connection

ANSWER_SECONDS = 1.0
"""How long the answer to an interrupted call, which does not wait for others, is awaited; arbitrary."""
_WAITS = frozenset({"get", "put", "acquire", "wait", "join"})
"""Methods that may wait for other processes."""
_TAKES = frozenset({"get", "get_nowait"})
_GIVE_BACK = "#GIVE_BACK"
"""In place of a method: its argument was taken from a queue by a call that was interrupted."""
_OF_THREADS = type(threading.RLock()), threading.Condition
"""Locks that only the thread releases that has them."""


class ProxyEnd(Connection):
    """A proxy's end of a connection to its manager.

    Attributes
    ----------
    connect : callable
        Returns another connection to the manager.
    """

    connect: Callable[[], library.Connection[Any, Any]]
    _next: tuple[Any, ...] = ()
    _call: tuple[Any, ...] | None = None
    """The request whose answer was not read."""
    _torn = False
    """Whether a message may have been read or written in part."""
    _refused = False

    def send(self, obj: Any) -> None:
        """Send a request: ident, method, arguments, keyword arguments."""
        if self._call is not None:
            self._end_call()
        self._next = obj
        super().send(obj)
        self._next = ()

    def _send_bytes(self, buf: Any) -> None:
        self._call, self._torn = self._next, True
        super()._send_bytes(buf)  # type: ignore[misc]
        self._torn = False

    def recv(self) -> Any:
        """Receive the answer."""
        try:
            self._is_answered(None)  # reads nothing: an interrupt tears no message
            return self._answer()
        except BaseException:
            if not self._torn and self._call is not None and _may_wait(self._call):
                self._refuse_answer()
            raise

    def _answer(self) -> Any:
        self._torn = True
        try:
            data = self._recv_bytes()  # type: ignore[attr-defined]
        except EOFError:  # the manager has ended; what comes next says what the library's says
            self._call, self._torn = None, False
            raise
        self._call, self._torn = None, False
        return library._ForkingPickler.loads(data.getbuffer())  # type: ignore[attr-defined]

    def _is_answered(self, seconds: float | None) -> bool:
        waiting = select.poll()
        waiting.register(self.fileno(), select.POLLIN)
        return bool(waiting.poll(None if seconds is None else seconds * 1000))

    def _end_call(self) -> None:
        """Make this end fit for the next call."""
        assert self._call is not None
        if not self._refused and not self._torn:
            if not _may_wait(self._call) and self._is_answered(ANSWER_SECONDS):
                with contextlib.suppress(EOFError, NbParallelError):
                    self._answer()
                return
            self._refuse_answer()
        fresh = self.connect()
        name = f"{process.current_process().name}|{threading.current_thread().name}"
        managers.dispatch(fresh, None, "accept_connection", (name,))  # type: ignore[attr-defined]
        # no call in between, so that no signal's handler runs
        self._handle, fresh._handle = fresh._handle, self._handle  # type: ignore[attr-defined]
        self._call, self._torn, self._refused = None, False, False
        fresh.close()

    def _refuse_answer(self) -> None:
        """Let the manager fail to send the answer; return what one that has come already holds."""
        assert self._call is not None
        self._refused = True
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as end:
            end.shutdown(socket.SHUT_RD)
        if self._torn:
            return
        ident, method, *_ = call = self._call
        with contextlib.suppress(EOFError, OSError):
            kind, result = self._answer()
            if kind == "#RETURN" and method in _TAKES:
                super().send((ident, _GIVE_BACK, (result,), {}))
            elif kind == "#RETURN" and method == "acquire" and result:
                super().send((ident, "release", (), {}))
        self._call = call


def _may_wait(call: tuple[Any, ...]) -> bool:
    _, method, args, _ = call
    # a dictionary's `get` has a key
    return method in _WAITS and (method != "get" or not args or args[0] is True)


class ServedEnd(Connection):
    """A manager's end of a connection to a proxy."""

    _call: tuple[Any, ...] = (None, None)
    _held: Counter[Any] | None = None
    """Ident of a lock that only this thread can release -> how often it has it."""

    def recv(self) -> Any:
        """Receive a request."""
        while True:
            ident, method, args, named = super().recv()
            if method != _GIVE_BACK:
                self._call = ident, method
                return ident, method, args, named
            _put_first(_served(ident), *args)

    def send(self, obj: Any) -> None:
        """Send an answer."""
        try:
            super().send(obj)
        except (BrokenPipeError, ConnectionResetError):
            self._undo(obj)
            raise
        ident, method = self._call
        if ident is not None and method in ("acquire", "release") and obj[0] == "#RETURN":
            self._note_lock(ident, method, obj[1])

    def _note_lock(self, ident: Any, method: str, result: Any) -> None:
        if not isinstance(_served(ident), _OF_THREADS):
            return
        self._held = Counter() if self._held is None else self._held
        if method == "release":
            self._held[ident] -= 1
        elif result:
            self._held[ident] += 1

    def _undo(self, answer: Any) -> None:
        """Undo a call that no process awaits, and with it what only this thread can undo."""
        (ident, method), self._call = self._call, (None, None)
        if ident is None or answer[0] != "#RETURN":
            return
        served, result = _served(ident), answer[1]
        if method in _TAKES:
            _put_first(served, result)
        elif method == "acquire" and result:
            _release(served)
        held, self._held = self._held or Counter(), None
        for lock, count in held.items():
            for _ in range(count - (lock == ident and method == "release")):
                _release(_served(lock))


def _served(ident: Any) -> Any:
    server: Any = process.current_process()._manager_server  # type: ignore[attr-defined]
    found = server.id_to_obj.get(ident) or server.id_to_local_proxy_obj.get(ident)
    return None if found is None else found[0]


def _release(lock: Any) -> None:
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):  # gone, or released by another
        lock.release()


def _put_first(served: Any, item: Any) -> None:
    """Put an item back into a queue."""
    if not isinstance(served, queue.Queue):
        return
    with served.mutex:
        if type(served) is queue.Queue:
            served.queue.appendleft(item)
        else:
            served._put(item)
        served.not_empty.notify()
