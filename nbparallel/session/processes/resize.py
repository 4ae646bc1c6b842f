"""Who is there: choosing ranks, bringing dead ones back, adding some, taking them away from the top."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from typing import Any

from nbparallel.errors import StartError, rank_list
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.names.delivery import NameDelivery
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.launch import SupervisorLaunch
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.tasks.dispatch import TaskDispatcher
from nbparallel.session.tasks.outcomes import describe_death
from nbparallel.wire.messages import NamesTask


def chosen(ranks: Iterable[int] | None, world_size: int) -> tuple[int, ...]:
    """Return which ranks take part, ascending; None means all.

    Raises
    ------
    TypeError, ValueError
        They are no integers, or names ranks that do not exist.
    """
    if ranks is None:
        return tuple(range(world_size))
    said: Any = ranks
    given = list(said) if isinstance(said, Iterable) else [said, None]
    if not all(isinstance(rank, numbers.Integral) and not isinstance(rank, bool) for rank in given):
        raise TypeError(f"ranks must be a sequence of integers, as [0, 2], not {said!r}")
    who = sorted({int(rank) for rank in given})
    if not who or who[0] < 0 or who[-1] >= world_size:
        raise ValueError(f"there are {rank_list(range(world_size))}, not {who}")
    return tuple(who)


def revive(pool: RankPool, names: NameDelivery, presses: InterruptCounter) -> list[str]:
    """Give every dead rank a fresh process under its number; return a line for each."""
    dead = [(handle.rank, handle.death) for handle in pool.dead()]
    if not dead:
        return []
    for rank, _ in dead:
        names.forget(rank)
    pool.start([rank for rank, _ in dead], len(pool.handles), presses)
    return [
        f"rank {rank} {describe_death(death)}; it is back with its number, its variables are gone"
        for rank, death in dead
        if death is not None
    ]


def grow(pool: RankPool, world_size: int, presses: InterruptCounter) -> None:
    """Add ranks up to `world_size`; if one cannot start, none of the new ones stays."""
    before = len(pool.handles)
    try:
        pool.start(list(range(before, world_size)), world_size, presses)
    except BaseException:
        pool.shrink(before)
        raise


def shrink(
    pool: RankPool, tasks: TaskDispatcher, names: NameDelivery, world_size: int, presses: InterruptCounter
) -> None:
    """End the ranks from `world_size` on.

    Raises
    ------
    ValueError
        One of them holds variables that would be lost.
    """
    who, number = tuple(range(world_size, len(pool.handles))), tasks.next_number()
    task = NamesTask(number, who, (), True, None)
    result = tasks.finish(tasks.launch(pool, number, who, lambda _: task, presses, notes=[]), presses)
    holding = {rank: held for rank, held in result.values.items() if held}
    if holding:
        rank, held = next(iter(holding.items()))
        raise ValueError(
            f"{rank_list(holding)} would have to go but "
            f"{'holds' if len(holding) == 1 else 'hold'} variables (rank {rank}: "
            f"{', '.join(held[:5])}{' …' if len(held) > 5 else ''}); use -r to run on fewer ranks, "
            "or %parallel_stop first"
        )
    for rank in who:
        names.forget(rank)
    pool.shrink(world_size)


def start_pool(
    early: SupervisorLaunch | None,
    start_method: str,
    world_size: int,
    output_of: Callable[[int], TaskOutput | None],
    presses: InterruptCounter,
) -> RankPool:
    """Return a crew whose ranks are all ready; it owns what was started early, or that has been put out.

    Raises
    ------
    StartError, KeyboardInterrupt
        As `RankPool.start`; nothing is left running.
    """
    if early is not None and not early.fits(start_method):
        early.terminate()
        early = None
    if early is not None and early.waited:
        try:
            return _pool_of(early, world_size, output_of, presses)
        except StartError:
            early = None  # it was killed meanwhile, or has imported what was replaced since
    return _pool_of(early or SupervisorLaunch(start_method), world_size, output_of, presses)


def _pool_of(
    launch: SupervisorLaunch,
    world_size: int,
    output_of: Callable[[int], TaskOutput | None],
    presses: InterruptCounter,
) -> RankPool:
    pool = RankPool(launch, output_of)
    try:
        pool.start(list(range(world_size)), world_size, presses)
    except BaseException:
        pool.stop()
        raise
    return pool
