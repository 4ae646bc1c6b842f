"""Rank pool: the rank processes of a session, started, watched and stopped.

::

    session's thread                     event loop's thread                processes
    ----------------                     -------------------                ---------
    start, shrink           --SPAWN-->                                      supervisor -> ranks
    next_event              <--events--  READY, RANK_READY, outcomes, DIED  <--
    ensure_epoch            --control segment-->                            supervisor and every rank
"""

from __future__ import annotations

import contextlib
import copy
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from nbparallel import sharing
from nbparallel.channel.channel import SegmentClient
from nbparallel.errors import (
    STOPPED,
    ClosedError,
    InternalError,
    NbParallelError,
    StartError,
    SupervisorDiedError,
    rank_list,
)
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.launch import (
    SupervisorLaunch,
    as_start_error,
    free_port,
    has_magics,
    notebook_colors,
    start_error,
    usable_cpus,
)
from nbparallel.session.processes.rank_handle import EventLoop, RankDeath, RankHandle, working_context
from nbparallel.session.processes.supervisor_client import RankQueries, SupervisorClient
from nbparallel.sharing import Store
from nbparallel.sharing.lifecycle.segment import SegmentBroker
from nbparallel.wire import control
from nbparallel.wire.control import ControlView
from nbparallel.wire.control_layout import keep_locks
from nbparallel.wire.frames import Kind
from nbparallel.wire.identity import WorldPlace
from nbparallel.wire.messages import Configure, JoinWorld, Outcome
from nbparallel.wire.system import do_all, is_ready, ready, signal_of
from nbparallel.wire.units import size_text

# Memory reclaim: unused memory is returned to the system while the notebook or script is idle.

PAUSE_SECONDS = 0.05
"""Shortest time between two reads of the supervisor's notices; no thread waits for them."""


class MemoryReclaimer:
    """Handles notices of released segments and trims the memory pool, in the event loop's thread.

    Parameters
    ----------
    fd : int
        Readable when there is a notice about this process's segments.

    Notes
    -----
    It never blocks on a thread that uses the store, and sleeps while nothing is due.
    """

    def __init__(self, event_loop: EventLoop, store: Store, broker: SegmentBroker, fd: int) -> None:
        self._event_loop, self._store, self._broker, self._fd = event_loop, store, broker, fd
        event_loop.watch(fd, self._on_notice)
        store.pool.on_first.append(self._on_pooled)

    def close(self) -> None:
        """Stop; the event loop still runs."""
        if self._on_pooled in self._store.pool.on_first:
            self._store.pool.on_first.remove(self._on_pooled)

    def _on_pooled(self) -> None:
        self._event_loop.call_soon(self._reclaim)

    def _on_notice(self) -> None:
        # It stays readable while another thread is about to read it.
        self._event_loop.unwatch(self._fd)
        self._event_loop.call_at(time.monotonic() + PAUSE_SECONDS, self._watch)
        self._reclaim()

    def _watch(self) -> None:
        if self._store.connected(self._broker):
            self._event_loop.watch(self._fd, self._on_notice)

    def _reclaim(self) -> None:
        seconds = self._store.tend()
        if seconds is not None:
            self._event_loop.call_at(time.monotonic() + seconds, self._reclaim)


START_SECONDS = 60.0
"""Generous bound for the start of ranks; a death or a failure is seen immediately."""
SLICE_SECONDS = 1.0
"""Longest wait before it is checked whether the supervisor lives."""


