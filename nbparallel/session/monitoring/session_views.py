"""Views of a session: statistics, names, completions, activity, timeline.

The modules that make them are imported when the first cell has ended (`load_views`), not before its output.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbparallel import sharing

if TYPE_CHECKING:
    from nbparallel.session.monitoring.activity import ActivityReader, SessionActivity
    from nbparallel.session.monitoring.statistics import SessionStatistics
    from nbparallel.session.monitoring.timeline import Timeline
    from nbparallel.session.monitoring.who import SessionNames
    from nbparallel.session.names.delivery import NameDelivery
    from nbparallel.session.processes.elastic_pool import ElasticPool
    from nbparallel.session.tasks.dispatch import TaskDispatcher
    from nbparallel.wire.inspection import Completion


@functools.cache
def load_views() -> None:
    """Import what the methods below need: an installation may have removed the files when they are called."""
    from nbparallel.session.monitoring import (  # noqa: F401
        activity,
        segments,
        statistics,
        timeline,
        who,
    )


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
        from nbparallel.session.monitoring import statistics

        names = self._names.namespace if namespace is None else namespace
        pool = self._ranks.running
        return statistics.take_statistics(self._ranks.start_method, pool, names, self.activity())

    def who(self, namespace: Mapping[str, Any] | None, hidden: Mapping[str, Any] | None) -> SessionNames:
        """Return the names of the notebook and of the ranks."""
        from nbparallel.session.monitoring.who import compare

        names = self._names.namespace if namespace is None else namespace
        pool = self._ranks.running
        handles = list(pool.handles)
        reports = pool.queries.names(handles)
        return compare(names or {}, hidden or {}, sharing.current_store(), handles, reports)

    def complete(self, text: str, cursor: int, patience: float) -> tuple[Completion, ...]:
        """Return completions by rank 0; none if it is busy or does not run."""
        pool = self._ranks.pool
        if pool is None or not pool.handles:
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
