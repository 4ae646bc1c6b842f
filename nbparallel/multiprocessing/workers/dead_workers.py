"""What the death of a worker costs: nothing, or the task that it had."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Sequence
from multiprocessing import pool as library
from typing import Any

from nbparallel.errors import WorkerDiedError
from nbparallel.wire.system import signal_name

_FAILED_STARTS = 8
"""Workers that may die one after the other before any has begun."""
_LOST = 255
"""Exit code that the library gives a process whose fork server has ended."""


def describe_end(process: Any) -> str:
    """Return how a worker ended, as the end of a sentence."""
    code = process.exitcode
    if name := signal_of(code):
        cause = ": by hand, or by the system because memory ran out" if name == "SIGKILL" else ""
        return f"was ended by {name}{cause}"
    printed = {1: "an exception, which it has printed, ", _LOST: "the end of its fork server, "}.get(code, "")
    return f"ended itself with exit code {code} ({printed}sys.exit, os._exit, or C code that calls exit)"


def end_processes(processes: Sequence[Any], seconds: float) -> None:
    """End processes: SIGTERM, after some seconds SIGKILL.

    A handler that was inherited may ignore the first, or raise where Python drops exceptions.
    """
    for process in processes:
        if process.exitcode is None:
            process.terminate()
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def signal_of(code: int | None) -> str | None:
    """Return the name of the signal that an exit code stands for, None if it stands for none."""
    return None if code is None or code >= 0 else signal_name(-code)


def died_error(process: Any, task: str, owner: str = "pool", why: str = "") -> WorkerDiedError:
    """Return the error about a worker and what it lost; `why` is what it ended of, if it has said so."""
    code, name = process.exitcode, signal_of(process.exitcode)
    return WorkerDiedError(
        f"worker {process.pid} of the {owner} {why or describe_end(process)}; {task}",
        pid=process.pid,
        exit_code=code if name is None else None,
        signal_name=name,
        task=task,
    )


def settle(living: weakref.ref[Any], process: Any) -> None:
    """Act on the end of a pool's worker, in the thread that reads results: its task fails."""
    pool = living()  # what waits to be done must not keep the pool
    if pool is None or pool._state == library.TERMINATE:
        return
    task, was_ready = pool._pipes.leave_out(process)
    if task is not None:
        pool._pipes.add_result(
            task, (False, died_error(process, f"it ran {_task_name(pool, *task)}", pool._owner))
        )
    if process.exitcode == 0 and task is None:
        return
    pool._failed_starts = 0 if was_ready else pool._failed_starts + 1
    told = pool.reported_failure()
    if not told and pool._failed_starts < _FAILED_STARTS:
        return
    pool._failed_starts = 0
    text = f"{_FAILED_STARTS} workers ended before their first task: look at the initializer"
    why = f"has ended: its initializer raised {told}" if told else ""
    pool.fail(died_error(process, "it takes no calls: make a new one" if told else text, pool._owner, why))


_CALLS = (
    (library.MapResult, "a call of map"),
    (library.ApplyResult, "a call of apply"),
    (library.IMapIterator, "a call of imap"),
)
"""In the order in which they are looked at: one is a subclass of the next."""


def _task_name(pool: Any, job: int, index: int) -> str:
    result = pool._cache.get(job)
    if name := getattr(result, "name", None):
        return str(name())
    chunk = getattr(result, "_chunksize", 1)
    if chunk > 1:
        return f"a chunk of {chunk} tasks, from task {index * chunk} of a call of map"
    name = next((name for kind, name in _CALLS if isinstance(result, kind)), f"job {job}")
    return f"task {index} of {name}"


def fail_all(pool: Any, error: BaseException) -> None:
    """Let every job fail that is under way."""
    jobs = list(pool._cache.values())
    pool._pipes.act(lambda: fail_jobs(jobs, error))


def fail_jobs(jobs: list[Any], error: BaseException) -> None:
    """Let these jobs fail, in the thread that reads results or after its end."""
    for result in jobs:
        if result._job not in result._cache:
            continue
        error = copy.copy(error)  # one would collect the frames of all waits
        if hasattr(result, "_unsorted"):
            result.end(error)
            continue
        if hasattr(result, "_number_left"):
            result._number_left = 1
        result._set(0, (False, error))
