"""SupervisorConnection: this process as a client of a supervisor, for messages in flight."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from nbparallel.channel import SegmentClient
from nbparallel.errors import ChannelClosedError, SupervisorDiedError
from nbparallel.wire.parcels import CloseMailbox, Open, Post, Take
from nbparallel.wire.segments import segment_id

if TYPE_CHECKING:
    from nbparallel.multiprocessing.household.lifeline import ParentSentinel
    from nbparallel.sharing import Store


class SupervisorConnection:
    """What a process needs to send arrays through pipes, and to start processes that can.

    Attributes
    ----------
    broker : SegmentClient
        The connection to the supervisor; pass it on as ``broker=``.
    lifeline : ParentSentinel or None
        What ends this process's guests, or this guest, with the root.

    Notes
    -----
    Thread-safe.  No method waits for an answer of the supervisor.  All raise `ChannelClosedError` when it has
    ended (`supervised` makes that a `SupervisorDiedError`), and `ForkedRankError` in a forked child.
    """

    def __init__(self, broker: SegmentClient, lifeline: ParentSentinel | None) -> None:
        self.broker, self.lifeline = broker, lifeline
        self.pid = os.getpid()
        self._serials = itertools.count(1)
        self._lock = threading.RLock()
        self._open: dict[int, int] = {}
        """Mailbox -> how many reading ends this process has."""

    @property
    def store(self) -> Store:
        """The arrays of this process."""
        from nbparallel.sharing import current_store

        return current_store()

    # messages

    def post(self, segments: Iterable[int], *, mailbox: int = 0, carried: Iterable[int] = ()) -> int:
        """Let a message hold what it refers to, from now until it is taken; return its parcel.

        To be called after the message was pickled and before it is written, while the arrays are there.

        Parameters
        ----------
        segments : iterable of int
            Ids of segments, as `transfer.pickling.Pickled` lists them.
        mailbox : int, optional
            Of the pipe that it goes through.  With 0 it is held until it is taken, or until 10 s after this
            process has ended.
        carried : iterable of int
            Mailboxes whose reading ends travel in the message.

        Returns
        -------
        int
            To be written with the message; 0 if there is nothing to be held.
        """
        segments, carried = tuple(segments), tuple(carried)
        if not segments and not carried:
            return 0
        parcel = self.next_id()
        self.broker.send(Post(parcel, mailbox, segments, carried))
        self.store.mark_posted(segments)
        return parcel

    def take(self, parcel: int) -> None:
        """Record that a message was received, or will not be written: this process holds what it wants of it.

        To be called before any other process learns that it was.  0 is none.
        """
        if parcel:
            self.broker.send(Take(parcel))

    # mailboxes

    def new_mailbox(self) -> int:
        """Return the id of a new pipe, of which this process has a reading end."""
        mailbox = self.next_id()
        self.open_mailbox(mailbox)
        return mailbox

    def open_mailbox(self, mailbox: int) -> None:
        """Record that this process has another reading end of a pipe."""
        with self._lock:
            if not self._open.get(mailbox):
                self.broker.send(Open(mailbox))
            self._open[mailbox] = self._open.get(mailbox, 0) + 1

    def close_mailbox(self, mailbox: int) -> None:
        """Record that it has closed one.  What lies in a pipe that no process can read is dropped."""
        with self._lock:
            left = self._open.get(mailbox, 0) - 1
            if left > 0:
                self._open[mailbox] = left
            elif self._open.pop(mailbox, None) is not None:
                self.broker.send(CloseMailbox(mailbox))

    @property
    def reads_mail(self) -> bool:
        """Whether this process has a reading end of any pipe."""
        return bool(self._open)

    def inherit_mailboxes(self, parent: SupervisorConnection) -> None:
        """Have the reading ends that a forked child has from its parent."""
        self._open = dict(parent._open)

    def next_id(self) -> int:
        """Return a new id of a parcel or a mailbox."""
        return segment_id(self.broker.client, next(self._serials))

    def close(self) -> None:
        """Leave: all holds of this process end (idempotent)."""
        self.store.disconnect(self.broker)
        self.broker.close()


_current: list[SupervisorConnection] = []
"""Of this process, or of the one that it was forked from: at most one."""


def current_membership() -> SupervisorConnection | None:
    """Return the membership that this process has; None if it has none yet."""
    for membership in _current:
        if membership.pid == os.getpid():
            return membership
    return None


def set_current(membership: SupervisorConnection | None) -> None:
    """Make it the one of this process."""
    _current[:] = [] if membership is None else [membership]


@contextlib.contextmanager
def supervised() -> Iterator[None]:
    """Raise `SupervisorDiedError` where the supervisor turns out to have ended."""
    try:
        yield
    except ChannelClosedError as error:
        raise SupervisorDiedError(
            "the supervisor of these processes has ended, so that arrays can no longer be sent between them; "
            "other messages still can. Start the processes again"
        ) from error
