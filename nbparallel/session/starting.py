"""Starting a crew: with the supervisor that waits for it, if that will do, else with a new one."""

from __future__ import annotations

from collections.abc import Callable

from nbparallel.errors import StartError
from nbparallel.session.interrupts import Presses
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.launch import Ignition
from nbparallel.session.processes.rank_pool import Crew


def start_crew(
    early: Ignition | None,
    start_method: str,
    world_size: int,
    output_of: Callable[[int], TaskOutput | None],
    presses: Presses,
) -> Crew:
    """Return a crew whose ranks are all ready; it owns what was started early, or that has been put out.

    Raises
    ------
    StartError, KeyboardInterrupt
        As `Crew.start`; nothing is left running.
    """
    if early is not None and not early.fits(start_method):
        early.put_out()
        early = None
    if early is not None and early.waited:
        try:
            return _crew_of(early, world_size, output_of, presses)
        except StartError:
            early = None  # it was killed meanwhile, or has imported what was replaced since
    return _crew_of(early or Ignition(start_method), world_size, output_of, presses)


def _crew_of(
    ignition: Ignition, world_size: int, output_of: Callable[[int], TaskOutput | None], presses: Presses
) -> Crew:
    crew = Crew(ignition, output_of)
    try:
        crew.start(list(range(world_size)), world_size, presses)
    except BaseException:
        crew.stop()
        raise
    return crew
