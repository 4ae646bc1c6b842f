"""Taking ranks away from the top, if nobody loses anything by it."""

from __future__ import annotations

from nbparallel.errors import rank_list
from nbparallel.session.crew import Crew
from nbparallel.session.names import Names
from nbparallel.session.tasks import Tasks
from nbparallel.wire.messages import NamesTask


def shrink(crew: Crew, tasks: Tasks, names: Names, world_size: int) -> None:
    """End the ranks from `world_size` on.

    Raises
    ------
    ValueError
        One of them holds variables that the user assigned there.
    """
    who, number = tuple(range(world_size, len(crew.handles))), tasks.next_number()
    task = NamesTask(number, who, (), True, None)
    result = tasks.perform(crew, number, who, lambda _: task, notes=[])
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
