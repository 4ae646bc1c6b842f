"""Managers whose messages travel our way; everything else is the library's ``multiprocessing.managers``.

With the library the answer to an interrupted call stays in the connection, and the next call takes it for
its own.  Here such a connection is shut, and the next call has another.  What the manager cannot answer any
more it undoes: an item goes back to its queue, a lock is free.  So it is where the caller was killed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing import connection, process
from multiprocessing import managers as library
from multiprocessing.reduction import ForkingPickler
from typing import Any

from nbparallel.multiprocessing.connection import Connection, adopt_end
from nbparallel.multiprocessing.starting.interrupts import begin_interrupts, late_interrupts
from nbparallel.multiprocessing.starting.process_state import concrete_context

_TAKES = frozenset({"get", "get_nowait"})
_OF_THREADS = type(threading.RLock()), threading.Condition
"""Locks that only the thread releases that has them."""


class ProxyEnd(Connection):
    """A proxy's end of a connection to its manager.

    Attributes
    ----------
    connect : callable
        Returns another connection to the manager.
    """

    connect: Callable[[], Any]
    _asked = False
    """Whether a call has no answer yet."""

    def _send_bytes(self, buf: Any) -> None:
        if self._asked:
            self._renew()
        self._asked = True
        super()._send_bytes(buf)  # type: ignore[misc]

    def recv(self) -> Any:
        """Receive the answer."""
        try:
            data = self._recv_bytes()  # type: ignore[attr-defined]
        except EOFError:  # the manager has ended; what comes next says what the library's says
            self._asked = False
            raise
        except BaseException:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
            raise
        self._asked = False
        with data.getbuffer() as view:
            return ForkingPickler.loads(view)

    def _renew(self) -> None:
        fresh = self.connect()
        name = f"{process.current_process().name}|{threading.current_thread().name}"
        library.dispatch(fresh, None, "accept_connection", (name,))  # type: ignore[attr-defined]
        # no call in between, so that no signal's handler runs
        self._handle, fresh._handle = fresh._handle, self._handle
        self._asked = False
        fresh.close()


class ServedEnd(Connection):
    """A manager's end of a connection to a proxy."""

    _call: tuple[Any, ...] = (None, None)
    _held: Counter[Any] | None = None
    """Ident of a lock that only this thread can release -> how often it has it."""

    def recv(self) -> Any:
        """Receive a request."""
        request = super().recv()
        self._call = request[:2]
        return request

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


class _Serializer(str):
    """A name that brings this module along: a process that is given a proxy may not have imported it."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Serializer, (str(self),)


class _Listener(connection.Listener):
    def accept(self) -> ServedEnd:
        return adopt_end(super().accept(), ServedEnd)


def _connect(address: Any, family: str | None = None, authkey: bytes | None = None) -> ProxyEnd:
    another = partial(connection.Client, address, family, authkey)
    end = adopt_end(another(), ProxyEnd)
    end.connect = another
    return end


SERIALIZER = _Serializer("nbparallel")
library.listener_client[SERIALIZER] = (_Listener, _connect)  # type: ignore[attr-defined]


class _Accepting:
    """A server that goes on accepting when a thread cannot be started: the library's never accepts again."""

    listener: Any
    handle_request: Any

    def accepter(self) -> None:
        """Serve each connection in a thread of its own."""
        while True:
            try:
                end = self.listener.accept()
            except OSError:
                continue
            try:
                threading.Thread(target=self.handle_request, args=(end,), daemon=True).start()
            except (RuntimeError, MemoryError):  # no memory, or too many threads
                end.close()  # the caller has an EOFError


class _Server(_Accepting, library.Server):
    """The server of `BaseManager`."""


class _SharedMemoryServer(_Accepting, library.SharedMemoryServer):
    """The server of `SharedMemoryManager`."""


class BaseManager(library.BaseManager):
    """A process that holds objects, and what makes proxies of them."""

    _Server: Any = _Server

    def __init__(
        self,
        address: Any = None,
        authkey: bytes | None = None,
        serializer: str = SERIALIZER,
        ctx: Any = None,
        **options: Any,
    ) -> None:
        if serializer == "pickle":
            serializer = SERIALIZER
        super().__init__(address, authkey, serializer, ctx or concrete_context(), **options)

    def start(self, *args: Any, **named: Any) -> None:
        """Start the process that holds the objects; interrupts do not reach it."""
        with late_interrupts():
            super().start(*args, **named)

    @classmethod
    def _run_server(cls, *args: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the library, but it drops one that came before
        begin_interrupts()
        super()._run_server(*args)  # type: ignore[misc]


class SyncManager(BaseManager, library.SyncManager):
    """A manager of the library's usual types: lists, dictionaries, queues, locks."""


class SharedMemoryManager(BaseManager, library.SharedMemoryManager):
    """A manager of blocks of `shared_memory`."""

    _Server: Any = _SharedMemoryServer


def __getattr__(name: str) -> Any:
    return getattr(library, name)
