"""Managers whose messages travel our way; everything else is the library's ``multiprocessing.managers``."""

from __future__ import annotations

import signal
import threading
from functools import partial
from multiprocessing import connection
from multiprocessing import managers as library
from typing import Any

from nbparallel.multiprocessing.connection import adopt_end
from nbparallel.multiprocessing.starting.current_context import concrete_context
from nbparallel.multiprocessing.starting.late_interrupts import begin_interrupts, late_interrupts
from nbparallel.multiprocessing.workers.manager_calls import ProxyEnd, ServedEnd


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
