"""Changing who is there: bringing dead ranks back, adding ranks, taking them away from the top."""

from __future__ import annotations

from nbparallel.errors import rank_list
from nbparallel.session.crew import Crew
from nbparallel.session.interrupt import Presses
from nbparallel.session.names import Names
from nbparallel.session.outcomes import describe_death
from nbparallel.session.tasks import Tasks
from nbparallel.wire.messages import NamesTask


def revive(crew: Crew, names: Names, presses: Presses) -> list[str]:
    """Give every dead rank a fresh process under its number; return a line for each."""
    dead = [(handle.rank, handle.death) for handle in crew.dead()]
    if not dead:
        return []
    for rank, _ in dead:
        names.forget(rank)
    crew.start([rank for rank, _ in dead], len(crew.handles), presses)
    return [
        f"rank {rank} {describe_death(death)}; it is back with its number, its variables are gone"
        for rank, death in dead
        if death is not None
    ]


def grow(crew: Crew, world_size: int, presses: Presses) -> None:
    """Add ranks up to `world_size`; if one cannot start, none of the new ones stays."""
    before = len(crew.handles)
    try:
        crew.start(list(range(before, world_size)), world_size, presses)
    except BaseException:
        crew.shrink(before)
        raise


def shrink(crew: Crew, tasks: Tasks, names: Names, world_size: int, presses: Presses) -> None:
    """End the ranks from `world_size` on.

    Raises
    ------
    ValueError
        One of them holds variables that would be lost.
    """
    who, number = tuple(range(world_size, len(crew.handles))), tasks.next_number()
    task = NamesTask(number, who, (), True, None)
    result = tasks.perform(crew, number, who, lambda _: task, presses, notes=[])
    holding = {rank: held for rank, held in result.values.items() if held}
    if holding:
        rank, held = next(iter(holding.items()))
        raise ValueError(
            f"{rank_list(holding)} would have to go but hold variables (rank {rank}: "
            f"{', '.join(held[:5])}{' …' if len(held) > 5 else ''}); use -r to run on fewer ranks, "
            "or %parallel_stop first"
        )
    for rank in who:
        names.forget(rank)
    crew.shrink(world_size)
