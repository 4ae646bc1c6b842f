"""The household: processes that a notebook, a script or a rank starts itself, as clients of one supervisor.

::

    root K ──segments── supervisor           `RootSupervisor`: K's own, beside those of its sessions
      │ └─ fork, spawn, forkserver                 (a rank, or a member of a world, uses the one that it has)
      └── guest ──segments──┘                 `channel.introduce`: K introduces it, it announces itself
            └── guest ──segments──┘               and so on, to any depth

The root's supervisor is started on first need, without a template, and ends with it; `%parallel_stop` does
not touch it.  What guests send to each other goes through pipes that no supervisor sees; a
`SupervisorConnection` says how a message keeps alive what it refers to (`post`, `take`).  They end with K:
the supervisor sees to that, and the kernel if the supervisor was killed (`ParentSentinel`).
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.process import current_process
from multiprocessing.util import Finalize, get_temp_dir
from typing import TYPE_CHECKING

from nbparallel.channel import Channel, SegmentClient
from nbparallel.channel.channel import introduce, socket_of
from nbparallel.errors import ChannelClosedError, SupervisorDiedError
from nbparallel.multiprocessing.household.semaphore_names import name_semaphores
from nbparallel.wire.frames import Kind
from nbparallel.wire.inspection import IntroducedRow, LedgerRow, read_report
from nbparallel.wire.segments import CloseMailbox, Open, Post, Take, segment_id

if TYPE_CHECKING:
    from nbparallel.sharing import Store

# A pipe by which the kernel ends guests with their root, also when no supervisor is left to do so.
#
# The root alone has the writing end and never writes; it is closed when that process ends, however it ends.
# Each guest has the reading end under an open file of its own, for which it asked for a signal (fcntl(2):
# ``O_ASYNC``, ``F_SETSIG``): the kernel sends that when the last writing end is closed.  No thread waits.
#
# A parent-death signal would follow the thread that started the child; a pidfd gives no such signal.

_F_SETOWN_EX, _F_OWNER_PID, _OWNER = 15, 1, struct.Struct("ii")
"""Of <fcntl.h>.  With a number `fcntl.fcntl` fails within and tries again, which F_SETOWN would have to."""


class ParentSentinel:
    """The ends of the pipe that this process has.

    Parameters
    ----------
    reading : int
        Its reading end; owned.
    writing : int
        In the root its writing end, owned; -1 in a guest.
    """

    def __init__(self, reading: int, writing: int = -1) -> None:
        self.reading, self._writing = reading, writing
        self._poll = select.poll()
        self._poll.register(reading, 0)

    def disown(self) -> None:
        """Close the writing end in a process that was forked from the root."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def follow(self, pid: int) -> None:
        """Have this process, whose pid it is, end with the root: `prepared` made this for it.

        Raises
        ------
        ChannelClosedError
            The root has ended already.
        """
        fcntl.fcntl(self.reading, _F_SETOWN_EX, _OWNER.pack(_F_OWNER_PID, pid))
        if self._poll.poll(0):  # it was closed before the signal was asked for, perhaps
            raise ChannelClosedError("the process that started this one's family has ended")

    def close(self) -> None:
        """Close both ends: in the root this ends its guests."""
        self.disown()
        os.close(self.reading)


_own: list[ParentSentinel] = []
"""The one whose writing end this process has: at most one."""


def own_lifeline() -> ParentSentinel:
    """Return the one with which this process, as a root, ends its guests; made on first need."""
    if not _own:
        _own.append(ParentSentinel(*os.pipe2(os.O_CLOEXEC)))
    return _own[0]


def close_own_lifeline() -> None:
    """End the guests that are left (idempotent)."""
    while _own:
        _own.pop().close()


