"""Session: ranks in the hands of a notebook, a script or a test.

::

    In this process                                   |  Other processes
    --------------------------------------------------+-----------------------------------------
    Session ── TaskRun (waits)                        |
       │                                              |
      Crew ─── SupervisorProcess ──────control────────+── supervisor ── template
       │  └─── Pump (one thread) ◄──pipes, sockets────+── rank 0 … rank n-1
       └────── RankHandle 0 … n-1 ──cells─────────────+──►   (children of the supervisor)

A task (a cell, a call, a pull) goes to every rank that takes part; the pump takes what they print, show and
report; the waiting thread sleeps until all have reported, died, or were ended.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from nbparallel import sharing
from nbparallel.errors import rank_list
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.monitoring import session_views
from nbparallel.session.monitoring.session_views import SessionViews
from nbparallel.session.names.delivery import NameDelivery
from nbparallel.session.names.encoding import dump
from nbparallel.session.output import LineSink, OutputSink
from nbparallel.session.processes import resize as roster
from nbparallel.session.processes.launch import SupervisorLaunch
from nbparallel.session.processes.limits import check_world_size, usable_cpus
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.processes.resize import start_pool
from nbparallel.session.results import CellResult, RankValues
from nbparallel.session.session_lock import SessionLock
from nbparallel.session.tasks import cell as cells
from nbparallel.session.tasks.cell import CellOptions
from nbparallel.session.tasks.dispatch import RunningTask, TaskDispatcher
from nbparallel.session.tasks.pending_cell import PendingCell
from nbparallel.wire.messages import CallTask, PullTask, PushTask, Task

START_METHODS = ("forkserver", "spawn")
STOP_SECONDS = 1.0
"""How long `stop` waits for a thread that is just running something to notice."""

_running: weakref.WeakSet[Session] = weakref.WeakSet()


def running_sessions() -> list[Session]:
    """Return the sessions of this process whose ranks have been started."""
    return list(_running)


@atexit.register
def _stop_all() -> None:
    """End what a script forgot to; in a forked child `stop` does nothing."""
    for session in running_sessions():
        session.stop()


class Session(SessionViews):
    """Ranks that run cells and functions and share this process's arrays.

    Parameters
    ----------
    world_size : int, optional
        How many ranks; by default one for each CPU that this process may use.
    start_method : {"forkserver", "spawn"}
        Fork ranks from a process that has everything imported (fast), or start fresh interpreters.
    launch : SupervisorLaunch, optional
        A supervisor that was started early; the session owns it from now on.  If it does not fit any more,
        or ranks cannot be started with one that has waited, a new one is started.

    Raises
    ------
    TypeError, ValueError
        `world_size` is no positive integer, or more than this machine can hold.

    Notes
    -----
    One thread at a time may run something, another one gets a `RuntimeError`; a forked child gets
    `ForkedRankError`.  The ranks start with the first use, or with ``with``; `stop` ends every process.  A
    script needs no ``if __name__ == "__main__"``.

    Examples
    --------
    >>> with Session(2) as session:  # doctest: +SKIP
    ...     session.run("x = all_reduce(rank)")
    ...     session.pull("x")
    [1, 1]
    """

    def __init__(
        self,
        world_size: int | None = None,
        *,
        start_method: str = "forkserver",
        launch: SupervisorLaunch | None = None,
    ) -> None:
        if sharing.current_store().client != 0:
            raise RuntimeError("a rank cannot start ranks of its own: use -n in the notebook for more")
        size = usable_cpus() if world_size is None else world_size
        check_world_size(size)
        if start_method not in START_METHODS:
            raise ValueError(f"start_method must be one of {', '.join(START_METHODS)}, not {start_method!r}")
        self._size = int(size)
        self._start_method = start_method
        self._id = ""
        self._supervisor_launch = launch
        self._pool: RankPool | None = None
        self._names = NameDelivery(sharing.current_store())
        self._tasks = TaskDispatcher(self._names)
        self._session_lock = SessionLock()

    # life ---------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `stop` was called."""
        return self._session_lock.closed

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._size

    @property
    def started(self) -> bool:
        """Whether ranks have been started."""
        return self._pool is not None

    def start(self) -> None:
        """Start the ranks now rather than with the first use; idempotent.

        Raises
        ------
        StartError
            A rank ended before it was ready; nothing is left running.
        """
        with self._session_lock.take() as presses:
            self._ensure(presses)
        session_views.load()

    def stop(self) -> None:
        """End every process of the session (idempotent).  Arrays in this process stay as they are.

        An interrupt during this raises when nothing is left, two seconds later at most.
        """
        if os.getpid() != self._session_lock.pid:
            return  # a forked child owns nothing
        with InterruptCounter():
            self._stop()

    def _stop(self) -> None:
        self._session_lock.closed = True
        pool, self._pool = self._pool, None
        _running.discard(self)
        launch, self._supervisor_launch = self._supervisor_launch, None
        if launch is not None:
            launch.terminate()
        if pool is None:
            return
        pool.abandon()  # another thread that waits for ranks raises
        self._session_lock.close(STOP_SECONDS)
        pool.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self.closed else "running" if self.started else "not started yet"
        return f"<Session of {rank_list(range(self._size))}, {state}>"

    def _ensure(self, presses: InterruptCounter) -> tuple[RankPool, list[str]]:
        """Return a crew whose ranks all live, and what had to be done for it."""
        notes: list[str] = []
        if self._pool is not None and self._pool.lost:
            pool, self._pool = self._pool, None
            pool.stop()
            self._names.forget_all()
            notes.append(
                "the supervisor process had died and the ranks with it; new ones are running, "
                "their variables are gone"
            )
        if self._pool is None:
            early, self._supervisor_launch = self._supervisor_launch, None
            output_of = self._tasks.output_of
            self._pool = pool = start_pool(early, self._start_method, self._size, output_of, presses)
            self._id = pool.session
            self._names.connect(pool.supervisor.broker)
            _running.add(self)
            return pool, notes
        notes += roster.revive(self._pool, self._names, presses)
        return self._pool, notes

    # running ------------------------------------------------------------------------------------------

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
    ) -> CellResult:
        """Run a cell's source on the ranks and wait for all of them.

        Parameters
        ----------
        cell : str
            Source as in a notebook's cell: magics, ``!cmd`` and top-level ``await`` work.
        ranks : collection of int, optional
            The ranks that run it; by default all.  The others are not disturbed.
        namespace : mutable mapping, optional
            Where the cell's free names are looked up, as DESIGN's "How names reach the ranks" says; arrays
            found there are moved into shared memory and re-bound.  By default nothing is looked up.
        share : str or collection of str
            Names of arrays in `namespace` that ranks may write from now on, as ``["a", "b"]`` or ``"a,b"``.
        timeout : float, optional
            Seconds after which the ranks are interrupted.
        sink : OutputSink, optional
            Takes output while the cell runs; the result holds it in any case.
        execution_count, line_offset : int
            The notebook's ``In[n]`` and the lines above `cell` in it, for tracebacks.
        want_values, show_values : bool
            Whether the last expression's values travel back, and whether they are displayed.
        seed : int, optional
            Reseed every rank's random streams first.
        on_error : {"stop", "continue"}
            When a rank fails: stop the others, or let them run to their end unless they wait for it.

        Returns
        -------
        CellResult

        Raises
        ------
        SyntaxError
            The cell does not compile; nothing was sent.
        ParallelError
            Ranks failed; ``.errors`` maps rank to exception, the root cause first, ``.result`` is what
            there was.
        KeyboardInterrupt
            It was interrupted; ``.result`` too.
        CellTimeoutError
            The time-out ran out.
        """
        options = CellOptions(
            namespace, share, timeout, sink, execution_count, line_offset, want_values, show_values, seed,
            on_error,
        )  # fmt: skip
        with self._session_lock.take() as presses:
            return self._tasks.finish(self._launch(cell, ranks, options, presses), presses)

    def submit(self, cell: str, *, ranks: Iterable[int] | None = None, **options: Any) -> PendingCell:
        """Run a cell's source on the ranks and return immediately.

        The notebook's names travel before this returns: what the caller changes afterwards does not
        matter, but for shared arrays, which are the same memory.  Until the cell has ended, whatever else
        needs the ranks raises `BusyError`.

        Parameters
        ----------
        cell, ranks, **options
            As for `run`.

        Returns
        -------
        PendingCell
            Its ``result()`` waits, and returns or raises what `run` would have.
        """
        chosen = CellOptions(**options)
        with self._session_lock.take() as presses:
            launched = self._launch(cell, ranks, chosen, presses)
            finish, release = partial(self._tasks.finish, launched, presses), self._session_lock.give_back
            return PendingCell(finish, presses, release, launched.output)

    def _launch(
        self, cell: str, ranks: Iterable[int] | None, options: CellOptions, presses: InterruptCounter
    ) -> RunningTask:
        cells.check_cell(cell, options)
        started = time.monotonic()
        pool, notes = self._ensure(presses)
        who = roster.chosen(ranks, self._size)
        return cells.launch(cell, options, pool, self._names, self._tasks, who, presses, notes, started)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank; return the results in rank order.

        Functions of ``__main__`` travel by value with their globals; shared arrays arrive as the same
        memory.  What they print is printed here, each line behind its rank.  Raises as `run` does.
        """
        if not callable(function):
            raise TypeError(f"call needs a function, not {type(function).__name__}; run takes a source")

        def make(pool: RankPool, number: int, who: tuple[int, ...]) -> tuple[Task, object]:
            parts = {"the function": function, **{f"argument {n}": arg for n, arg in enumerate(args, 1)}}
            pickled = dump((function, args), parts, pool.supervisor.broker)
            return CallTask(number, who, (), True, None, pickled.data), pickled

        return [rank.value for rank in self.perform(make, LineSink()).ranks.values()]

    def pull(self, name: str) -> RankValues:
        """Return the value of a variable of every rank; arrays come through shared memory, one copy."""
        if not str(name).isidentifier():
            raise ValueError(f"{name!r} is no variable's name")
        return self.perform(lambda _, number, who: (PullTask(number, who, (), True, None, name), None)).values

    def push(self, **values: Any) -> None:
        """Assign variables on every rank; shared arrays arrive as the same memory, all else is copied."""

        def make(pool: RankPool, number: int, who: tuple[int, ...]) -> tuple[Task, object]:
            pickled = dump(values, values, pool.supervisor.broker)
            return PushTask(number, who, (), False, None, pickled.data), pickled

        self.perform(make)

    def perform(
        self,
        make: Callable[[RankPool, int, tuple[int, ...]], tuple[Task, object]],
        sink: OutputSink | None = None,
    ) -> CellResult:
        """Perform a task on all ranks; `make` also returns what must live until they have taken it."""
        with self._session_lock.take() as presses:
            pool, notes = self._ensure(presses)
            who, number = roster.chosen(None, self._size), self._tasks.next_number()
            task, kept = make(pool, number, who)
            launched = self._tasks.launch(
                pool, number, who, lambda _: task, presses, kept=kept, notes=notes, sink=sink
            )
            return self._tasks.finish(launched, presses)

    # ranks --------------------------------------------------------------------------------------------

    def restart(self, rank: int | None = None) -> None:
        """Give one rank, or all, a fresh process under the same number; the others keep their variables."""
        with self._session_lock.take() as presses:
            if self._pool is None:
                return
            if rank is None:
                pool, self._pool = self._pool, None
                pool.stop()
                self._names.forget_all()
            else:
                (rank,) = roster.chosen([rank], self._size)
                if not self._pool.lost:
                    self._pool.end(self._pool.handles[rank])
            self._ensure(presses)

    def resize(self, world_size: int) -> None:
        """Grow to `world_size` ranks, or shrink from the top.

        Raises
        ------
        ValueError
            Ranks that would have to go hold variables that would be lost, or the machine cannot hold so many.
        """
        check_world_size(world_size, self._size)
        with self._session_lock.take() as presses:
            if self._pool is None:
                self._size = int(world_size)
                return
            pool, _ = self._ensure(presses)
            if world_size > self._size:
                roster.grow(pool, world_size, presses)
            elif world_size < self._size:
                roster.shrink(pool, self._tasks, self._names, world_size, presses)
            self._size = int(world_size)

    def interrupt(self) -> None:
        """Interrupt what runs, from any thread, as the notebook's stop button does; else do nothing."""
        self._session_lock.interrupt()

    def share_names(self, names: Sequence[str], namespace: MutableMapping[str, Any]) -> tuple[str, ...]:
        """Move arrays of `namespace` into shared memory, writable by ranks; return notes."""
        with self._session_lock.take():
            return tuple(self._names.share(names, namespace))
