"""Elastic pool: the ranks of a session across first use, deaths, restarts and changes of their number."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

from nbparallel.channel.channel import SegmentClient
from nbparallel.errors import NO_RANKS, STOPPED, ClosedError, StartError, grouped, rank_list
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.names.delivery import NameDelivery
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.launch import SupervisorLaunch, check_world_size
from nbparallel.session.processes.rank_handle import describe_death
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.sharing import Store
from nbparallel.wire.identity import WorldPlace
from nbparallel.wire.system import do_all


class TaskPool(Protocol):
    """Ranks that run, and take tasks: of this machine (`RankPool`), or of others."""

    @property
    def place(self) -> WorldPlace:
        """Which ranks are where."""

    @property
    def store(self) -> Store:
        """Through which values travel to the ranks."""

    @property
    def ranks(self) -> range:
        """The numbers of the ranks that were started."""

    @property
    def broker(self) -> SegmentClient | None:
        """The client of the segment server; None: no memory is shared with the ranks."""

    def ended(self, milliseconds: float = 0) -> bool:
        """Whether what shares memory with the ranks has ended, or does within this time."""

    def invalidate_epoch(self) -> None:
        """Give up what a failure has left between the ranks."""

    def next_event(self, timeout: float | None) -> tuple[Any, Any] | None:
        """Return the next message, and which rank or machine has sent it; None: there is none."""


class SessionRanks(Protocol):
    """The ranks of a session from the first use to the end: of this machine (`ElasticPool`), or of others."""

    @property
    def place(self) -> WorldPlace:
        """Which ranks are where."""

    @property
    def pool(self) -> TaskPool | None:
        """What takes tasks; None before the first use, and after `close`."""

    @property
    def running(self) -> TaskPool:
        """The same; RuntimeError if the ranks were not started, or were stopped."""

    def ensure(self, interrupts: InterruptCounter) -> TaskPool:
        """Return a pool whose ranks all live, as far as there is room for them."""

    def take_notes(self) -> list[str]:
        """Return lines on what was started again since the last time."""

    def check_size(self, world_size: int) -> None:
        """Raise if there cannot be so many ranks."""

    def resize(self, world_size: int, interrupts: InterruptCounter) -> None:
        """Have so many ranks from now on; those beyond have ended."""

    def end(self, rank: int | None) -> None:
        """End one rank, or all; `ensure` starts them again."""

    def close(self) -> None:
        """Make every thread raise that starts ranks or waits for them; none start from now on."""

    def stop(self) -> None:
        """End every process; after `close`."""


RESTARTED = "restarted"
"""Why a rank was ended: the user asked for it, and needs no note."""


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
        place: WorldPlace,
        start_method: str,
        launch: SupervisorLaunch | None,
        names: NameDelivery,
        output_of: Callable[[int], TaskOutput | None],
    ) -> None:
        self.place, self.start_method = place, start_method
        self.pool: RankPool | None = None
        """None before the first use, and after `close`."""
        self.starting: tuple[int, ...] = ()
        """The ranks that are being started."""
        self._launch, self._names, self._output_of = launch, names, output_of
        self._pools: set[RankPool] = set()
        """Every pool that is not stopped yet, also while its ranks start."""
        self._closed = False
        self._notes: list[str] = []
        """On what was started again, until a cell shows them: a start may be interrupted, or show nothing."""

    @property
    def running(self) -> RankPool:
        """The pool; RuntimeError if the ranks were not started, or were stopped."""
        if self.pool is None:
            raise RuntimeError(NO_RANKS)
        return self.pool

    def ensure(self, interrupts: InterruptCounter) -> RankPool:
        """Return a pool whose ranks all live; `take_notes` returns what was started again.

        Raises
        ------
        StartError, KeyboardInterrupt
            As `RankPool.start`.
        ClosedError
            `close` was called, perhaps while this ran.
        """
        pool = self.pool
        if pool is not None and pool.ended() and not self._closed:
            self._stop_pool()
            self._notes.append(
                "the supervisor process had died and the ranks with it; new ones are running, "
                "without the variables of the old ones"
            )
            pool = None
        if pool is None or self._closed:
            with self._starting(self.place.ranks):
                pool = self.pool = self._start(interrupts)
            self._names.connect(pool.broker)
        else:
            self._revive(pool, interrupts)
        if self._closed:
            self.pool = None
            raise ClosedError(STOPPED)
        return pool

    def take_notes(self) -> list[str]:
        """Return a line for everything that was started again since the last time."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Start no ranks from now on; make every thread raise that starts ranks or waits for them."""
        self._closed = True  # before the pools are looked at: one that is made later finds it
        self.pool = None
        for pool in list(self._pools):
            pool.abandon()

    def stop(self) -> None:
        """End every process; after `close`."""
        launch, self._launch = self._launch, None
        do_all(
            *(partial(self._discard, pool) for pool in list(self._pools)),
            *(() if launch is None else (launch.terminate,)),
        )

    def end(self, rank: int | None) -> None:
        """Kill one rank, or end all; `ensure` starts them again."""
        if rank is None:
            self._stop_pool()
        elif self.pool is not None and not self.pool.ended():
            handle = self.pool.handle(rank)
            handle.ended_because = RESTARTED
            self.pool.end(handle)

    def check_size(self, world_size: int) -> None:
        """Raise if this machine cannot hold so many ranks."""
        check_world_size(world_size, self.place.world_size)

    def resize(self, world_size: int, interrupts: InterruptCounter) -> None:
        """Have `world_size` ranks; if one cannot start, none of the new ones stays."""
        pool, before, place = self.pool, self.place.world_size, WorldPlace(world_size)
        if pool is not None and world_size > before:
            pool.place = place
            try:
                with self._starting(range(before, world_size)) as ranks:
                    pool.start(ranks, interrupts)
            except BaseException:
                pool.shrink(before)
                raise
        self.place = place

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
        try:
            if pool is not None:
                self._discard(pool)
        finally:
            self._names.all_ranks_lost()

    def _discard(self, pool: RankPool) -> None:
        try:
            pool.stop()
        finally:
            self._pools.discard(pool)

    def _revive(self, pool: RankPool, interrupts: InterruptCounter) -> None:
        """Start a fresh process for every dead rank, and note it; wait for those that are starting."""
        dead = pool.dead()
        for handle in dead:
            self._names.rank_lost(handle.rank)
        # One that was never ready was started for another one, and the note on that one is there.
        ways = grouped(
            (describe_death(handle.death), handle.rank)
            for handle in dead
            if handle.death is not None and handle.ready and handle.ended_because != RESTARTED
        )
        self._notes += [_back_note(ranks, how) for how, ranks in ways.items()]
        if dead or not all(handle.usable for handle in pool.handles):
            with self._starting(handle.rank for handle in dead) as ranks:
                pool.start(ranks, interrupts)

    def _start(self, interrupts: InterruptCounter) -> RankPool:
        """Return a pool whose ranks are all ready; nothing is left running if that fails."""
        if self._closed:
            raise ClosedError(STOPPED)
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
        pool = RankPool(launch, self._output_of, self.place)
        self._pools.add(pool)
        try:
            if self._closed:
                raise ClosedError(STOPPED)
            pool.start(list(self.place.ranks), interrupts)
        except BaseException:
            self._discard(pool)
            raise
        return pool


def _back_note(ranks: list[int], how: str) -> str:
    """Return the line about ranks that ended in one way and run again."""
    if len(ranks) == 1:
        return f"{rank_list(ranks)} {how}; it was started again under its number, without its variables"
    if how.startswith("was "):
        how = f"were {how.removeprefix('was ')}"
    return f"{rank_list(ranks)} {how}; they were started again under their numbers, without their variables"
