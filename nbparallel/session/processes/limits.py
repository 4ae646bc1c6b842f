"""Limits of the machine: how many ranks it can hold, and how many CPUs this process may use."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from nbparallel.errors import StartError
from nbparallel.wire import system
from nbparallel.wire.units import size_text

# Refusals: what the system did not give when ranks were to be started, and which limit was in the way.


@contextlib.contextmanager
def as_start_error(what: str) -> Iterator[None]:
    """Raise `StartError` if the system refuses `what` inside of the block."""
    try:
        yield
    except OSError as error:
        raise start_error(what, error) from error
    except AttributeError as error:  # a Python that was built on a system without the call
        raise start_error(what, OSError(errno.ENOSYS, str(error))) from error
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise start_error(what, OSError(errno.EAGAIN, str(error))) from error


def start_error(what: str, error: OSError) -> StartError:
    """Return the error that says what the system refused, why, and what to do."""
    return StartError(f"the system refused {what} ({error.strerror or error}): {_cause(error.errno or 0)}")


def _cause(number: int) -> str:
    if number == errno.EAGAIN:
        return f"{_tasks()}; run fewer ranks, end other programs, or raise the limit"
    if number == errno.EMFILE:
        soft, _ = system.process_limit(resource.RLIMIT_NOFILE)
        return f"this process may have {soft} open files; close some, or raise the limit (ulimit -n)"
    if number == errno.ENFILE:
        return "this machine has too many open files (sysctl fs.file-max); close some"
    if number == errno.EFBIG:
        soft, _ = system.process_limit(resource.RLIMIT_FSIZE)
        most = "" if soft is None else f" of {size_text(soft)}"
        return f"shared memory counts as a file, and the limit{most} on the size of files is too low; " + (
            "start the notebook or script without it (ulimit -f unlimited)"
        )
    if number in (errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT):
        return (
            "this machine or container is short of memory; delete large variables, end other programs, or "
            "run fewer ranks"
        )
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return (
            "it takes Linux 5.3 or newer, and a container whose seccomp profile allows it (Docker's does "
            "since 20.10)"
        )
    return os.strerror(number)


def _tasks() -> str:
    full = [limit for limit in system.task_limits() if limit.used + 1 >= limit.most] or [
        *system.task_limits()
    ]
    if not full:
        return "the system has no room for more processes and threads"
    limit = min(full, key=lambda limit: limit.most - limit.used)
    return f"there are {limit.used} processes and threads of the {limit.most} that {limit.where}"


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
