"""Process group: one process of a script as a rank of a world, from joining it to leaving it.

For the operations the whole script is one cell: after a failure no operation is possible until the process
has left the world and joined another one.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
from collections.abc import Callable
from types import FrameType, TracebackType

import numpy as np

from nbparallel import sharing
from nbparallel.channel.segment_client import SegmentClient
from nbparallel.distributed.bootstrap.init_method import InitMethod
from nbparallel.distributed.bootstrap.rendezvous import Admission, arrive_and_wait, meet_at_supervisor
from nbparallel.distributed.communicator import Communicator
from nbparallel.distributed.runtime.supervisor_liveness import SupervisorLiveness
from nbparallel.errors import ChannelClosedError, ForkedRankError, SupervisorDiedError
from nbparallel.sharing import Store
from nbparallel.wire.frames import Kind
from nbparallel.wire.parcels import FIRST_GUEST, LeaveWorld
from nbparallel.wire.rendezvous import Join, client_of

CELL = 1
"""A script is one cell."""


class ProcessGroup:
    """The membership of this process; made by `join`.

    Owns its connection and its communicator; the store, which belongs to the process, is client rank + 1 of
    the world while it lasts.  In a forked child all of it is inert.

    Parameters
    ----------
    host : SegmentClient, optional
        Of a guest: its connection to its supervisor, which hosts the world.  The store stays what it is.
    """

    def __init__(
        self, admission: Admission, rank: int, filename: str, host: SegmentClient | None = None
    ) -> None:
        self._pid = os.getpid()
        joined = admission.joined
        world_size = len(joined.members)
        self._host, self._channel = host, admission.channel
        self._liveness = SupervisorLiveness(admission.supervisor, joined.members)
        self._store = _store()
        if host is None:
            self._broker = SegmentClient(admission.channel, client=client_of(rank))
            self._store.renumber(self._broker.client)
            self._store.connect(self._broker)
        try:
            self.communicator = Communicator(
                admission.control,
                rank,
                world_size,
                self._store,
                epoch=1,
                usable_cpus=joined.usable_cpus,
                liveness_check=self._liveness,
            )
        finally:
            os.close(admission.control)
        self.communicator.begin_cell(CELL, tuple(range(world_size)), filename)
        self._left = False
        self._hook = sys.excepthook
        self._our_hook = self._on_exception  # one object: a bound method is a new one each time
        sys.excepthook = self._our_hook
        self._at_end = _call_at_end(self._at_exit)

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that joined, and not a forked child of it."""
        return os.getpid() == self._pid

    def leave(self, failure: BaseException | None = None) -> None:
        """Leave the world (idempotent).

        What was sent and not received yet stays receivable.  Ranks that wait for this one in an operation get
        an error.

        Raises
        ------
        NbParallelError
            A collective that was begun with ``async_op=True`` could not be finished.
        """
        if self._left or not self.is_ours:
            return
        self._left = True
        try:
            if failure is None:
                self.communicator.finish_cell()
        except BaseException as error:
            failure = error
            raise
        finally:
            self._disconnect(failure)

    def _disconnect(self, failure: BaseException | None) -> None:
        self._at_end()
        if sys.excepthook is self._our_hook:
            sys.excepthook = self._hook
        self.communicator.end_cell(failure)
        for forgotten in self.communicator.forgotten if failure is None else ():
            sys.stderr.write(f"nbparallel: {forgotten}; keep what it returns and call wait()\n")
        for unreleased in self.communicator.unreleased if failure is None else ():
            sys.stderr.write(f"nbparallel: {unreleased}\n")
        if self._host is None:
            self._disconnect_own()
        else:
            try:
                self._host.send(LeaveWorld())  # before arrays die that other ranks have not received yet
            except ChannelClosedError:
                pass  # the supervisor has ended, which the ranks that wait notice by themselves
            self.communicator.close()
            self._channel.close()
        self._liveness.close()

    def _disconnect_own(self) -> None:
        # In this order: arrays that die after the store has left are not released at the supervisor,
        # which keeps them for ranks that have not received them yet.
        self._store.disconnect(self._broker)
        self.communicator.close()
        self._store.renumber(0)
        try:
            self._channel.send(Kind.LEAVE_WORLD, abandon=lambda: self._liveness.lost() is not None)
        except ChannelClosedError:
            pass  # the supervisor has ended, which the ranks that wait notice by themselves
        self._broker.close()

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Leave, so that the other ranks get an error immediately, and show the exception as usual."""
        hook = self._hook
        self.leave(error)
        hook(kind, error, trace)

    def _at_exit(self) -> None:
        self.leave(_in_flight())


def _in_flight() -> BaseException | None:
    """Return the exception with which the function of a process of multiprocessing has ended."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.__context__ if error.code not in (None, 0) else None
    return error


def _call_at_end(function: Callable[[], None]) -> Callable[[], object]:
    """Call a function when the program ends; return what takes that back."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        from multiprocessing.util import Finalize

        # Some of its processes end without the interpreter's own functions, and none calls sys.excepthook.
        return Finalize(None, function, exitpriority=0).cancel
    atexit.register(function)
    return lambda: atexit.unregister(function)


def join(method: InitMethod, seconds: float, caller: FrameType | None) -> ProcessGroup:
    """Wait for the other processes, and return the membership; errors as `arrive_and_wait`."""
    host = _host(_store())
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    join = Join(method.rank, method.world_size, _versions(), tuple(sorted(cpus)))
    if host is None:
        admission = arrive_and_wait(method.place, join, seconds)
    else:
        admission = meet_at_supervisor(host, method.place, join, seconds)
    return ProcessGroup(admission, method.rank, _script(caller), host)


def _host(store: Store) -> SegmentClient | None:
    """Return a guest's connection to its supervisor; None: this process is no client of any.

    Raises
    ------
    RuntimeError
        It is a client that cannot be a rank.
    SupervisorDiedError
        Its supervisor has ended.
    """
    if store.client >= FIRST_GUEST:
        for broker in store.brokers:
            if isinstance(broker, SegmentClient):
                return broker
        raise SupervisorDiedError(
            f"the supervisor of process {os.getpid()} has ended, so that it can meet no other process"
        )
    if store.brokers:
        raise RuntimeError(
            "this process has a session of its own, whose ranks are connected already: stop it before "
            "init_process_group(), which is for scripts"
        )
    if store.connected():
        raise RuntimeError(
            "this process has queues, pools or processes of nbparallel.multiprocessing: those processes can "
            "be ranks of a world, this one cannot. Start a process for this rank too, or call "
            "init_process_group() before the first of them"
        )
    return None


def _store() -> Store:
    """Return the store of this process; a new one if it was forked: its parent's is inert here."""
    try:
        return sharing.current_store()
    except ForkedRankError:
        store = Store()
        sharing.set_current_store(store)
        return store


def _versions() -> str:
    """Return what must be the same in all processes: they exchange pickles, and words in memory."""
    python = ".".join(platform.python_version_tuple()[:2])
    version = sys.modules["nbparallel"].__version__  # importing it here would import what it may load
    return f"nbparallel {version}, Python {python}, numpy {np.__version__.split('.')[0]}"


def _script(frame: FrameType | None) -> str:
    """Return the file whose lines errors name: the script, if it is on the stack, else the caller's."""
    main: str | None = getattr(sys.modules.get("__main__"), "__file__", None)
    called_in = frame.f_code.co_filename if frame is not None else ""
    while frame is not None:
        if main is not None and frame.f_code.co_filename == main:
            return main
        frame = frame.f_back
    return called_in
