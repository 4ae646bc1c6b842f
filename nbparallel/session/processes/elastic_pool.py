"""Elastic pool: the ranks of a session across first use, deaths, restarts and changes of their number."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from nbparallel.errors import NO_RANKS, StartError, rank_list
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.names.delivery import NameDelivery
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.launch import SupervisorLaunch
from nbparallel.session.processes.rank_exit import describe_exit
from nbparallel.session.processes.rank_pool import RankPool


class ElasticPool:
    """A rank pool that starts on first use, is repaired before each task, and can be resized.

    Parameters
    ----------
    launch : SupervisorLaunch, optional
        A supervisor that was started early; it belongs to this object from now on.
    names : NameDelivery
        Forgets what was delivered to ranks that have ended.
    output_of : callable
        Returns where the output of a task goes.
    """

    def __init__(
        self,
        world_size: int,
        start_method: str,
        launch: SupervisorLaunch | None,
        names: NameDelivery,
        output_of: Callable[[int], TaskOutput | None],
    ) -> None:
        self.world_size, self.start_method = world_size, start_method
        self.pool: RankPool | None = None
        """None before the first use, and after `detach`."""
        self.starting: tuple[int, ...] = ()
        """The ranks that are being started."""
        self._launch, self._names, self._output_of = launch, names, output_of

    @property
    def running(self) -> RankPool:
        """The pool; RuntimeError if the ranks were not started, or were stopped."""
        if self.pool is None:
            raise RuntimeError(NO_RANKS)
        return self.pool

    def ensure(self, interrupts: InterruptCounter) -> tuple[RankPool, list[str]]:
        """Return a pool whose ranks all live, and notes on what was started again.

        Raises
        ------
        StartError, KeyboardInterrupt
            As `RankPool.start`.
        """
        notes: list[str] = []
        if self.pool is not None and self.pool.lost:
            self._stop_pool()
            notes.append(
                "the supervisor process had died and the ranks with it; new ones are running, "
                "their variables are gone"
            )
        if self.pool is None:
            with self._starting(range(self.world_size)):
                self.pool = self._start(interrupts)
            self._names.connect(self.pool.supervisor.broker)
            return self.pool, notes
        return self.pool, [*notes, *self._revive(self.pool, interrupts)]

    def detach(self) -> RankPool | None:
        """Terminate a supervisor that was started early; return the pool, which the caller has to stop."""
        launch, self._launch = self._launch, None
        pool, self.pool = self.pool, None
        if launch is not None:
            launch.terminate()
        return pool

    def end(self, rank: int | None) -> None:
        """Kill one rank, or end all; `ensure` starts them again."""
        if self.pool is None:
            return
        if rank is None:
            self._stop_pool()
        elif not self.pool.lost:
            self.pool.end(self.pool.handles[rank])

    def grow(self, world_size: int, interrupts: InterruptCounter) -> None:
        """Add ranks up to `world_size`; if one cannot start, none of the new ones stays."""
        pool = self.running
        before = len(pool.handles)
        try:
            with self._starting(range(before, world_size)) as ranks:
                pool.start(ranks, world_size, interrupts)
        except BaseException:
            pool.shrink(before)
            raise

    @contextlib.contextmanager
    def _starting(self, ranks: Iterable[int]) -> Iterator[list[int]]:
        """Let others see which ranks are being started."""
        self.starting = tuple(ranks)
        try:
            yield list(self.starting)
        finally:
            self.starting = ()

    def _stop_pool(self) -> None:
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.stop()
        self._names.all_ranks_lost()

    def _revive(self, pool: RankPool, interrupts: InterruptCounter) -> list[str]:
        """Start a fresh process for every dead rank; return a note for each way in which they ended."""
        ends = {handle.rank: handle.death for handle in pool.dead()}
        if not ends:
            return []
        for rank in ends:
            self._names.rank_lost(rank)
        with self._starting(ends) as ranks:
            pool.start(ranks, len(pool.handles), interrupts)
        ways: dict[str, list[int]] = {}
        for rank, end in ends.items():
            if end is not None:
                ways.setdefault(describe_exit(end), []).append(rank)
        return [_back_note(ranks, how) for how, ranks in ways.items()]

    def _start(self, interrupts: InterruptCounter) -> RankPool:
        """Return a pool whose ranks are all ready; nothing is left running if that fails."""
        early, self._launch = self._launch, None
        if early is not None and not early.is_current(self.start_method):
            early.terminate()
            early = None
        if early is not None and early.waited:
            try:
                return self._start_with(early, interrupts)
            except StartError:
                early = None  # it was killed, or it has imported a package that was replaced since
        return self._start_with(early or SupervisorLaunch(self.start_method), interrupts)

    def _start_with(self, launch: SupervisorLaunch, interrupts: InterruptCounter) -> RankPool:
        pool = RankPool(launch, self._output_of)
        try:
            pool.start(list(range(self.world_size)), self.world_size, interrupts)
        except BaseException:
            pool.stop()
            raise
        return pool


def _back_note(ranks: list[int], how: str) -> str:
    """Return the line about ranks that ended in one way and run again."""
    if len(ranks) == 1:
        return f"{rank_list(ranks)} {how}; it is back with its number, its variables are gone"
    if how.startswith("was "):
        how = f"were {how.removeprefix('was ')}"
    return f"{rank_list(ranks)} {how}; they are back with their numbers, their variables are gone"
