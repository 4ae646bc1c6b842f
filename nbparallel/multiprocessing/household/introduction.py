"""Introduction of a process that was started as a fresh interpreter, or by a fork server."""

from __future__ import annotations

import os

from nbparallel.channel import SegmentClient
from nbparallel.channel.introduction import await_welcome, send_introduction
from nbparallel.multiprocessing.household.lifeline import Lifeline, follow
from nbparallel.multiprocessing.household.member import HouseholdMember, current_membership, set_current


def introduce_followed(
    fd: int, lifeline: int, *, daemon: bool, parcel: int = 0
) -> tuple[SegmentClient, Lifeline | None]:
    """Become a client, and have this process end with the root, while the supervisor answers.

    `lifeline` is a copy, or -1: there is none.  Both descriptors are closed in any case.
    """
    try:
        channel = send_introduction(fd, daemon=daemon, parcel=parcel)
    except BaseException:
        if lifeline >= 0:
            os.close(lifeline)
        raise
    followed = None
    try:
        followed = follow(lifeline) if lifeline >= 0 else None
        return await_welcome(channel), followed
    except BaseException:
        channel.close()
        if followed is not None:
            followed.close()
        raise


def introduce(fd: int, *, daemon: bool, lifeline: int = -1) -> HouseholdMember:
    """Become a client of the supervisor of the process that has started this one.

    To be called before anything else: what uses shared memory earlier uses it without a session.

    Parameters
    ----------
    fd : int
        Copy of `HouseholdMember.fileno` of that process; closed in any case.
    daemon : bool
        Whether this process ends with that one, however that ends; otherwise with the root process only.
    lifeline : int, optional
        Copy of `Lifeline.fileno` of that process; closed in any case.  Without it only the supervisor ends
        this process with the root.

    Raises
    ------
    ChannelClosedError
        That process has ended, the root, or the supervisor.
    RuntimeError
        This process is a client already.
    """
    from nbparallel.sharing import begin_in_session

    if current_membership() is not None:
        for copy in (fd, *([lifeline] if lifeline >= 0 else [])):
            os.close(copy)
        raise RuntimeError(f"process {os.getpid()} is a client of a supervisor already")
    broker, followed = introduce_followed(fd, lifeline, daemon=daemon)
    begin_in_session(broker)
    membership = HouseholdMember(broker, followed)
    set_current(membership)
    return membership