class RankPool:
    """Owns the event loop, the supervisor, the handles of all ranks and the control segment of the epoch."""

    def __init__(
        self,
        launch: SupervisorLaunch,
        output_of: Callable[[int], TaskOutput | None],
        place: WorldPlace,
    ) -> None:
        self.session, self._seed = launch.session, launch.seed
        self.place = place
        self._output_of = output_of
        self._events: deque[tuple[RankHandle | None, Any]] = deque()
        self.listener: Callable[[RankHandle | None, Any], None] = lambda *_: None
        """Called with every event, in the event loop's thread."""
        self._next_client = 1
        self._error: NbParallelError | None = None
        self.handles: list[RankHandle] = []
        self.queries = RankQueries()
        self.epoch = 0
        self.control: ControlView | None = None
        self._epoch_invalid = True
        self._stopping = threading.Lock()
        with contextlib.ExitStack() as made:
            made.callback(launch.terminate)
            with as_start_error("an eventfd"):
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            made.callback(os.close, self._wake)
            self._event_loop = EventLoop(
                f"nbparallel-{launch.session}", lambda error: self._fail(_internal(error))
            )
            made.callback(self._event_loop.stop)
            self._event_loop.start()
            self.supervisor = SupervisorClient(
                launch,
                self._event_loop,
                on_start_failed=self._fail,
                on_death=lambda: self._fail(SupervisorDiedError("the supervisor process died")),
            )
            self.broker: SegmentClient = self.supervisor.broker
            """The client of the session's segment server."""
            self.store, broker = sharing.current_store(), self.broker
            self.store.connect(broker)
            self._reclaimer = MemoryReclaimer(self._event_loop, self.store, broker, broker.fileno())
            made.pop_all()

    # events -------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make `next_event` return; safe in a signal handler."""
        wake = self._wake
        if wake >= 0:
            os.eventfd_write(wake, 1)

    def _post(self, handle: RankHandle | None, message: Any) -> None:
        self._events.append((handle, message))
        # Only the last outcome wakes the waiting thread: before, the event loop needs the interpreter.
        done = isinstance(message, Outcome) and message.ok
        if not (done and any(other.busy for other in self.handles)):
            self.wake()
        self.listener(handle, message)

    def _fail(self, error: NbParallelError) -> None:
        self._error = self._error or error
        self._post(None, None)

    def ended(self, milliseconds: float = 0) -> bool:
        """Whether the supervisor has died or the event loop has failed: only a new pool helps."""
        return self._error is not None or self.supervisor.ended(milliseconds)

    def next_event(self, timeout: float | None) -> tuple[RankHandle, Any] | None:
        """Return the next (handle, message); None after `timeout` seconds or a `wake`.

        Raises
        ------
        SupervisorDiedError, InternalError, StartError
            The pool has failed, and all events before that were returned.
        """
        if not self._events:
            if (wake := self._wake) < 0:
                raise ClosedError(STOPPED)
            is_ready(wake, SLICE_SECONDS if timeout is None else min(timeout, SLICE_SECONDS))
            with contextlib.suppress(OSError):  # nothing was written, or the session was stopped
                os.eventfd_read(wake)
        while self._events:
            handle, message = self._events.popleft()
            if handle is not None:
                return handle, message
        self.check()
        return None

    def check(self) -> None:
        """Raise the error that ended the pool, if one has."""
        if self._error is not None:
            # A copy: the original must not keep the frames, and their arrays, to which it was raised.
            raise copy.copy(self._error) from self._error.__cause__

    # ranks --------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> range:
        """The numbers of the ranks that were started."""
        return self.place.ranks[: len(self.handles)]

    def handle(self, rank: int) -> RankHandle:
        """Return the handle of a rank."""
        return self.handles[rank - self.place.ranks.start]

    def start(self, ranks: list[int], interrupts: InterruptCounter) -> None:
        """Start processes for `ranks`; wait until these and all others that were started are ready.

        Raises
        ------
        StartError
            One of them ended before it was ready; the message holds the end of its output.
        KeyboardInterrupt
            The user interrupted; the caller ends the new ranks, or waits for them another time.
        """
        for rank in ranks:
            self._spawn(rank)
        self._epoch_invalid = True
        ranks = [handle.rank for handle in self.handles if not handle.usable]
        deadline, again = time.monotonic() + START_SECONDS, set[int]()
        interrupts.wake = self.wake
        while not all(self.handle(rank).usable for rank in ranks):
            try:
                self.next_event(deadline - time.monotonic())
            except (StartError, SupervisorDiedError) as error:
                raise StartError(f"{error}\n{self.supervisor.log()}".strip()) from None
            for handle in [self.handle(rank) for rank in ranks]:
                if handle.death is None:
                    continue
                if handle.death.refused:
                    reason = OSError(handle.death.refused, os.strerror(handle.death.refused))
                    raise start_error(f"a process for rank {handle.rank}", reason)
                if handle.death.code is not None or handle.rank in again:
                    raise StartError(self._explain_exit(handle, handle.death))
                again.add(handle.rank)  # its template died before the fork; the next one forks it
                self._spawn(handle.rank)
            interrupts.check()
            if time.monotonic() >= deadline:
                late = rank_list(rank for rank in ranks if not self.handle(rank).usable)
                raise StartError(f"{late} not ready after {START_SECONDS:.0f} s\n{self.supervisor.log()}")
        self._refuse_other_versions([self.handle(rank) for rank in ranks])

    def _spawn(self, rank: int) -> None:
        with self._stopping:  # a handle that is made here is not left to a `stop` that has been there already
            if self._wake < 0:
                raise ClosedError(STOPPED)
            client, self._next_client = self._next_client, self._next_client + 1
            handle = RankHandle(
                rank,
                client,
                self._event_loop,
                post=self._post,
                output_of=self._output_of,
                on_report=self.queries.take,
                end=self.supervisor.kill,
            )
            configure = Configure(
                session=self.session,
                rank=rank,
                place=self.place,
                client=client,
                context=working_context(),
                environment=tuple(os.environ.items()),
                usable_cpus=usable_cpus(),
                seed=self._seed,
                colors=notebook_colors(),
                magics=has_magics(),
                notebook=os.getpid(),
            )
            handle.sent_context = configure.context
            if rank in self.ranks:
                self._event_loop.call_soon(self.handle(rank).close)
                self.handles[rank - self.place.ranks.start] = handle
            else:
                self.handles.append(handle)
            handle.send(Kind.CONFIGURE, configure)
            self.supervisor.spawn(handle)

    def _refuse_other_versions(self, handles: list[RankHandle]) -> None:
        """End ranks that were started after something was installed over what this process runs."""
        refused = [handle for handle in handles if handle.refusal]
        for handle in refused:
            self.end(handle)
        if refused:
            ranks = rank_list(handle.rank for handle in refused)
            raise StartError(
                f"{ranks} would run {refused[0].refusal}: something was installed since this began; "
                "restart the kernel (or the script), so that all run the same"
            )

    def _explain_exit(self, handle: RankHandle, end: RankDeath) -> str:
        how = signal_of(end.code) or ("its template died" if end.code is None else f"exit code {end.code}")
        output = handle.stderr_tail.strip() or self.supervisor.log()
        return f"rank {handle.rank} ended while it started ({how})" + (f":\n{output}" if output else "")

    def dead(self) -> list[RankHandle]:
        """Return the ranks whose process has ended, also if the supervisor has not reported it yet."""
        poll = select.poll()
        pidfds = {handle.pidfd: handle for handle in self.handles if handle.alive and handle.pidfd >= 0}
        for fd in pidfds:
            poll.register(fd, select.POLLIN)
        ended = [pidfds[fd] for fd, _ in ready(poll, 0)]
        deadline = time.monotonic() + SLICE_SECONDS
        while any(handle.alive for handle in ended) and time.monotonic() < deadline:
            self.next_event(0.05)  # the supervisor is about to report how
        return [handle for handle in self.handles if handle.death is not None]

    def shrink(self, world_size: int) -> None:
        """End the ranks from `world_size` on."""
        self.place, leaving = WorldPlace(world_size), self.handles[world_size:]
        for handle in leaving:
            handle.offer(Kind.EXIT, None)
        deadline = time.monotonic() + 1.0
        while any(handle.alive for handle in leaving):
            self.next_event(0.05)
            if time.monotonic() > deadline:
                for handle in leaving:
                    self.supervisor.kill(handle)
                deadline = time.monotonic() + START_SECONDS
        for handle in leaving:
            self._event_loop.call_soon(handle.close)
        del self.handles[world_size:]
        self._epoch_invalid = True

    def end(self, handle: RankHandle) -> None:
        """Kill one rank and wait until its process has ended."""
        self.supervisor.kill(handle)
        while handle.alive:
            self.next_event(0.25)

    # epochs -------------------------------------------------------------------------------------------

    def invalidate_epoch(self) -> None:
        """Give up the current epoch: after a failure rings and slots can hold anything."""
        self._epoch_invalid = True

    def ensure_epoch(self) -> ControlView:
        """Give all ranks fresh rings if the last epoch is invalid."""
        if self._epoch_invalid or self.control is None:
            with self._stopping:  # what is made here is not left to a `stop` that has been there already
                if self._wake < 0:
                    raise ClosedError(STOPPED)
                self._begin_epoch()
        assert self.control is not None, "an epoch has begun"
        return self.control

    def _begin_epoch(self) -> None:
        self.epoch += 1
        world_size = self.place.world_size
        size = size_text(control.Layout.of(world_size).nbytes)
        with as_start_error(f"the segment of {size} through which ranks communicate"):
            fd = control.create(world_size, self.epoch)
        try:
            view, abandoned = ControlView(fd), []
            if self.control is not None:
                abandoned = self.control.abandoned_locks()
                self.control.close()
            self.control = view
            keep_locks(self.control.words, abandoned)
            self.supervisor.epoch(fd, self.epoch)
            join = JoinWorld(self.epoch, self.place, free_port())
            for handle in self.handles:
                handle.send(Kind.JOIN_EPOCH, join, (fd,))
        finally:
            os.close(fd)
        self._epoch_invalid = False

    # the end ------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Make a thread that waits for an event raise `ClosedError`: the session is being stopped."""
        if self._wake >= 0:
            self._fail(ClosedError("the session was stopped while its ranks were running"))

    def stop(self) -> None:
        """End every process and close everything, whatever raises in between (idempotent)."""
        with self._stopping:
            if self._wake < 0:
                return
            wake, self._wake = self._wake, -1
            do_all(
                *(partial(handle.offer, Kind.EXIT, None) for handle in self.handles),  # an idle one exits
                self._reclaimer.close,
                lambda: sharing.current_store().disconnect(self.broker),
                self.supervisor.stop,
                self.wait_for_ranks,
                self._event_loop.stop,
                *(handle.close for handle in self.handles),
                self.supervisor.close,
                lambda: None if self.control is None else self.control.close(),
                lambda: os.close(wake),
            )

    def wait_for_ranks(self) -> None:
        """Wait a moment for ranks that die with a killed supervisor: a sweep keeps names of the living."""
        deadline = time.monotonic() + SLICE_SECONDS
        for pidfd in [handle.pidfd for handle in self.handles if handle.pidfd >= 0]:
            is_ready(pidfd, max(0.0, deadline - time.monotonic()))


def _internal(error: Exception) -> InternalError:
    internal = InternalError(f"the session's thread met {type(error).__name__}: {error}; please file a bug")
    internal.__cause__ = error
    return internal
