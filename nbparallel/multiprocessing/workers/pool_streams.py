"""The two pipes of a pool, at both ends: tasks to the workers, results back, and what each worker does now.

A worker notes in shared memory what it is about to do *before* it does it: that is all that is left of one
that is killed (`Step`).  One that dies in the middle of a message leaves a pipe that no process can read on.
The descriptors in the pool's process then get new pipes; a thread that waits there is woken, forgets what it
had of the old one and goes on.
"""

from __future__ import annotations

import itertools
import os
import select
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import process
from enum import IntEnum
from functools import partial
from multiprocessing import pool, sharedctypes
from multiprocessing import pool as library
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from nbparallel.multiprocessing.messages.call_copies import CallCopies
from nbparallel.multiprocessing.messages.light_pickling import try_pickle
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
    """What a worker does, and so what its death costs.

    ============ ===================================================================================
    ``AWAY``     starting, between tasks, or at its end: nothing is lost
    ``WANTS``    waits for the lock of the task pipe, and may have it: nothing is lost
    ``WAITING``  has that lock, and nothing was read: nothing is lost
    ``READING``  part of a task may be read: the pipe is torn
    ``RUNNING``  that task is lost
    ``SENDING``  its result is pickled; waits for the lock of the result pipe, or has it: that task is lost
    ``PUTTING``  the same, and its result is small: it is written as a whole or not at all
    ``WRITING``  part of a result may be written: the pipe is torn
    ============ ===================================================================================
    """

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

    def __init__(self, number: int, place: int, words: Any) -> None:
        self.number, self.place, self._words = number, place, words

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


def make_slot(place: int) -> WorkerSlot:
    """Return a slot in memory that a child shares."""
    slot = WorkerSlot(next(_numbers), place, sharedctypes.RawArray("q", _FIELDS))
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
    """The worker's end of the result pipe.

    A result that cannot be sent is what `why_unsendable` says, or a ``MaybeEncodingError`` as in the library.
    """

    def __init__(self, queue: Any, slot: WorkerSlot, *, says_why: bool) -> None:
        self._queue, self._slot, self._says_why = queue, slot, says_why

    @property
    def _reader(self) -> Any:  # the library's worker closes it
        return self._queue._reader

    def put(self, result: Any) -> None:
        """Send a result."""
        slot = self._slot
        try:
            data, parcel = pickle_message(result, self._queue._writer.outbox)
        except Exception as error:  # noqa: BLE001  whatever the object's own code raises
            found = why_unsendable(result[2][1], "the result of a task") or error
            if not self._says_why:
                raise found from None
            carried = library.ExceptionWithTraceback(found, found.__traceback__)  # type: ignore[attr-defined]
            result = *result[:2], (False, carried)
            data, parcel = pickle_message(result, self._queue._writer.outbox)
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


_ONE_ARGUMENT: Any = pool.mapstar  # type: ignore[attr-defined]
_ALL_ARGUMENTS: Any = pool.starmapstar  # type: ignore[attr-defined]
_CHUNK: Any = process._process_chunk


