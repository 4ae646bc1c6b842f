"""The root's supervisor: that of a notebook's or script's own processes, apart from its sessions.

It is started on first need, without a template, and ends with this process; `%parallel_stop` does not touch
it.  A rank, or a member of a world that another program started, uses the supervisor that it has.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from multiprocessing.process import current_process
from multiprocessing.util import Finalize, get_temp_dir

from nbparallel.channel import SegmentClient
from nbparallel.errors import ChannelClosedError, SupervisorDiedError
from nbparallel.multiprocessing.household.lifeline import close_own_lifeline, own_lifeline
from nbparallel.multiprocessing.household.member import HouseholdMember, current_membership, set_current
from nbparallel.multiprocessing.household.semaphore_names import name_semaphores
from nbparallel.wire.frames import Kind
from nbparallel.wire.inspection import IntroducedRow, LedgerRow, read_report

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


def _new_folder() -> str:
    """Make multiprocessing's temporary folder of this process, for sockets; empty: there is one already."""
    # a child inherits its parent's, which is not its own to remove
    return "" if current_process()._config.get("tempdir") else get_temp_dir()  # type: ignore[attr-defined]


class RootSupervisor:
    """A household's supervisor and the root's connection to it."""

    def __init__(self) -> None:
        from nbparallel.session.processes.launch import SupervisorLaunch
        from nbparallel.sharing import current_store

        store = current_store()
        self._launch = SupervisorLaunch("spawn", folder=_new_folder(), semaphores=name_semaphores())
        self._number = 0
        try:
            broker = SegmentClient(self._launch.segments, client=0)
            self.member = HouseholdMember(broker, own_lifeline())
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
_at_exit: list[Finalize] = []
"""What stops the supervisor then: at most one."""
_lock = threading.RLock()
_roots: dict[int, RootSupervisor] = {}
"""By the pid of the process that started it: in a forked child it is the parent's."""


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


def _root() -> RootSupervisor | None:
    return _roots.get(os.getpid())


def membership() -> HouseholdMember:
    """Return this process's membership; a root's supervisor is started if there is none.

    Raises
    ------
    StartError
        The supervisor could not be started.
    SupervisorDiedError
        The supervisor of this process, which is no root, has ended.
    ForkedRankError
        This process was forked from another one, not through `prepare_fork`.
    """
    member = current_membership()
    root = _root()
    if member is not None and (root is None or not root.ended):
        return member
    with _lock:
        return _begin()


def _begin() -> HouseholdMember:
    from nbparallel.sharing import current_store

    store = current_store()
    if store.client:
        brokers = store.brokers
        if len(brokers) != 1 or not isinstance(brokers[0], SegmentClient):
            raise SupervisorDiedError(
                f"the supervisor of process {os.getpid()} has ended, so that it cannot send arrays any more"
            )
        name_semaphores()  # and the folder, for its fork server, which needs no lock
        member = HouseholdMember(brokers[0], own_lifeline())
    else:
        root = _root()
        if root is not None and root.ended:
            _stop_supervisor()  # guests of the one that ended go on
            root = None
        if root is None:
            root = _roots[os.getpid()] = RootSupervisor()
            _at_exit[:] = [Finalize(None, stop, exitpriority=_LAST)]
        member = root.member
    set_current(member)
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
        set_current(None)
        while _at_exit:
            _at_exit.pop().cancel()
        root.stop()


def report() -> HouseholdReport | None:
    """Return the processes and the memory of this process's household; None if it has started none."""
    with _lock:
        root = _root()
        return None if root is None or root.ended else root.report()
