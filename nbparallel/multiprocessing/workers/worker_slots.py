"""What each worker of a pool does now, in shared memory: all that is left of one that is killed.

A worker writes down what it is about to do *before* it does it, so a death shows

============ ===================================================================================
``AWAY``     starting, between tasks, or at its end: nothing is lost
``WANTS``    waits for the lock of the task pipe, and may have it: nothing is lost
``WAITING``  has that lock, and nothing was read: nothing is lost
``READING``  part of a task may be read: the pipe is torn
``RUNNING``  that task is lost
``SENDING``  its result is pickled; waits for the lock of the result pipe, and may have it: the task is lost
``PUTTING``  the same, and its result is small: it is written as a whole or not at all
``WRITING``  part of a result may be written: the pipe is torn
============ ===================================================================================
"""

from __future__ import annotations

import itertools
import struct
from enum import IntEnum
from multiprocessing import pool as library
from multiprocessing import sharedctypes
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from nbparallel.multiprocessing.messages.parcels import pickle_message, why_unsendable, withdraw_parcel
from nbparallel.multiprocessing.starting.process_state import follow_strategy, present_strategy
from nbparallel.multiprocessing.workers.task_interrupts import TaskInterrupts


class TaskHeader:
    """Before each task: job and index, -1 for what is none, and the sharing strategy, empty for none."""

    _form = struct.Struct("<qqB")

    def pack(self, job: int, index: int, strategy: str) -> bytes:
        """Return the header."""
        name = strategy.encode()[:255]
        return self._form.pack(job, index, len(name)) + name

    def unpack(self, message: bytes) -> tuple[int, int, str, int]:
        """Return job, index, strategy and the size of the header."""
        job, index, length = self._form.unpack_from(message)
        size = self._form.size + length
        return job, index, message[self._form.size : size].decode(), size


HEADER = TaskHeader()


class ResultHeader:
    """Before each result: which worker wrote it, after how many tasks that it began, and of which task."""

    tag = 0x4E
    """First byte; a pickle begins with another."""
    _form = struct.Struct("<B7xqqqq")
    size = _form.size

    def pack(self, worker: int, task: int, job: int, index: int) -> bytes:
        """Return the header."""
        return self._form.pack(self.tag, worker, task, job, index)

    def unpack(self, message: bytes | bytearray) -> tuple[int, int, int, int]:
        """Return worker, task, job and index."""
        _, worker, task, job, index = self._form.unpack_from(message)
        return worker, task, job, index


RESULT = ResultHeader()
_WHOLE = 4096 - 4
"""Bytes that a pipe takes as a whole (``PIPE_BUF``), less the length before them."""


class Step(IntEnum):
    """What a worker does."""

    AWAY = 0
    WANTS = 1
    WAITING = 2
    READING = 3
    RUNNING = 4
    SENDING = 5
    PUTTING = 6
    WRITING = 7


_FIELDS = 4
"""Words of a slot: step, job, index, tasks begun."""


class WorkerSlot:
    """One worker's words; the pool reads them, the worker writes them."""

    def __init__(self, number: int, words: Any) -> None:
        self.number, self._words = number, words

    def reset(self) -> None:
        """Prepare for another worker."""
        self._words[:] = [Step.AWAY, -1, -1, 0]

    def note(self, step: Step) -> None:
        """Note the next step."""
        self._words[0] = step

    def note_task(self, job: int, index: int) -> None:
        """Note the task that runs from now on."""
        self._words[1], self._words[2] = job, index
        self._words[3] += 1
        self._words[0] = Step.RUNNING if job >= 0 else Step.AWAY

    def read(self) -> tuple[Step, int, int, int]:
        """Return step, job, index and how many tasks it began."""
        step, job, index, begun = self._words
        return Step(step), job, index, begun


_numbers = itertools.count()


def make_slot() -> WorkerSlot:
    """Return a slot in memory that a child shares."""
    slot = WorkerSlot(next(_numbers), sharedctypes.RawArray("q", _FIELDS))
    slot.reset()
    return slot


def _raise(error: Exception) -> NoReturn:
    raise error


class TaskReader:
    """The worker's end of the task pipe: what the library's worker takes for a queue."""

    def __init__(self, queue: Any, slot: WorkerSlot, interrupts: TaskInterrupts) -> None:
        self._queue, self._slot, self._interrupts = queue, slot, interrupts
        self._strategy = present_strategy() or ""
        """That of the pool's process at the last task, at first when it started this worker."""

    @property
    def _writer(self) -> Any:  # the library's worker closes it
        return self._queue._writer

    def get(self) -> Any:
        """Return the next task, None at the end."""
        reader, slot = self._queue._reader, self._slot
        slot.note(Step.WANTS)
        with self._queue._rlock:
            slot.note(Step.WAITING)
            reader.poll(None)
            slot.note(Step.READING)
            message = reader.recv_bytes()
            job, index, strategy, size = HEADER.unpack(message)
            slot.note_task(job, index)
        try:
            if strategy != self._strategy:
                follow_strategy(strategy)
                self._strategy = strategy
            task = ForkingPickler.loads(memoryview(message)[size:])
            if job < 0 or task[2] is library._helper_reraises_exception:  # type: ignore[attr-defined]
                return task
            return job, index, self._interrupts.guard(job, task[2]), *task[3:]
        except Exception as error:
            if job < 0:
                raise
            return job, index, _raise, (error,), {}  # it costs the task, not the worker


class ResultWriter:
    """The worker's end of the result pipe."""

    def __init__(self, queue: Any, slot: WorkerSlot) -> None:
        self._queue, self._slot = queue, slot

    @property
    def _reader(self) -> Any:  # the library's worker closes it
        return self._queue._reader

    def put(self, result: Any) -> None:
        """Send a result."""
        slot = self._slot
        try:
            data, parcel = pickle_message(result, self._queue._writer.outbox)
        except Exception as error:  # noqa: BLE001  whatever the object's own code raises
            raise why_unsendable(result[2][1], "the result of a task") or error from None
        message = b"".join((RESULT.pack(slot.number, slot.read()[3], *result[:2]), data))
        slot.note(Step.SENDING)
        try:
            with self._queue._wlock:
                slot.note(Step.PUTTING if len(message) <= _WHOLE else Step.WRITING)
                self._queue._writer.send_bytes(message)
        except BaseException:
            withdraw_parcel(parcel)
            raise
        slot.note(Step.AWAY)
