"""Limits of the machine: how many ranks it can hold, and how many CPUs this process may use."""

from __future__ import annotations

import resource

from nbparallel.wire import system
from nbparallel.wire.units import size_text

RANK_BYTES = 24 << 20
"""Private memory of a rank at rest (9 MB forked, 23 MB as a fresh interpreter), rounded up."""
RANK_FILES = 6
"""Descriptors that the kernel holds for one rank: socket, two pipes, pidfd, and room for segments."""
BESIDE_RANKS = 4
"""Processes and threads beside the ranks: the supervisor, the process that ranks are forked from, the one
between the two for a moment, and the session's thread."""
USED_FILES = 64
"""Descriptors that this process has open, where /proc does not say it."""
MOST_RANKS = 512
"""The control segment holds a ring for every ordered pair of ranks; beyond this it grows too large."""


def usable_cpus() -> int:
    """Return how many CPUs this process may use: affinity and cgroup quota, at least 1."""
    return system.usable_cpus(system.affine_cpus())


def check_world_size(world_size: int, running: int = 0) -> None:
    """Refuse a number of ranks that this machine cannot hold.

    Parameters
    ----------
    world_size : int
        Number of ranks wanted.
    running : int
        How many of them exist already.

    Raises
    ------
    TypeError
        It is no integer.
    ValueError
        It is below 1, or more than the machine can hold; the message says which limit and what fits.
    """
    if isinstance(world_size, bool) or not hasattr(world_size, "__index__"):
        raise TypeError(f"the number of ranks must be an integer, not {type(world_size).__name__}")
    world_size = world_size.__index__()
    if world_size < 1:
        raise ValueError(f"there must be at least 1 rank, not {world_size}")
    new = world_size - running
    for most, reason in _limits(world_size, running):
        if new > 0 and world_size > most:
            fitting = f"at most {most} do" if most > 0 else "not even one does"
            raise ValueError(
                f"{world_size} ranks do not fit this machine: {reason}; {fitting}. "
                f"More ranks than CPUs ({usable_cpus()} here) seldom help."
            )


def check_ranks_per_cpu(world_size: int, most: int) -> None:
    """Refuse more ranks than `most` for each CPU that this process may use.

    Raises
    ------
    ValueError
        The message says how many CPUs there are, and which setting of the notebook allows so many ranks.
    """
    cpus = usable_cpus()
    if world_size > most * cpus:
        raise ValueError(
            f"{world_size} ranks on {cpu_count_text(cpus)}: they would wait for a CPU most of the time, so "
            f"at most {most * cpus} are started here, {most} for each CPU; to insist: "
            f"%config NbParallel.ranks_per_cpu = {-(-world_size // cpus)}"
        )


def cpu_count_text(cpus: int) -> str:
    """Return ``1 CPU`` or ``2 CPUs``."""
    return f"{cpus} CPU{'s' * (cpus != 1)}"


def _limits(world_size: int, running: int) -> list[tuple[int, str]]:
    limits = [(MOST_RANKS, "the segment through which ranks communicate grows with their square")]
    files, _ = system.process_limit(resource.RLIMIT_NOFILE)
    if files is not None:
        room = (files - (system.open_descriptors() or USED_FILES)) // RANK_FILES
        limits.append((running + room, f"the limit of open files is {files} (ulimit -n)"))
    threads = max(1, usable_cpus() // world_size)  # of BLAS on each rank
    for limit in system.task_limits():
        room = limit.most - limit.used - (1 if running else BESIDE_RANKS)
        text = f"{limit.used} processes and threads are there of the {limit.most} that {limit.where}"
        limits.append((running + room // threads, text))
    memory = system.available_memory()
    if memory is not None:
        free = memory[0]
        text = f"each needs about {size_text(RANK_BYTES)} and {size_text(free)} of memory are free"
        limits.append((running + free // RANK_BYTES, text))
    return limits
