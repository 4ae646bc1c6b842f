"""The pool's ends of its two pipes, which can be replaced while threads wait at them.

A worker that dies in the middle of a message leaves a pipe that no process can read on.  The descriptors then
get new pipes; a thread that waits here is woken, forgets what it had of the old one and goes on.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from nbparallel.multiprocessing.messages.call_copies import CallCopies
from nbparallel.multiprocessing.messages.parcels import pickle_message, withdraw_parcel
from nbparallel.multiprocessing.starting.process_state import present_strategy
from nbparallel.multiprocessing.workers.worker_slots import HEADER, RESULT

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
            from nbparallel.multiprocessing.messages.task_errors import name_part

            found = name_part(error, *task[2:])
            raise found from found.__cause__
        job, index = task[:2] if task is not None and task[1] is not None else (-1, -1)
        header = HEADER.pack(job, index, present_strategy() or "")
        nbytes = len(header) + data.nbytes
        long = nbytes >= 1 << 31
        length = _LENGTH.pack(-1) + _LONG_LENGTH.pack(nbytes) if long else _LENGTH.pack(nbytes)
        rest = memoryview(b"".join((length, header, data)))
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
