"""Managers whose messages travel our way; everything else is the library's ``multiprocessing.managers``.

With the library the answer to an interrupted call stays in the connection, and the next call takes it for
its own.  Here such a connection is shut, and the next call has another.  What the abandoned call does in the
manager stays done: an item that it takes is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import connection, managers as library, process
from multiprocessing.reduction import ForkingPickler
from typing import Any

from nbparallel.multiprocessing.connection import Connection, MessageListener, adopt_end
from nbparallel.multiprocessing.starting.process_state import (
    begin_interrupts,
    concrete_context,
    defers_sigint,
)


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


class _Serializer(str):
    """A name that brings this module along: a process that is given a proxy may not have imported it."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Serializer, (str(self),)


def _connect(address: Any, family: str | None = None, authkey: bytes | None = None) -> ProxyEnd:
    another = partial(connection.Client, address, family, authkey)
    end = adopt_end(another(), ProxyEnd)
    end.connect = another
    return end


SERIALIZER = _Serializer("nbparallel")
library.listener_client[SERIALIZER] = (MessageListener, _connect)  # type: ignore[attr-defined]


class BaseManager(library.BaseManager):
    """A process that holds objects, and what makes proxies of them."""

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

    @classmethod
    @defers_sigint
    def _run_server(cls, *args: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the library, but it drops one that came before
        begin_interrupts()
        super()._run_server(*args)  # type: ignore[misc]


class SyncManager(BaseManager, library.SyncManager):
    """A manager of the library's usual types: lists, dictionaries, queues, locks."""


class SharedMemoryManager(BaseManager, library.SharedMemoryManager):
    """A manager of blocks of `shared_memory`."""


def __getattr__(name: str) -> Any:
    return getattr(library, name)
