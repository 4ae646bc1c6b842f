"""SessionViews: what a session shows of itself; from any thread, also while a cell runs.

What makes a picture is imported when the first cell has ended (`load`): until its output it does without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbparallel import sharing
from nbparallel.errors import NO_RANKS

if TYPE_CHECKING:
    from nbparallel.channel.segment_client import SegmentClient
    from nbparallel.session.monitoring.activity import SessionActivity
    from nbparallel.session.monitoring.statistics import SessionStatistics
    from nbparallel.session.monitoring.timeline import Timeline
    from nbparallel.session.monitoring.who import SessionNames
    from nbparallel.session.names.delivery import NameDelivery
    from nbparallel.session.processes.rank_pool import RankPool
    from nbparallel.session.tasks.dispatch import TaskDispatcher
    from nbparallel.wire.inspection import Completion


def load() -> None:
    """Import what the methods below need: the package may be gone when they are called (FAULTS F75)."""
    from nbparallel.session.monitoring import who  # noqa: F401


class SessionViews:
    """The part of `Session` that only looks."""

    _id: str
    _start_method: str
    _pool: RankPool | None
    _names: NameDelivery
    _tasks: TaskDispatcher

    def statistics(self, namespace: Mapping[str, Any] | None = None) -> SessionStatistics:
        """Return a frozen picture of the session; waits for no rank, works while a cell runs.

        Parameters
        ----------
        namespace : mapping, optional
            The notebook's variables, for the names of shared arrays; by default those of the last cell.

        Raises
        ------
        RuntimeError
            The ranks were not started, or were stopped.
        """
        from nbparallel.session.monitoring import statistics

        names = self._names.namespace if namespace is None else namespace
        return statistics.take(self._id, self._start_method, self._running_pool(), names)

    def who(
        self, namespace: Mapping[str, Any] | None = None, hidden: Mapping[str, Any] | None = None
    ) -> SessionNames:
        """Return which names the notebook and the ranks have, and how they look; no value travels.

        Idle ranks are asked, which takes a millisecond and at most about a second; busy ones are named.

        Parameters
        ----------
        namespace : mapping, optional
            The notebook's names; by default those of the last cell.
        hidden : mapping, optional
            Names among them that are not the user's, as ``shell.user_ns_hidden``.

        Raises
        ------
        RuntimeError
            As `statistics`.
        """
        from nbparallel.session.monitoring.who import compare

        pool = self._running_pool()
        names = self._names.namespace if namespace is None else namespace
        handles = list(pool.handles)
        said = pool.looking.ask(handles)
        return compare(names or {}, hidden or {}, sharing.current_store(), handles, said)

    def complete(self, text: str, cursor: int, patience: float = 0.1) -> tuple[Completion, ...]:
        """Return how the code before `cursor` may go on, by what rank 0 has; within `patience` seconds.

        Nothing if rank 0 is busy or does not run: it is not disturbed.
        """
        pool = self._pool
        if pool is None or not pool.handles:
            return ()
        return pool.looking.complete(pool.handles[0], text, cursor, patience).found

    def activity(self) -> SessionActivity:
        """Return what ranks do at this moment; takes a tenth of a millisecond and disturbs no rank.

        Raises
        ------
        RuntimeError
            As `statistics`.
        """
        from nbparallel.session.monitoring import activity

        return activity.take(self._running_pool(), self._tasks)

    def timeline(self) -> Timeline | None:
        """Return what each rank did when in the last cell or call that has ended; None if there was none.

        Of more than 2000 operations in a cell, or of many short ones in one statement, some are only counted:
        `RankRow.omitted`.
        """
        from nbparallel.session.monitoring.timeline import build

        record = self._tasks.record
        return None if record is None else build(record)

    @property
    def broker(self) -> SegmentClient:
        """The broker of this session's segments; RuntimeError as `statistics`."""
        return self._running_pool().supervisor.broker

    def _running_pool(self) -> RankPool:
        pool = self._pool
        if pool is None:
            raise RuntimeError(NO_RANKS)
        return pool
