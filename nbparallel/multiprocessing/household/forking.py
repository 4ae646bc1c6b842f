"""Forking: a child that holds what it has from its parent, and is a client itself.

Without this a forked child is inert: it can read the arrays that exist, whose memory may be used again under
its eyes, and calls raise `ForkedRankError`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from typing import Any

from nbparallel.channel.introduction import IntroducedClient
from nbparallel.errors import ChannelClosedError
from nbparallel.multiprocessing.household.introduction import GuestEnds, with_membership
from nbparallel.multiprocessing.household.member import HouseholdMember, set_current


@functools.cache
def _sharing() -> Any:
    return importlib.import_module("nbparallel.sharing")  # importing this package is cheap


class Fork:
    """One fork, from before to after it; `prepare_fork` makes it.

    Exactly one of `parent`, `child` and `cancel` is called next, in the same thread: until then no other
    thread of the process can use shared arrays.

    What the child needs is made before the fork: each page that it touches has to be copied.
    """

    def __init__(self, member: HouseholdMember, *, daemon: bool) -> None:
        self._sharing = _sharing()
        self._member, self._store = member, self._sharing.current_store()
        inherited = self._store.bequeath(member.broker)
        try:
            self._inherited = inherited or []
            self._holds = inherited is not None or member.reads_mail  # else the child has nothing to hold
            self._ends = GuestEnds(member, daemon=daemon, inherits=self._holds)
        except BaseException:
            self._store.fork_done()
            raise
        self._connected = IntroducedClient(self._ends.connection)
        self._child = HouseholdMember(self._connected.client, self._ends.lifeline)
        self._child.inherit_mailboxes(member)

    def parent(self, pid: int) -> None:
        """Go on in the parent; `pid` is the child's, which has not been waited for."""
        self._close()
        if not self._holds:
            return  # the child sends its identity, and if it cannot, nothing is kept for it
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended, and SIGCHLD is ignored
            self._complete(None)
            return
        except OSError:  # there is no descriptor left
            return
        try:
            self._complete(pidfd)
        finally:
            os.close(pidfd)

    def _complete(self, pidfd: int | None) -> None:
        # The child finds out by itself that the supervisor has ended.
        with contextlib.suppress(ChannelClosedError):
            self._member.broker.fork_done(self._ends.process, pidfd)

    def _close(self) -> None:
        self._store.fork_done()
        self._ends.close()

    def cancel(self) -> None:
        """Go on after a fork that failed."""
        self._close()
        if self._holds:
            self._complete(None)

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
