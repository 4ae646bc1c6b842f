"""How far the calls of a pool are, for the live panel: what its process knows of the workers, and no more."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbparallel.session.monitoring.activity import SessionActivity

BEGUN: list[weakref.ref[ItemProgress]] = []
"""At most one: what a pool of this process has begun last."""


def newest() -> ItemProgress | None:
    """Return what a pool of this process has begun last, if the pool is still there."""
    return next((found for begun in BEGUN if (found := begun()) is not None and found.sent), None)


class ItemProgress:
    """Items of a pool, from its first call under way to its last; each has the number at which it was sent.

    Parameters
    ----------
    cache : dict
        The pool's jobs, with its `pipes`.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = weakref.ref(cache)
        self.began_ns, self.ended_ns = time.monotonic_ns(), 0
        self.sent = self.expected = 0
        """Items: how many workers have got, or will get next; how many calls have announced."""
        self.done: defaultdict[int, int] = defaultdict(int)
        self.busy_ns: defaultdict[int, int] = defaultdict(int)
        """By the worker's place, whichever process was there."""
        BEGUN[:] = [weakref.ref(self)]

    @property
    def total(self) -> int | None:
        """How many items these are; None: unknown."""
        cache = None if self.ended_ns else self._cache()
        more = 0 if cache is None else cache.remaining()
        return None if more is None else max(self.sent, self.expected + more)

    def activity(self, ranks: SessionActivity | None) -> SessionActivity:
        """Return how far workers are, as if they were ranks of a map; of `ranks` it has what memory holds."""
        from nbparallel.session.monitoring.activity import RankActivity, SessionActivity, read_memory
        from nbparallel.session.monitoring.segments import memory_extent
        from nbparallel.sharing import get_sharing_strategy  # with numpy

        cache, running, until = self._cache(), not self.ended_ns, self.ended_ns or time.monotonic_ns()
        seconds, total = (until - self.began_ns) / 1e9, self.total
        found = dict.fromkeys(list(self.done), (0, -1, until))
        found |= {} if cache is None else cache.pipes.at_work()
        workers = []
        for place, (pid, item, since_ns) in sorted(found.items()):
            computing = running and item >= 0
            memory = read_memory(pid) if pid else {}
            workers.append(
                RankActivity(
                    rank=place,
                    pid=pid,
                    state="computing" if computing else "idle",
                    operation="",
                    line=0,
                    waits_for=(),
                    seconds=seconds,
                    computing=(self.busy_ns[place] + (until - since_ns) * computing) / 1e9,
                    waiting=0.0,
                    operations=0,
                    finished=0.0 if running else seconds,
                    private_nbytes=memory.get("private_nbytes", 0),
                    items=self.done[place],
                    item=item if computing else -1,
                )
            )
        if ranks is None:
            free, whole = memory_extent()
            ranks = SessionActivity(False, 0, 0.0, (), get_sharing_strategy(), 0, 0, 0)
            ranks = replace(ranks, limit_nbytes=free, memory_nbytes=whole)
        return replace(
            ranks,
            running=running,
            number=0,
            seconds=seconds,
            ranks=tuple(workers),
            phase="running" if running else "finished",
            culprits=(),
            waited=(),
            moved=(),
            began_ns=self.began_ns,
            items=-1 if total is None else total,
            member="worker",
        )
