"""Session: the ranks of a notebook, a script or a test, from their start to their end.

`session.tasks` shows how a cell travels.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import operator
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from nbparallel import sharing
from nbparallel.errors import BusyError, rank_list, without_frames
from nbparallel.session import running_sessions
from nbparallel.session.interrupts import InterruptCounter, SessionLock
from nbparallel.session.names.delivery import GatheredNames, NameDelivery
from nbparallel.session.output import LineSink, OutputSink
from nbparallel.session.processes.elastic_pool import ElasticPool, SessionRanks, TaskPool
from nbparallel.session.processes.launch import SupervisorLaunch, check_world_size, usable_cpus
from nbparallel.session.results import CellResult, DrawnValues, RankValues
from nbparallel.session.tasks.cell import CellOptions, check_cell, check_drawn, select_ranks, split_names
from nbparallel.session.tasks.cell_queue import PendingCell, QueuedCell, nudge_first
from nbparallel.session.tasks.dispatch import (
    TaskDispatcher,
    all_values,
    call_task,
    plain_task,
    push_task,
)
from nbparallel.session.tasks.item_map import ItemMap
from nbparallel.session.tasks.task_run import TaskFactory, TaskRequest, TaskRun, TaskWatch
from nbparallel.wire.identity import WorldPlace
from nbparallel.wire.messages import DrawTask, PullTask
from nbparallel.wire.system import do_all

if TYPE_CHECKING:
    from nbparallel.channel.channel import SegmentClient
    from nbparallel.session.monitoring.activity import ActivityReader, SessionActivity, SessionStatistics
    from nbparallel.session.monitoring.segments import SessionNames
    from nbparallel.session.monitoring.timeline import Timeline
    from nbparallel.wire.inspection import Completion

# Views of a session: statistics, names, completions, activity, timeline.
#
# The modules that make them are imported when the first cell has ended (`load_views`), not before its output.


@functools.cache
def load_views() -> None:
    """Import what the methods below need: an installation may have removed the files when they are called."""
    from nbparallel.session.monitoring import activity, segments, timeline  # noqa: F401


class SessionViews:
    """Read-only views of one session; `Session` has a method of each name, which describes it.

    Notes
    -----
    Thread-safe, also while a cell runs.
    """

    def __init__(self, ranks: ElasticPool, names: NameDelivery, tasks: TaskDispatcher) -> None:
        self._ranks, self._names, self._tasks = ranks, names, tasks
        self._reader: ActivityReader | None = None

    def statistics(self, namespace: Mapping[str, Any] | None) -> SessionStatistics:
        """Return a frozen picture of the session."""
        from nbparallel.session.monitoring.activity import take_statistics

        names = self._names.namespace if namespace is None else namespace
        how, pool, copies = self._ranks.start_method, self._ranks.running, self._names.copies
        return take_statistics(how, pool, names, self.activity(), copies)

    def who(self, namespace: Mapping[str, Any] | None, hidden: Mapping[str, Any] | None) -> SessionNames:
        """Return the names of the notebook and of the ranks."""
        from nbparallel.session.monitoring.segments import compare

        names = self._names.namespace if namespace is None else namespace
        pool = self._ranks.running
        handles = list(pool.handles)
        return compare(
            names or {}, hidden or {}, sharing.current_store(), handles, pool.queries.names(handles)
        )

    def complete(self, text: str, cursor: int, patience: float) -> tuple[Completion, ...]:
        """Return completions by rank 0; none if it is busy or does not run."""
        if (pool := self._ranks.pool) is None:
            return ()
        return pool.queries.complete(pool.handles[0], text, cursor, patience).found

    def activity(self) -> SessionActivity:
        """Return what ranks do at this moment."""
        if self._reader is None:
            from nbparallel.session.monitoring import activity

            self._reader = activity.ActivityReader(self._ranks, self._names, self._tasks)
        return self._reader.read()

    def findings(self) -> tuple[Any, ...]:
        """Return what the doctor finds on other machines: there are none."""
        return ()

    def timeline(self) -> Timeline | None:
        """Return the timeline of the last cell."""
        from nbparallel.session.monitoring.timeline import build_timeline

        record = self._tasks.record
        return None if record is None else build_timeline(record)


__tracebackhide__ = True  # of pytest: an error of a rank shows the test, not the way here
START_METHODS = ("forkserver", "spawn")
STOP_SECONDS = 1.0
"""How long `stop` waits for another thread that is running something."""

_T = TypeVar("_T")
_R = TypeVar("_R")

Prepare = Callable[[TaskPool], TaskRequest]
"""Makes the request for a task, once the ranks run."""


class Session:
    """Ranks that run cells and functions and share this process's arrays.

    Parameters
    ----------
    world_size : int, optional
        How many ranks; by default one for each CPU that this process may use.
    start_method : {"forkserver", "spawn"}
        Fork ranks from a process that has everything imported (fast), or start fresh interpreters.
    launch : SupervisorLaunch, optional
        A supervisor that was started early: the session owns it, and starts another if it is not current.
    keep_messages, read_in_place : bool
        Whether messages that no rank received stay for later cells, or are dropped with a note; and whether
        ranks may read each other's large private arrays where they lie.  Both are attributes.
    cluster : distributed.Client or Cluster, optional
        Have the ranks on the hosts of this Dask cluster, which stays the caller's; `world_size` is by default
        what they take.  How-to "Use several hosts" says what works there.
    ranks_per_host, max_hosts : int, optional
        Ranks on each of them, by default one for each thread of its workers; how many to use, at most 32.

    Raises
    ------
    TypeError, ValueError
        `world_size` is no positive integer, or more than this machine, or the hosts, can hold.

    Notes
    -----
    One thread at a time may run something, another one gets a `RuntimeError`; a forked child gets
    `ForkedRankError`.  The ranks start with the first use, or with ``with``; `stop` ends every process.  A
    script needs no ``if __name__ == "__main__"``.  What a rank returns is unpickled here: code that runs on
    a rank can do what code of this process can.

    Examples
    --------
    >>> with Session(2) as session:  # doctest: +SKIP
    ...     session.run("x = all_reduce(rank)")
    ...     session.pull("x")
    [1, 1]
    """

    keep_messages: bool
    read_in_place: bool

    keep_frames: bool = False  # for a notebook's %debug

    def __init__(
        self,
        world_size: int | None = None,
        *,
        start_method: str = "forkserver",
        launch: SupervisorLaunch | None = None,
        keep_messages: bool = False,
        read_in_place: bool = True,
        cluster: Any = None,
        ranks_per_host: int | None = None,
        max_hosts: int | None = None,
    ) -> None:
        if sharing.current_store().client != 0:
            raise RuntimeError("a rank or worker cannot start ranks: use a session of the notebook or script")
        if start_method not in START_METHODS:
            raise ValueError(f"start_method must be one of {', '.join(START_METHODS)}, not {start_method!r}")
        if cluster is None:
            if ranks_per_host is not None or max_hosts is not None:
                raise TypeError("ranks_per_host and max_hosts are about hosts: pass cluster= as well")
            size = usable_cpus() if world_size is None else world_size
            check_world_size(size)
            self._names = NameDelivery(sharing.current_store())
            self._tasks = TaskDispatcher(self._names)
            place, output_of = WorldPlace(int(size)), self._tasks.output_of
            pool = ElasticPool(place, start_method, launch, self._names, output_of)
            self._ranks: SessionRanks = pool
            self._views = SessionViews(pool, self._names, self._tasks)
        else:
            # it stands on this package
            elsewhere = importlib.import_module("nbparallel.cluster.host_session")
            self._names, self._tasks, self._ranks, self._views = elsewhere.make_parts(
                cluster, world_size, start_method, ranks_per_host, max_hosts
            )
        self._session_lock = SessionLock()
        self.keep_messages, self.read_in_place = keep_messages, read_in_place
        self._line = deque[QueuedCell]()

    @property
    def closed(self) -> bool:
        """Whether `stop` was called."""
        return self._session_lock.closed

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.place.world_size

    @property
    def place(self) -> WorldPlace:
        """Which ranks are where."""
        return self._ranks.place

    @property
    def hosts(self) -> dict[str, range]:
        """The ranks of each host, if they are on a cluster."""
        return self.place.parts

    @property
    def started(self) -> bool:
        """Whether ranks have been started."""
        return self._ranks.pool is not None

    def start(self) -> None:
        """Start the ranks now (idempotent); StartError: one ended before it was ready, and none is left."""
        with self._session_lock.hold() as interrupts:
            self._ensure(interrupts)
            load_views()

    def stop(self) -> None:
        """End every process of the session (idempotent).  Arrays in this process stay as they are.

        An interrupt raises when no process is left, at most two seconds later; so does another error.
        """
        if os.getpid() != self._session_lock.pid:
            return  # a forked child owns nothing
        with InterruptCounter():
            self._session_lock.closed = True
            running_sessions.RUNNING.discard(self)
            # First a thread that starts ranks or waits for them raises; it has a moment to end what it began.
            do_all(self._ranks.close, partial(self._session_lock.close, STOP_SECONDS), self._ranks.stop)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # an interrupt may raise when all ranks run, and `__exit__` is not called then
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        except BaseException:  # an interrupt may raise before it has begun
            self.stop()
            raise

    def __repr__(self) -> str:
        state = "stopped" if self.closed else "running" if self.started else "not started yet"
        return f"<Session of {rank_list(range(self.world_size))}, {state}>"

    def _ensure(self, interrupts: InterruptCounter) -> TaskPool:
        before, pool = self._ranks.pool, self._ranks.ensure(interrupts)
        if pool is not before:
            running_sessions.RUNNING.add(self)
        self._tasks.read_in_place, self._tasks.keep_messages = self.read_in_place, self.keep_messages
        self._tasks.keep_frames = self.keep_frames
        return pool

    @without_frames()
    def run(
        self,
        cell: str,
        *,
        ranks: Iterable[int] | None = None,
        namespace: MutableMapping[str, Any] | None = None,
        share: str | Iterable[str] = (),
        timeout: float | None = None,
        sink: OutputSink | None = None,
        execution_count: int | None = None,
        line_offset: int = 0,
        want_values: bool = True,
        show_values: bool = True,
        seed: int | None = None,
        on_error: str = "stop",
        draw: str | Iterable[str] = (),
        check_races: bool = False,
        profile: bool = False,
        observers: Iterable[str] = (),
    ) -> CellResult:
        """Run a cell's source on the ranks and wait for all of them.

        Parameters
        ----------
        cell : str
            Source as in a notebook's cell: magics, ``!cmd`` and top-level ``await`` work.
        ranks : collection of int, optional
            Ranks that run it; by default all.  The others are not disturbed.
        namespace : mutable mapping, optional
            Where the cell's free names are looked up, ``globals()`` as a rule.  Arrays found there are moved
            into shared memory and re-bound; other objects are copied.  By default nothing is looked up.
        share : str or collection of str
            Names of arrays in `namespace` that ranks may write from now on, as ``["a", "b"]`` or ``"a,b"``.
        timeout : float, optional
            Seconds after which the ranks are interrupted.
        sink : OutputSink, optional
            Receives output while the cell runs; the result holds it, and an error its notes, in any case.
        execution_count, line_offset : int
            The notebook's ``In[n]`` and the lines above `cell` in it, for tracebacks.
        want_values, show_values : bool
            Whether the last expression's values travel back, and whether they are displayed.
        seed : int, optional
            Reseed every rank's random streams first; torch's too, if it is imported there.
        on_error : {"stop", "continue"}
            When a rank fails: stop the others, or let them run to their end unless they wait for it.
        draw : str or collection of str
            Names whose beginnings ``.drawn`` of the result has, before and after the cell.
        check_races, profile : bool
            Look for data races on shared arrays: ``.races`` of the result has them; the cell runs slower.
            Measure lines: ``.profile`` of the result has the time of each one on each rank.
        observers : collection of str
            Modules that observe the cell on each rank; ``.findings`` of the result has what they found.

        Raises
        ------
        SyntaxError
            The cell does not compile; nothing was sent.
        ParallelError
            Ranks failed; ``.errors`` maps rank to exception, the root cause first; ``.result`` has the rest.
        KeyboardInterrupt, CellTimeoutError
            It was interrupted; the time-out passed; ``.result`` too.
        """
        options = CellOptions(
            namespace=namespace, share=share, timeout=timeout, sink=sink, execution_count=execution_count,
            line_offset=line_offset, want_values=want_values, show_values=show_values, seed=seed,
            on_error=on_error, draw=draw, check_races=check_races, profile=profile, observers=observers,
        )  # fmt: skip
        return self._perform(self._of_cell(cell, ranks, options))

    def submit(
        self, cell: str, *, ranks: Iterable[int] | None = None, queue: bool = False, **options: Any
    ) -> PendingCell:
        """Run a cell's source on the ranks in the background; the result of what is returned waits for it.

        The notebook's names travel before this returns: later changes do not reach the cell, but for shared
        arrays, which are the same memory.  Until it has ended, every other use raises `BusyError`.

        Parameters
        ----------
        cell, ranks, **options
            As for `run`; ``result()`` of the `PendingCell` returns or raises what `run` would have.
        queue : bool
            If the ranks are busy, run it when all cells that were submitted before it have ended.
        """
        made: list[PendingCell] = []
        chosen = CellOptions(**options)
        try:
            if queue and (self._line or self._session_lock.held):
                self._put_behind(cell, ranks, chosen, made)
            else:
                self._start(self._of_cell(cell, ranks, chosen), made)
            return made[0]
        except BaseException:
            for pending in made:  # an interrupt at the very end, and no caller has the cell
                pending.cancel()
            raise

    def _put_behind(
        self, cell: str, ranks: Iterable[int] | None, options: CellOptions, made: list[PendingCell]
    ) -> None:
        """Put a cell behind those that were submitted before it."""
        if options.share:
            raise BusyError(
                "a cell that waits for its turn cannot share arrays, because they may have to be moved: "
                "%share them before, or leave out --queue"
            )
        self._session_lock.on_release = partial(nudge_first, self._line)
        with InterruptCounter():
            check_cell(cell, options)
            names = self._tasks.gather(cell, options, select_ranks(ranks, self.world_size))
            context = contextvars.copy_context()  # numpy's and decimal's settings are there
            prepare = self._of_cell(cell, ranks, options, names)
            launch: Any = partial(context.run, partial(self._launch, prepare))
            made.append(QueuedCell(self._line, self._session_lock, launch, self._finish, options.sink))

    def _of_cell(
        self, cell: str, ranks: Iterable[int] | None, options: CellOptions, names: GatheredNames | None = None
    ) -> Prepare:
        check_cell(cell, options)
        return lambda pool: self._tasks.prepare_cell(
            pool, cell, options, select_ranks(ranks, self.world_size), names
        )

    # Every task takes one of two ways, whatever it is: its caller waits for it, or has a `PendingCell`.

    def _perform(self, prepare: Prepare) -> CellResult:
        with self._session_lock.hold() as interrupts, self._tasks.stopping(interrupts):
            return self._finish(self._launch(prepare, interrupts), interrupts)

    def _start(
        self,
        prepare: Prepare,
        made: list[PendingCell],
        complete: Callable[[Callable[[], CellResult]], CellResult] = operator.call,
    ) -> None:
        with self._session_lock.hold() as interrupts, self._tasks.stopping(interrupts):
            run = self._launch(prepare, interrupts)
            finish = partial(complete, partial(self._finish, run, interrupts))
            made.append(PendingCell(finish, interrupts, self._session_lock.release, run.output))

    def _launch(self, prepare: Prepare, interrupts: InterruptCounter) -> TaskRun:
        started = time.monotonic()
        pool = self._ensure(interrupts)
        request = replace(prepare(pool), started=started)
        request.notes[:0] = self._ranks.take_notes()  # a cell that could not be prepared shows no lines
        return self._tasks.launch(pool, request, interrupts)

    def _finish(self, run: TaskRun, interrupts: InterruptCounter) -> CellResult:
        try:
            return self._tasks.finish(run, interrupts)
        finally:
            load_views()

    @without_frames()
    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank; return the results in rank order.

        Functions of ``__main__`` travel by value, with their globals.  What they print is printed here.
        """
        if not callable(function):
            raise TypeError(f"call needs a function, not {type(function).__name__}; run takes a source")
        return list(all_values(self.perform(call_task(function, args, kwargs), LineSink()), "a result"))

    @without_frames()
    def pull(self, name: str) -> RankValues:
        """Return the value of a variable of every rank; arrays come through shared memory, one copy.

        Raises `UnpicklableError` if a value cannot travel: its ``.result`` has the others.
        """
        if not str(name).isidentifier():
            raise ValueError(f"{name!r} is no variable's name")
        return all_values(self.perform(plain_task(PullTask, name, want_values=True)), name)

    @without_frames()
    def draw(self, names: str | Iterable[str]) -> DrawnValues:
        """Return first numbers of all ranks' variables; `nbparallel_widgets.draw.DrawnView` shows them."""
        wanted = split_names(names)
        check_drawn(wanted)
        return self.perform(plain_task(DrawTask, wanted)).drawn or DrawnValues(wanted, {})

    @without_frames()
    def push(self, /, **values: Any) -> None:
        """Assign variables on every rank; shared arrays arrive as the same memory, all else is copied."""
        self.perform(push_task(values))

    @without_frames()
    def push_names(self, names: str | Iterable[str], namespace: MutableMapping[str, Any]) -> tuple[str, ...]:
        """Send values of `namespace` again, if they have changed or are arrays on hosts; return notes."""
        wanted = split_names(names)
        self._names.renew(wanted, namespace)
        return self.run("\n".join(wanted), namespace=namespace, want_values=False, show_values=False).notes

    @without_frames()
    def map(
        self, function: Callable[[_T], _R], items: Iterable[_T], *more: Iterable[Any], **options: Any
    ) -> list[_R]:
        """Return ``[function(item) for item in items]``, done by the ranks; as `nbparallel.map`."""
        with ItemMap(function, items, *more, **options) as chosen:
            return chosen.results(partial(self.perform, chosen.make, LineSink(), chosen))

    def imap(
        self,
        function: Callable[[_T], _R],
        items: Iterable[_T],
        *more: Iterable[Any],
        ordered: bool = True,
        **options: Any,
    ) -> Iterator[_R]:
        """Return an iterator over ``function(item) for item in items``; as `nbparallel.imap`."""
        chosen = ItemMap(function, items, *more, **options)
        return chosen.iterate(partial(self.begin, chosen, LineSink()), ordered=ordered)

    def perform(
        self, make: TaskFactory, sink: OutputSink | None = None, watch: TaskWatch | None = None,
        ranks: tuple[int, ...] = (), timeout: float | None = None,
    ) -> CellResult:  # fmt: skip
        """Perform a task, on all ranks by default; `watch` follows it."""
        return self._perform(
            lambda pool: self._tasks.prepare(
                pool, make, CellOptions(sink=sink, timeout=timeout), watch, ranks
            )
        )

    def begin(self, chosen: ItemMap, sink: OutputSink) -> PendingCell:
        """Have the ranks do a map in the background."""
        made: list[PendingCell] = []
        self._start(
            lambda pool: self._tasks.prepare(pool, chosen.make, CellOptions(sink=sink), chosen),
            made,
            chosen.complete,
        )
        return made[0]

    def restart(self, rank: int | None = None) -> None:
        """Restart one rank, or all, in a fresh process; the other ranks keep their variables."""
        with self._session_lock.hold() as interrupts:
            if self.started:
                self._ranks.end(None if rank is None else select_ranks([rank], self.world_size)[0])
                self._ensure(interrupts)

    def resize(self, world_size: int) -> None:
        """Grow to `world_size` ranks, or shrink from the top.

        Raises
        ------
        ValueError
            Variables of ranks that would end would be lost, or the machine cannot hold so many ranks.
        """
        self._ranks.check_size(world_size)
        with self._session_lock.hold() as interrupts:
            if world_size == self.world_size:
                return
            if self.started:
                pool = self._ensure(interrupts)
                if world_size < self.world_size:
                    self._tasks.shrink(pool, world_size, interrupts)
            self._ranks.resize(int(world_size), interrupts)

    def interrupt(self) -> None:
        """Interrupt the running cell as the notebook's stop button does, from any thread; else do nothing."""
        self._session_lock.interrupt()

    def share_names(self, names: Sequence[str], namespace: MutableMapping[str, Any]) -> tuple[str, ...]:
        """Move arrays of `namespace` into shared memory, writable by ranks; return notes."""
        with self._session_lock.hold():
            return tuple(self._names.share(names, namespace))

    def statistics(self, namespace: Mapping[str, Any] | None = None) -> SessionStatistics:
        """Return a frozen picture of ranks and segments; waits for no rank, works while a cell runs.

        `namespace` holds the names that segments are listed with, by default that of the last cell.  Raises
        `RuntimeError` if no ranks are running, as do `who` and `activity`.
        """
        return self._views.statistics(namespace)

    def who(
        self, namespace: Mapping[str, Any] | None = None, hidden: Mapping[str, Any] | None = None
    ) -> SessionNames:
        """Return the names of the notebook and of idle ranks, with types and shapes but no values.

        It takes a millisecond, or a second if a rank does not reply.  `namespace` holds the notebook's names,
        by default those of the last cell; `hidden` those among them that are not the user's.
        """
        return self._views.who(namespace, hidden)

    def complete(self, text: str, cursor: int, patience: float = 0.1) -> tuple[Completion, ...]:
        """Return completions of the code before `cursor` by the names of rank 0; none if it is busy."""
        return self._views.complete(text, cursor, patience)

    def activity(self) -> SessionActivity:
        """Return what ranks do now, also while they start; takes half a millisecond and disturbs no rank."""
        return self._views.activity()

    def findings(self) -> tuple[Any, ...]:
        """Return what the doctor finds on other machines that have ranks, each a `Finding`."""
        return self._views.findings()

    def timeline(self) -> Timeline | None:
        """Return what each rank did when in the last cell or call (None: there was none).

        Of more than 2000 operations, or of many short ones, some are only counted (`RankRow.omitted`).
        """
        return self._views.timeline()

    @property
    def broker(self) -> SegmentClient | None:
        """The client of this session's segment server."""
        return self._ranks.running.broker