def prepared(reading: int) -> ParentSentinel | None:
    """Return what will end a process with the root, once that has called `ParentSentinel.follow`.

    Parameters
    ----------
    reading : int
        A reading end; it stays as it is.

    Returns
    -------
    ParentSentinel or None
        None where the system cannot do that (no /proc): then the supervisor alone ends that process.
    """
    try:
        # A copy is the same open file, whose signal goes to one process.
        own = os.open(f"/proc/self/fd/{reading}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_RDONLY | os.O_NONBLOCK | os.O_ASYNC)
    return ParentSentinel(own)


# SupervisorConnection: this process as a client of a supervisor, for messages in flight.


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
        self.mailboxes: dict[int, int] = {}
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
            if not self.mailboxes.get(mailbox):
                self.broker.send(Open(mailbox))
            self.mailboxes[mailbox] = self.mailboxes.get(mailbox, 0) + 1

    def close_mailbox(self, mailbox: int) -> None:
        """Record that it has closed one.  What lies in a pipe that no process can read is dropped."""
        with self._lock:
            left = self.mailboxes.get(mailbox, 0) - 1
            if left > 0:
                self.mailboxes[mailbox] = left
            elif self.mailboxes.pop(mailbox, None) is not None:
                self.broker.send(CloseMailbox(mailbox))

    def introduce(self, *, daemon: bool, inherits: bool = False) -> InheritedConnection:
        """Return what a process that is about to be started needs; see `InheritedConnection`."""
        return InheritedConnection(self, daemon=daemon, inherits=inherits)

    def fork(self, *, daemon: bool) -> Fork:
        """Prepare for a fork; see `Fork`."""
        return Fork(self, daemon=daemon)

    def next_id(self) -> int:
        """Return a new id of a parcel or a mailbox."""
        return segment_id(self.broker.client, next(self._serials))


_current: list[SupervisorConnection] = []
"""Of this process, or of the one that it was forked from: at most one."""


def current_membership() -> SupervisorConnection | None:
    """Return the membership that this process has; None if it has none yet."""
    for membership in _current:
        if membership.pid == os.getpid():
            return membership
    return None


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


PATIENCE_SECONDS = 1.0
"""Time for a report, which takes a millisecond."""


@dataclass(frozen=True, slots=True)
class HouseholdReport:
    """What the supervisor of a household knows."""

    processes: tuple[IntroducedRow, ...]
    """Its processes, but for this one, as they came."""
    segments: tuple[LedgerRow, ...]
    """Shared memory that they, or messages between them, hold."""
    supervisor: int
    """Its process id."""


class RootSupervisor:
    """A household's supervisor and the root's connection to it."""

    def __init__(self) -> None:
        from nbparallel.session.processes.launch import SupervisorLaunch
        from nbparallel.sharing import current_store

        store = current_store()
        # for sockets; a child inherits its parent's, which is not its own to remove
        folder = "" if current_process()._config.get("tempdir") else get_temp_dir()  # type: ignore[attr-defined]
        self._launch = SupervisorLaunch("spawn", folder=folder, semaphores=name_semaphores())
        self._number = 0
        try:
            broker = SegmentClient(self._launch.segments, client=0)
            self.member = SupervisorConnection(broker, own_lifeline())
            store.connect(self.member.broker, aside=True)
        except BaseException:
            self._launch.terminate()
            raise

    @property
    def ended(self) -> bool:
        """Whether its process has ended."""
        return self._launch.popen.poll() is not None

    def stop(self) -> None:
        """End it, and with it all processes of the household."""
        self.member.store.disconnect(self.member.broker)
        self._launch.terminate()

    def report(self) -> HouseholdReport | None:
        """Return what it knows; None if it does not answer within a second."""
        self._number += 1
        control, deadline = self._launch.control, time.monotonic() + PATIENCE_SECONDS
        try:
            control.send(Kind.LEDGER, sequence=self._number, abandon=lambda: time.monotonic() > deadline)
            while (left := deadline - time.monotonic()) > 0:
                frame = control.receive(left)
                if frame is None or frame.kind is not Kind.LEDGER or frame.sequence != self._number:
                    continue
                segments, processes = read_report(frame.payload)
                return HouseholdReport(processes, segments, self._launch.popen.pid)
        except ChannelClosedError:
            pass  # it has ended
        return None


_LAST = -100
"""Behind what multiprocessing does when a program ends: daemonic processes are ended, others waited for."""
_lock = threading.RLock()
_roots: dict[int, RootSupervisor] = {}
"""By the pid of the process that started it: in a forked child it is the parent's."""


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it
    while _own:
        _own.pop().disown()


os.register_at_fork(after_in_child=_after_fork)


def _root() -> RootSupervisor | None:
    return _roots.get(os.getpid())


def membership() -> SupervisorConnection:
    """Return this process's membership; a root's supervisor is started if there is none.

    Raises
    ------
    StartError
        The supervisor could not be started.
    SupervisorDiedError
        The supervisor of this process, which is no root, has ended.
    ForkedRankError
        This process was forked from another one, not through `Fork`.
    """
    member = current_membership()
    root = _root()
    if member is not None and (root is None or not root.ended):
        return member
    with _lock:
        return _begin()


def _begin() -> SupervisorConnection:
    from nbparallel.sharing import current_store

    store = current_store()
    if store.client:
        brokers = store.brokers
        if len(brokers) != 1 or not isinstance(brokers[0], SegmentClient):
            raise SupervisorDiedError(
                f"the supervisor of process {os.getpid()} has ended, so that it cannot send arrays any more"
            )
        name_semaphores()  # and the folder, for its fork server, which needs no lock
        member = SupervisorConnection(brokers[0], own_lifeline())
    else:
        root = _root()
        if root is not None and root.ended:
            _stop_supervisor()  # guests of the one that ended go on
            root = None
        if root is None:
            root = _roots[os.getpid()] = RootSupervisor()
            Finalize(None, stop, exitpriority=_LAST)
        member = root.member
    _current[:] = [member]
    return member


def stop() -> None:
    """End the household's supervisor and its processes, within 2 s, if this process has started it.

    The next need of one starts another (idempotent).
    """
    with _lock:
        if _root() is not None:
            _stop_supervisor()
            close_own_lifeline()


def _stop_supervisor() -> None:
    root = _roots.pop(os.getpid(), None)
    if root is not None:
        _current.clear()
        root.stop()


def report() -> HouseholdReport | None:
    """Return the processes and the memory of this process's household; None if it has started none."""
    with _lock:
        root = _root()
        return None if root is None or root.ended else root.report()


# Processes that this one starts become clients of its supervisor: introduced before they begin, or forked.
#
# A child that is forked holds what it has from its parent.  Without this it is inert: it can read the arrays
# that exist, whose memory may be used again under its eyes, and calls raise `ForkedRankError`.


class InheritedConnection:
    """What a process that is about to be started needs to be a guest; it is one for the supervisor already.

    Parameters
    ----------
    member : SupervisorConnection
        This process's membership.
    daemon : bool
        Whether that process ends with this one, however that ends; otherwise with the root process only.
    inherits : bool
        Whether it is forked, and holds from now on what this process holds now.

    Attributes
    ----------
    connection : socket
        Its end of its connection.
    lifeline : ParentSentinel or None
        Its end of the lifeline, under an open file of its own.
    parents : int
        This process's end of the lifeline; -1: there is none.

    Raises
    ------
    ChannelClosedError
        The supervisor has ended.
    """

    def __init__(self, member: SupervisorConnection, *, daemon: bool, inherits: bool = False) -> None:
        self.parents = -1 if member.lifeline is None else member.lifeline.reading
        self.lifeline = prepared(self.parents) if self.parents >= 0 else None
        try:
            self.connection = introduce(member.broker, daemon=daemon, inherits=inherits)
        except BaseException:
            if self.lifeline is not None:
                self.lifeline.close()
            raise

    def close(self) -> None:
        """Close this process's copies: the other one has them, or was not started."""
        self.connection.close()
        if self.lifeline is not None:
            self.lifeline.close()


def begin_as_guest(connection: int, *, lifeline: int = -1) -> SupervisorConnection:
    """Become a client of the supervisor of the process that has started, and introduced, this one.

    To be called before anything else: what uses shared memory earlier uses it without a session.

    Parameters
    ----------
    connection, lifeline : int
        Descriptors of what `InheritedConnection` has; owned.  Without a lifeline only the supervisor ends
        this process with the root.

    Raises
    ------
    ChannelClosedError
        The root has ended, or the supervisor, or it did not know of this process when its parent ended.
    RuntimeError
        This process is a client already.
    """
    from nbparallel.sharing import begin_in_session

    pid = os.getpid()
    line = ParentSentinel(lifeline) if lifeline >= 0 else None
    client = SegmentClient(Channel(socket_of(connection)), 0)
    try:
        if current_membership() is not None:
            raise RuntimeError(f"process {pid} is a client of a supervisor already")
        os.set_inheritable(connection, False)  # not every way of passing them on sees to that
        if line is not None:
            os.set_inheritable(lifeline, False)
            line.follow(pid)
        client.begin(pid)
    except BaseException:
        client.close()
        if line is not None:
            line.close()
        raise
    begin_in_session(client)
    member = SupervisorConnection(client, line)
    _current[:] = [member]
    return member


class Fork:
    """One fork, from before to after it: the child will hold what this process holds now.

    Exactly one of `parent` and `child` is called next, in the same thread: until then no other
    thread of the process can use shared arrays.

    What the child needs is made before the fork: each page that it touches has to be copied.

    Parameters
    ----------
    daemon : bool
        Whether the child ends with this process, however that ends; otherwise with the root process only.
    """

    def __init__(self, member: SupervisorConnection, *, daemon: bool) -> None:
        from nbparallel import sharing

        self._sharing, self._member, self._store = sharing, member, sharing.current_store()
        inherited = self._store.prepare_fork(member.broker)
        try:
            self._inherited = inherited or []
            holds = inherited is not None or bool(member.mailboxes)  # else the child has nothing to hold
            self._ends = member.introduce(daemon=daemon, inherits=holds)
        except BaseException:
            self._store.fork_done()
            raise
        client = SegmentClient(Channel(self._ends.connection), 0)
        self._child = SupervisorConnection(client, self._ends.lifeline)
        self._child.mailboxes = dict(member.mailboxes)

    def parent(self) -> None:
        """Go on in the parent, also after a fork that failed: the connection has no other end then."""
        self._store.fork_done()
        self._ends.close()

    def child(self) -> SupervisorConnection:
        """Become a client in the child, which has the arrays, and the reading ends, that its parent had.

        Raises
        ------
        ChannelClosedError
            The root or the supervisor has ended before.
        """
        parent, child, pid = self._member, self._child, os.getpid()
        if child.lifeline is not None:
            child.lifeline.follow(pid)
        child.broker.begin(pid)
        if self._ends.parents >= 0:
            os.close(self._ends.parents)
        parent.broker.close()  # the copy: otherwise the parent's would seem to live as long as this one
        self._sharing.begin_in_session(child.broker)
        if self._inherited:
            self._sharing.current_store().inherit(self._inherited, child.broker)
        child.pid = pid
        _current[:] = [child]
        return child
