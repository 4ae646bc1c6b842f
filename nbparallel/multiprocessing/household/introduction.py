"""Processes that this one starts become clients of its supervisor: introduced before they begin, or forked.

A child that is forked holds what it has from its parent.  Without this it is inert: it can read the arrays
that exist, whose memory may be used again under its eyes, and calls raise `ForkedRankError`.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

from nbparallel.channel.introduction import IntroducedClient, introduce, socket_of
from nbparallel.errors import ChannelClosedError
from nbparallel.multiprocessing.household.lifeline import Lifeline, prepared
from nbparallel.multiprocessing.household.member import HouseholdMember, current_membership, set_current
from nbparallel.multiprocessing.household.root_supervisor import membership

T = TypeVar("T")


class GuestEnds:
    """What a process that is about to be started needs to be a guest; it is one for the supervisor already.

    Parameters
    ----------
    member : HouseholdMember
        This process's membership.
    daemon : bool
        Whether that process ends with this one, however that ends; otherwise with the root process only.
    inherits : bool
        Whether it is forked, and holds from now on what this process holds now.

    Attributes
    ----------
    connection : socket
        Its end of its connection.
    lifeline : Lifeline or None
        Its end of the lifeline, under an open file of its own.
    parents : int
        This process's end of the lifeline; -1: there is none.

    Raises
    ------
    ChannelClosedError
        The supervisor has ended.
    """

    def __init__(self, member: HouseholdMember, *, daemon: bool, inherits: bool = False) -> None:
        self.parents = -1 if member.lifeline is None else member.lifeline.fileno()
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


def with_membership(begin: Callable[[HouseholdMember], T]) -> T:
    """Return what `begin` does with this process's membership, a root's new one if its supervisor has ended.

    Raises
    ------
    StartError
        The supervisor could not be started.
    ChannelClosedError
        The supervisor of this process, which is no root, has ended.
    ForkedRankError
        This process was forked from another one, not through `prepare_fork`.
    """
    member = current_membership() or membership()
    try:
        return begin(member)
    except ChannelClosedError:
        another = membership()
        if another is member:
            raise
        return begin(another)


def introduce_guest(*, daemon: bool) -> GuestEnds:
    """Introduce a process that is about to be started in a fresh interpreter, or by a fork server.

    Parameters and errors are those of `GuestEnds` and `with_membership`.
    """
    return with_membership(lambda member: GuestEnds(member, daemon=daemon))


def begin_as_guest(connection: int, *, lifeline: int = -1) -> HouseholdMember:
    """Become a client of the supervisor of the process that has started, and introduced, this one.

    To be called before anything else: what uses shared memory earlier uses it without a session.

    Parameters
    ----------
    connection, lifeline : int
        Descriptors of what `GuestEnds` has; owned.  Without a lifeline only the supervisor ends this process
        with the root.

    Raises
    ------
    ChannelClosedError
        The root has ended, or the supervisor, or it did not know of this process when its parent ended.
    RuntimeError
        This process is a client already.
    """
    from nbparallel.sharing import begin_in_session

    pid = os.getpid()
    line = Lifeline(lifeline) if lifeline >= 0 else None
    client = IntroducedClient(socket_of(connection))
    try:
        if current_membership() is not None:
            raise RuntimeError(f"process {pid} is a client of a supervisor already")
        os.set_inheritable(connection, False)  # not every way of passing them on sees to that
        if line is not None:
            os.set_inheritable(lifeline, False)
            line.follow(pid)
        broker = client.begin(pid)
    except BaseException:
        client.close()
        if line is not None:
            line.close()
        raise
    begin_in_session(broker)
    member = HouseholdMember(broker, line)
    set_current(member)
    return member


@functools.cache
def _sharing() -> Any:
    return importlib.import_module("nbparallel.sharing")  # importing this package is cheap


class Fork:
    """One fork, from before to after it; `prepare_fork` makes it.

    Exactly one of `parent` and `child` is called next, in the same thread: until then no other
    thread of the process can use shared arrays.

    What the child needs is made before the fork: each page that it touches has to be copied.
    """

    def __init__(self, member: HouseholdMember, *, daemon: bool) -> None:
        self._sharing = _sharing()
        self._member, self._store = member, self._sharing.current_store()
        inherited = self._store.bequeath(member.broker)
        try:
            self._inherited = inherited or []
            holds = inherited is not None or member.reads_mail  # else the child has nothing to hold
            self._ends = GuestEnds(member, daemon=daemon, inherits=holds)
        except BaseException:
            self._store.fork_done()
            raise
        self._connected = IntroducedClient(self._ends.connection)
        self._child = HouseholdMember(self._connected.client, self._ends.lifeline)
        self._child.inherit_mailboxes(member)

    def parent(self) -> None:
        """Go on in the parent, also after a fork that failed: the connection has no other end then."""
        self._store.fork_done()
        self._ends.close()

    def child(self) -> HouseholdMember:
        """Become a client in the child, which has the arrays, and the reading ends, that its parent had.

        Raises
        ------
        ChannelClosedError
            The root or the supervisor has ended before.
        """
        parent, child, pid = self._member, self._child, os.getpid()
        if child.lifeline is not None:
            child.lifeline.follow(pid)
        broker = self._connected.begin(pid)
        if self._ends.parents >= 0:
            os.close(self._ends.parents)
        parent.broker.close()  # the copy: otherwise the parent's would seem to live as long as this one
        self._sharing.begin_in_session(broker)
        if self._inherited:
            self._sharing.current_store().inherit(self._inherited, broker)
        child.pid = pid
        set_current(child)
        return child


def prepare_fork(*, daemon: bool) -> Fork:
    """Prepare for a fork: the child will hold what this process holds now.

    Parameters
    ----------
    daemon : bool
        Whether the child ends with this process, however that ends; otherwise with the root process only.

    Raises
    ------
    StartError, ChannelClosedError, ForkedRankError
        As `with_membership` does.
    """
    return with_membership(lambda member: Fork(member, daemon=daemon))
