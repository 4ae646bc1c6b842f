"""Forking: a child that holds what it has from its parent, and is a client itself.

Without this a forked child is inert: it can read the arrays that exist, whose memory may be used again under
its eyes, and calls raise `ForkedRankError`.
"""

from __future__ import annotations

import contextlib
import os

from nbparallel.errors import ChannelClosedError
from nbparallel.multiprocessing.household.introduction import introduce_followed
from nbparallel.multiprocessing.household.member import HouseholdMember, set_current
from nbparallel.multiprocessing.household.root_supervisor import membership


class Fork:
    """One fork, from before to after it; `prepare_fork` makes it.

    Exactly one of `parent`, `child` and `cancel` is called next, in the same thread: until then no other
    thread of the process can use shared arrays.
    """

    def __init__(self, member: HouseholdMember, *, daemon: bool) -> None:
        self._member, self._daemon = member, daemon
        inherited = member.store.bequeath(member.broker)
        self._inherited, self._parcel = inherited or [], 0
        try:
            if inherited is not None or member.reads_mail:  # else the child has nothing to hold
                parcel = member.next_id()
                member.broker.forking(parcel)
                self._parcel = parcel
        except BaseException:
            member.store.fork_done()
            raise

    def parent(self, pid: int) -> None:
        """Go on in the parent; `pid` is the child's, which has not been waited for."""
        self._member.store.fork_done()
        if not self._parcel:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended, and SIGCHLD is ignored
            self._complete(None)
            return
        except OSError:  # there is no descriptor left: what it does not claim stays until this process ends
            return
        try:
            self._complete(pidfd)
        finally:
            os.close(pidfd)

    def _complete(self, pidfd: int | None) -> None:
        # The child finds out by itself that the supervisor has ended.
        with contextlib.suppress(ChannelClosedError):
            self._member.broker.fork_done(self._parcel, pidfd)

    def cancel(self) -> None:
        """Go on after a fork that failed."""
        self._member.store.fork_done()
        if self._parcel:
            self._complete(None)

    def child(self) -> HouseholdMember:
        """Become a client in the child, which has the arrays, and the reading ends, that its parent had.

        Raises
        ------
        ChannelClosedError
            The parent or the supervisor has ended meanwhile.
        """
        from nbparallel.sharing import begin_in_session, current_store

        parent = self._member
        end = -1 if parent.lifeline is None else parent.lifeline.fileno()
        try:
            broker, lifeline = introduce_followed(
                os.dup(parent.fileno()), end, daemon=self._daemon, parcel=self._parcel
            )
        finally:
            parent.broker.close()  # the copy: otherwise the parent's would seem to live as long as this one
        begin_in_session(broker)
        if self._inherited:
            current_store().inherit(self._inherited, broker)
        member = HouseholdMember(broker, lifeline)
        member.inherit_mailboxes(parent)
        set_current(member)
        return member


def prepare_fork(*, daemon: bool) -> Fork:
    """Prepare for a fork: the child will hold what this process holds now.

    Parameters
    ----------
    daemon : bool
        Whether the child ends with this process, however that ends; otherwise with the root process only.

    Raises
    ------
    ChannelClosedError
        The supervisor has ended.
    """
    return Fork(membership(), daemon=daemon)
