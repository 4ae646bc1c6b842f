"""What the death of a worker costs: mostly nothing, else its task, at worst all that is under way."""

from __future__ import annotations

import copy
import itertools
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing import pool as library
from typing import Any

from nbparallel.errors import WorkerDiedError
from nbparallel.multiprocessing.workers.pool_streams import Step, WorkerSlot

_LOCK_CHECKS = 5
"""How often a lock is looked at, a few milliseconds apart, before it is taken for a dead worker's."""
_FAILED_STARTS = 8
"""Workers that may die one after the other before any has begun a task."""
_LOST = 255
"""Exit code that the library gives a process whose fork server has ended."""
_TORN = frozenset({Step.READING, Step.WRITING})


def is_held(lock: Any) -> bool:
    """Whether some process has a lock."""
    return bool(lock._semlock._is_zero())


def free_lock(lock: Any, living: list[WorkerSlot], holding: frozenset[Step]) -> None:
    """Release a lock that a dead worker had: it is held, and no living worker records that it holds it."""
    for _ in range(_LOCK_CHECKS):
        if not is_held(lock) or any(slot.read()[0] in holding for slot in living):
            return
        time.sleep(0.002)
    try:
        lock.release()
    except ValueError:
        return  # its holder was only slow


def describe_end(process: Any) -> str:
    """Return how a worker ended, as the end of a sentence."""
    code = process.exitcode
    if name := signal_name(code):
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


def signal_name(code: int | None) -> str | None:
    """Return the name of the signal that an exit code stands for, None if it stands for none."""
    if code is None or code >= 0:
        return None
    return next((s.name for s in signal.Signals if s.value == -code), f"signal {-code}")


def died_error(process: Any, task: str, owner: str = "pool", why: str = "") -> WorkerDiedError:
    """Return the error about a worker and what it lost; `why` is what it ended of, if it has said so."""
    code, name = process.exitcode, signal_name(process.exitcode)
    return WorkerDiedError(
        f"worker {process.pid} of the {owner} {why or describe_end(process)}; {task}",
        pid=process.pid,
        exit_code=code if name is None else None,
        signal_name=name,
        task=task,
    )


class Casualties:
    """Decides what the death of a pool's worker costs, and lets the pool go on.

    Parameters
    ----------
    pool
        The pool; the caller holds it.
    """

    def __init__(self) -> None:
        self.slots: dict[int, WorkerSlot] = {}
        """Slots of workers that may live, by the `id` of their process."""
        self._failed_starts = 0
        self._lock = threading.Lock()

    def free_place(self) -> int:
        """Return the first place at which no worker is."""
        taken = {slot.place for slot in self.slots.values()}
        return next(place for place in itertools.count() if place not in taken)

    def settle(self, pool: Any, process: Any) -> None:
        """Act on the end of a worker, in the thread that replaces it."""
        with self._lock:
            slot = self.slots.pop(id(process), None)
            if slot is None:
                return
            step, job, index, begun = slot.read()
            living = list(self.slots.values())
            if process.exitcode == 0 and step is Step.AWAY:
                return
            if step in _TORN:
                self._renew(pool, process, f"it died while {_DOING[step]}: all tasks under way are lost")
                return
            free_lock(pool._inqueue._rlock, living, frozenset({Step.WAITING, Step.READING}))
            free_lock(pool._outqueue._wlock, living, frozenset({Step.PUTTING, Step.WRITING}))
            if step in (Step.RUNNING, Step.SENDING, Step.PUTTING):
                error = died_error(process, f"it ran {_task_name(pool, job, index)}", pool._owner)
                cache, reader = pool._cache, pool._quick_get

                def fail_task() -> None:
                    if not reader.has_delivered(slot.number, begun) and (result := cache.get(job)):
                        result._set(index, (False, error))

                reader.add(fail_task)
            self._count_start(pool, process, begun=begun > 0 or any(other.read()[3] for other in living))

    def _count_start(self, pool: Any, process: Any, *, begun: bool) -> None:
        if told := getattr(pool, "_failure", None):
            told = told.value.decode(errors="replace")
        self._failed_starts = 0 if begun else self._failed_starts + 1
        if not told and self._failed_starts < _FAILED_STARTS:
            return
        self._failed_starts = 0
        text = f"{_FAILED_STARTS} workers ended before their first task: look at the initializer"
        why = f"has ended: its initializer raised {told}" if told else ""
        error = died_error(process, "it takes no calls: make a new one" if told else text, pool._owner, why)
        if hasattr(pool, "fail"):
            pool._quick_get.add(lambda: pool.fail(error))
        else:
            fail_all(pool, error)

    def _renew(self, pool: Any, process: Any, text: str) -> None:
        others = [other for other in pool._pool if other is not process]
        for other in others:
            other.kill()
        for other in others:
            other._popen.wait(5.0)
        self.slots.clear()
        pool._quick_put.drop_jobs(list(pool._cache))
        pool._renew_streams()
        for lock in (pool._inqueue._rlock, pool._outqueue._wlock):
            if is_held(lock):
                lock.release()
        fail_all(pool, died_error(process, text, pool._owner))


_DOING = {Step.READING: "it read a task", Step.WRITING: "it wrote a result"}


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
    pool._quick_get.add(lambda: fail_jobs(jobs, error))


def fail_jobs(jobs: list[Any], error: BaseException) -> None:
    """Let these jobs fail, in the thread that reads results or after its end."""
    for result in jobs:
        if result._job not in result._cache:
            continue
        error = copy.copy(error)  # one would collect the frames of all waits
        if hasattr(result, "_number_left"):
            result._number_left = 1
            result._set(0, (False, error))
        elif hasattr(result, "_unsorted"):
            _end_iterator(result, error)
        else:
            result._set(0, (False, error))


class _EndedIterator(library.IMapIterator):  # type: ignore[type-arg]
    """An iteration that has failed: its length is what it has, whatever the task thread finds out later."""

    @property
    def _length(self) -> int:
        return self._index  # type: ignore[attr-defined,no-any-return]

    @_length.setter
    def _length(self, length: int | None) -> None:
        pass


def _end_iterator(result: Any, error: BaseException) -> None:
    with result._cond:
        result._unsorted.clear()
        result._items.append((False, error))
        result._index += 1
        result.__class__ = _EndedIterator
        del result._cache[result._job]
        result._pool = None
        result._cond.notify()
