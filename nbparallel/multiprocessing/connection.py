"""Pipes whose objects travel our way; everything else is the library's ``multiprocessing.connection``.

Each direction of a pipe has a *mailbox*: while a process has its reading end open, messages under way keep
their shared memory; when no process can read it any more, they are dropped.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import connection as library, reduction
from typing import Any, TypeVar

from nbparallel.multiprocessing.messages.parcels import (
    current_membership,
    join_household,
    note_carried,
    pickle_message,
    withdraw_parcel,
)


class Connection(library.Connection):  # no generic at run time
    """One end of a pipe.

    Parameters
    ----------
    inbox, outbox : int
        Mailboxes of what this end receives and sends; 0: none.  `inbox` is open in this process.
    """

    def __init__(
        self, handle: int, readable: bool = True, writable: bool = True, *, inbox: int = 0, outbox: int = 0
    ) -> None:
        super().__init__(handle, readable, writable)
        self.inbox, self.outbox = inbox, outbox

    def send(self, obj: Any) -> None:
        """Send an object: shared arrays as the same memory, what ``__main__`` defines by value.

        Raises
        ------
        UnpicklableError
            A part cannot be sent.
        SharedMemoryFullError, FileDescriptorLimitError
            A large array does not fit into shared memory.
        """
        self._check_closed()  # type: ignore[attr-defined]
        self._check_writable()  # type: ignore[attr-defined]
        data, parcel = pickle_message(obj, self.outbox)
        try:
            self._send_bytes(data)  # type: ignore[attr-defined]
        except BaseException:
            withdraw_parcel(parcel)
            raise

    def _close(self, _close: Any = os.close, _is_finalizing: Any = sys.is_finalizing) -> None:
        _close(self._handle)  # type: ignore[attr-defined]
        inbox, self.inbox = self.inbox, 0
        if inbox and not _is_finalizing() and (member := current_membership()) is not None:
            member.close_mailbox(inbox)


End = TypeVar("End", bound=Connection)


def adopt_end(end: library.Connection[Any, Any], kind: type[End], *, inbox: int = 0, outbox: int = 0) -> End:
    """Return our connection over the descriptor of one of the library's, which is then closed."""
    adopted = kind(end.fileno(), end.readable, end.writable, inbox=inbox, outbox=outbox)
    end._handle = None  # type: ignore[attr-defined]
    return adopted


def adopt_pipe(
    first: library.Connection[Any, Any], second: library.Connection[Any, Any]
) -> tuple[Connection, Connection]:
    """Return our connections over both ends of a pipe of the library's."""
    member = join_household()
    to_first = to_second = 0
    if member is not None:
        to_first = member.new_mailbox() if first.readable else 0
        to_second = member.new_mailbox() if second.readable else 0
    return (
        adopt_end(first, Connection, inbox=to_first, outbox=to_second),
        adopt_end(second, Connection, inbox=to_second, outbox=to_first),
    )


def Pipe(duplex: bool = True) -> tuple[Connection, Connection]:  # noqa: N802 - the library's name
    """Return the two ends of a pipe; without `duplex` the first receives and the second sends."""
    return adopt_pipe(*library.Pipe(duplex))


def Client(address: Any, family: str | None = None, authkey: bytes | None = None) -> Connection:  # noqa: N802
    """Return a connection to the listener at `address`, as the library does."""
    return adopt_end(library.Client(address, family, authkey), Connection)


class MessageListener(library.Listener):
    """A listening socket, as the library's, whose connections are ours."""

    def accept(self) -> Connection:
        """Wait for a connection and return it."""
        return adopt_end(super().accept(), Connection)


MessageListener.__name__ = MessageListener.__qualname__ = "Listener"
Listener = MessageListener


def _reduce_connection(end: Connection) -> tuple[Any, ...]:
    if end.inbox:
        note_carried(end.inbox)
    form = end.readable, end.writable, end.inbox, end.outbox
    return _rebuild_connection, (reduction.DupFd(end.fileno()), *form)


def _rebuild_connection(copy: Any, readable: bool, writable: bool, inbox: int, outbox: int) -> Connection:
    if inbox and (member := current_membership()) is not None:
        member.open_mailbox(inbox)
    return Connection(copy.detach(), readable, writable, inbox=inbox, outbox=outbox)


reduction.register(Connection, _reduce_connection)


def __getattr__(name: str) -> Any:
    return getattr(library, name)
