"""Process group: one process of a script as a rank of a world, from joining it to leaving it.

For the operations the whole script is one cell: after a failure no operation is possible until the process
has left the world and joined another one.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
from types import FrameType, TracebackType

import numpy as np

from nbparallel import sharing
from nbparallel.channel.segment_client import SegmentClient
from nbparallel.distributed.bootstrap.init_method import InitMethod
from nbparallel.distributed.bootstrap.rendezvous import Admission, arrive_and_wait
from nbparallel.distributed.communicator import Communicator
from nbparallel.distributed.runtime.supervisor_liveness import SupervisorLiveness
from nbparallel.errors import ChannelClosedError, ForkedRankError
from nbparallel.sharing import Store
from nbparallel.wire.frames import Kind
from nbparallel.wire.rendezvous import Join, client_of

CELL = 1
"""A script is one cell."""


class ProcessGroup:
    """The membership of this process; made by `join`.

    Owns its connection and its communicator; the store, which belongs to the process, is client rank + 1 of
    the world while it lasts.  In a forked child all of it is inert.
    """

    def __init__(self, admission: Admission, rank: int, filename: str) -> None:
        self._pid = os.getpid()
        joined = admission.joined
        world_size, client = len(joined.members), client_of(rank)
        self._broker = SegmentClient(admission.channel, client=client)
        self._channel = admission.channel
        self._liveness = SupervisorLiveness(admission.supervisor, joined.members)
        self._store = _store()
        self._store.renumber(client)
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
        atexit.register(self._at_exit)

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
        atexit.unregister(self._at_exit)
        if sys.excepthook is self._our_hook:
            sys.excepthook = self._hook
        self.communicator.end_cell(failure)
        for forgotten in self.communicator.forgotten if failure is None else ():
            sys.stderr.write(f"nbparallel: {forgotten}; keep what it returns and call wait()\n")
        for unreleased in self.communicator.unreleased if failure is None else ():
            sys.stderr.write(f"nbparallel: {unreleased}\n")
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
        self._liveness.close()

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Leave, so that the other ranks get an error immediately, and show the exception as usual."""
        hook = self._hook
        self.leave(error)
        hook(kind, error, trace)

    def _at_exit(self) -> None:
        self.leave(None)


def join(method: InitMethod, seconds: float, caller: FrameType | None) -> ProcessGroup:
    """Wait for the other processes, and return the membership; errors as `arrive_and_wait`."""
    if _store().connected():
        raise RuntimeError(
            "this process has a session of its own, whose ranks are connected already: stop it before "
            "init_process_group(), which is for scripts"
        )
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    join = Join(method.rank, method.world_size, _versions(), tuple(sorted(cpus)))
    return ProcessGroup(arrive_and_wait(method.place, join, seconds), method.rank, _script(caller))


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