def name_part(error: Exception, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
    """Return the error about the part of a task that cannot be sent, or `error` if each of them can.

    Parameters
    ----------
    error : Exception
        What sending the task raised.
    function, args, kwargs
        What the library is to call: it may call the user's function with each element of a chunk.
    """
    for name, part in _parts(function, args, kwargs):
        found = why_unsendable(part, f"{name} of a task", task=True)
        if found is not None:
            return found
    return error


def _parts(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    calls = [args]
    if function is _ONE_ARGUMENT:
        function, chunk = args[0]
        calls = [(item,) for item in chunk]
    elif function is _ALL_ARGUMENTS:
        function, calls = args[0]
    elif isinstance(function, partial) and function.func is _CHUNK:
        function, calls = function.args[0], args[0]
    yield "the function", function
    for call in calls:
        for index, argument in enumerate(call):
            yield f"args[{index}]", argument
    for name, argument in kwargs.items():
        yield f"kwargs[{name!r}]", argument


_LENGTH = struct.Struct("!i")
"""Before each message, as `multiprocessing.connection` writes it; -1: `_LONG_LENGTH` follows."""
_LONG_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20
"""Bytes of one read or write at most."""


class _Renewed(Exception):  # noqa: N818 - it is no error
    """The pipe was replaced."""


class _Stream:
    """One end of a pipe, with what wakes the thread that waits there."""

    def __init__(self, end: Any) -> None:
        self.end = end
        self.lock = threading.Lock()
        """Held while the pipe is read or written, never waiting, or replaced."""
        self.renewed = False
        """Whether the pipe was replaced since the present message began."""
        self.stopped = False
        """Whether nothing is sent or received any more."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        os.set_blocking(end.fileno(), False)

    def stop(self) -> None:
        """Send or receive nothing from now on, not even the rest of a message."""
        self.stopped = True
        self.wake()

    def wake(self) -> None:
        """Wake the thread that waits here."""
        os.eventfd_write(self._wake, 1)

    def _wait(self, event: int) -> None:
        """Wait until the end is ready, or `wake` was called."""
        poll = select.poll()
        poll.register(self.end.fileno(), event)
        poll.register(self._wake, select.POLLIN)
        if any(fd == self._wake for fd, _ in poll.poll()):
            os.eventfd_read(self._wake)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._wake)  # a default: `os` may be gone when the interpreter ends


class TaskSender(_Stream):
    """Sends tasks to the workers: what the library's task thread calls."""

    def __init__(self, end: Any) -> None:
        super().__init__(end)
        self.copies: CallCopies | None = None
        """Of arrays that several tasks of the call hold whose tasks are sent now."""
        self._lost: set[int] = set()
        self._turn = threading.Lock()
        """Held from a message's first byte to its last."""

    def drop_jobs(self, jobs: Iterable[int]) -> None:
        """Send no more tasks of these jobs: they have failed as a whole."""
        self._lost.update(jobs)

    def __call__(self, task: Any) -> None:
        """Send a task; what a torn pipe swallows belongs to jobs that have failed."""
        if self.stopped or (task is not None and task[0] in self._lost):
            return
        try:
            data, parcel = pickle_message(task, self.end.outbox, self.copies, task=True)
        except Exception as error:  # noqa: BLE001  whatever the object's own code raises
            from nbparallel.multiprocessing.workers.pool_streams import name_part

            found = name_part(error, *task[2:])
            raise found from found.__cause__
        rest = memoryview(_whole(task, data))
        with self._turn:
            self.renewed = False
            try:
                while rest:
                    self._wait(select.POLLOUT)
                    with self.lock:
                        if self.renewed or self.stopped:
                            break
                        try:
                            rest = rest[os.write(self.end.fileno(), rest[:_CHUNK]) :]
                        except BlockingIOError:
                            continue
            except BaseException:
                withdraw_parcel(parcel)
                raise
        if rest:
            withdraw_parcel(parcel)

    def send_now(self, task: Any) -> bool:
        """Send a small task that needs nothing of ours in the caller's thread, or return False."""
        data = try_pickle(task)
        if data is None or len(message := _whole(task, data)) > select.PIPE_BUF:
            return False
        if not self._turn.acquire(blocking=False):
            return False
        try:
            with self.lock:
                return not self.stopped and os.write(self.end.fileno(), message) > 0
        except BlockingIOError:
            return False
        finally:
            self._turn.release()


def _whole(task: Any, data: memoryview) -> bytes:
    job, index = task[:2] if task is not None and task[1] is not None else (-1, -1)
    header = HEADER.pack(job, index, present_strategy() or "")
    nbytes = len(header) + data.nbytes
    long = nbytes >= 1 << 31
    length = _LENGTH.pack(-1) + _LONG_LENGTH.pack(nbytes) if long else _LENGTH.pack(nbytes)
    return b"".join((length, header, data))


class ResultReader(_Stream):
    """Receives results: what the library's result thread calls."""

    def __init__(self, end: Any) -> None:
        super().__init__(end)
        self._delivered: dict[int, int] = {}
        self._actions: deque[Callable[[], None] | None] = deque()

    def __call__(self) -> Any:
        """Return the next result; of one that cannot be rebuilt, the error, as what its task raised."""
        while not self.stopped:
            try:
                message = self._message()
            except _Renewed:
                continue
            if message is None:
                action = self._actions.popleft()
                if action is None:
                    return None
                action()
                del action  # it holds an error, whose traceback holds the waiter's frames
                continue
            worker, task, job, index = RESULT.unpack(message)
            self._delivered[worker] = task
            try:
                return ForkingPickler.loads(memoryview(message)[RESULT.size :])
            except BaseException as error:  # noqa: BLE001 - it would end the result thread and so all jobs
                return job, index, (False, error)
        return None

    def put_end(self, _none: None = None) -> None:
        """Let the result thread read None after all results that have been written.

        Through the pipe it would need the lock, which a worker that was killed may have.
        """
        self._add(None)

    def add(self, action: Callable[[], None]) -> None:
        """Let the result thread do something after all results that have been written."""
        self._add(action)

    def _add(self, action: Callable[[], None] | None) -> None:
        self._actions.append(action)
        os.eventfd_write(self._wake, 1)

    def has_delivered(self, worker: int, task: int) -> bool:
        """Return whether the result of a worker's `task`-th task has been read."""
        return self._delivered.get(worker) == task

    def _message(self) -> bytearray | None:
        """Return the next message, or None: there is none, but something to do."""
        length = self._read(_LENGTH.size, between=True)
        if length is None:
            return None
        (nbytes,) = _LENGTH.unpack(length)
        if nbytes < 0:
            (nbytes,) = _LONG_LENGTH.unpack(self._read(_LONG_LENGTH.size) or b"")
        return self._read(nbytes)

    def _read(self, nbytes: int, *, between: bool = False) -> bytearray | None:
        found = bytearray()
        while len(found) < nbytes:
            with self.lock:
                if self.renewed or self.stopped:
                    self.renewed = False
                    raise _Renewed
                try:
                    part = os.read(self.end.fileno(), min(nbytes - len(found), _CHUNK))
                except BlockingIOError:
                    part = None
            if part is None:
                if between and not found and self._actions:
                    return None
                self._wait(select.POLLIN)
                continue
            if not part:
                raise EOFError
            found += part
        return found


def renew_pipes(*pairs: tuple[Any, _Stream]) -> None:
    """Put new pipes behind the descriptors of queues' ends, and wake the threads at the streams over them."""
    for queue, stream in pairs:
        with stream.lock:
            for new, old in zip(os.pipe(), (queue._reader, queue._writer), strict=True):
                os.dup2(new, old.fileno(), inheritable=False)
                os.close(new)
            os.set_blocking(stream.end.fileno(), False)
            stream.renewed = True
        stream.wake()
