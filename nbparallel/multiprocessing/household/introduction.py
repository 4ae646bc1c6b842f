"""Introduction of a process that was started as a fresh interpreter, or by a fork server."""

from __future__ import annotations

import os

from nbparallel.channel.introduction import introduce as introduce_client
from nbparallel.multiprocessing.household.lifeline import follow
from nbparallel.multiprocessing.household.member import HouseholdMember, current_membership, set_current


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
    from nbparallel.sharing import Store, set_current_store

    if current_membership() is not None:
        for copy in (fd, *([lifeline] if lifeline >= 0 else [])):
            os.close(copy)
        raise RuntimeError(f"process {os.getpid()} is a client of a supervisor already")
    try:
        followed = follow(lifeline) if lifeline >= 0 else None
    except BaseException:
        os.close(fd)
        raise
    broker = introduce_client(fd, daemon=daemon)
    store = Store(broker.client)
    store.connect(broker)
    set_current_store(store)
    membership = HouseholdMember(broker, store, followed)
    set_current(membership)
    return membership
