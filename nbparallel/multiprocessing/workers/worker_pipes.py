"""The pipes of a pool, one for each worker: which worker has which task, and what a death costs.

::

    task thread      WorkerPipes.__call__    pickles the next task, and sends it to a worker that has none
    worker           WorkerPipe.get, put     reports that it has begun, then a result for each task
    result thread    WorkerPipes.get         reads results, and does what other threads ask for (`act`)

A worker has one task at a time and the pool knows which, so its death costs that task and no other, whatever
it did when it died: what lies half-written in its pipe goes with it.  A task that it has not begun costs
nothing, up to 16 MiB: another worker gets it.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import pool as library
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from nbparallel.multiprocessing.messages.parcels import (
    ArgumentCache,
    pickle_message,
    try_pickle,
    why_unsendable,
    withdraw_parcel,
)
from nbparallel.multiprocessing.starting.process_state import follow_strategy, present_strategy
from nbparallel.multiprocessing.workers.task_interrupts import TaskInterrupts
from nbparallel.wire.system import is_ready

if TYPE_CHECKING:
    from nbparallel.session.monitoring.activity import SessionActivity

_READY = b""
"""What a worker sends when its initializer has ended."""
_END = b"\xff"
"""What it is sent when there are no more tasks; else the length of the strategy's name comes first."""
_SMALL, _MOST_KEPT, _MOST_PREPARED = 1 << 16, 1 << 24, 64
"""Bytes of a task that an empty pipe takes immediately, and that is kept; how many are pickled ahead."""


# How far the calls of a pool are, for the live panel: what its process knows of the workers, and no more.

BEGUN: list[weakref.ref[ItemProgress]] = []
"""At most one: what a pool of this process has begun last."""


def newest() -> ItemProgress | None:
    """Return what a pool of this process has begun last, if the pool is still there."""
    return next((found for begun in BEGUN if (found := begun()) is not None and found.sent), None)


class ItemProgress:
    """Items of a pool, from its first call under way to its last; each has the number at which it was sent.

    Parameters
    ----------
    cache : dict
        The pool's jobs, with its `pipes`.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = weakref.ref(cache)
        self.began_ns, self.ended_ns = time.monotonic_ns(), 0
        self.sent = self.expected = 0
        """Items: how many workers have got, or will get next; how many calls have announced."""
        self.done: defaultdict[int, int] = defaultdict(int)
        self.busy_ns: defaultdict[int, int] = defaultdict(int)
        """By the worker's place, whichever process was there."""
        BEGUN[:] = [weakref.ref(self)]

    @property
    def total(self) -> int | None:
        """How many items these are; None: unknown."""
        cache = None if self.ended_ns else self._cache()
        more = 0 if cache is None else cache.remaining()
        return None if more is None else max(self.sent, self.expected + more)

    def activity(self, ranks: SessionActivity | None) -> SessionActivity:
        """Return how far workers are, as if they were ranks of a map; of `ranks` it has what memory holds."""
        from nbparallel.session.monitoring.activity import RankActivity, SessionActivity, read_memory
        from nbparallel.session.monitoring.segments import memory_extent
        from nbparallel.sharing import get_sharing_strategy  # with numpy

        cache, running, until = self._cache(), not self.ended_ns, self.ended_ns or time.monotonic_ns()
        seconds, total = (until - self.began_ns) / 1e9, self.total
        found = dict.fromkeys(list(self.done), (0, -1, until))
        found |= {} if cache is None else cache.pipes.at_work()
        workers = []
        for place, (pid, item, since_ns) in sorted(found.items()):
            computing = running and item >= 0
            memory = read_memory(pid) if pid else {}
            workers.append(
                RankActivity(
                    rank=place,
                    pid=pid,
                    state="computing" if computing else "idle",
                    operation="",
                    line=0,
                    waits_for=(),
                    seconds=seconds,
                    computing=(self.busy_ns[place] + (until - since_ns) * computing) / 1e9,
                    waiting=0.0,
                    operations=0,
                    finished=0.0 if running else seconds,
                    private_nbytes=memory.get("private_nbytes", 0),
                    items=self.done[place],
                    item=item if computing else -1,
                )
            )
        if ranks is None:
            free, whole = memory_extent()
            ranks = SessionActivity(False, 0, 0.0, (), get_sharing_strategy(), 0, 0, 0)
            ranks = replace(ranks, limit_nbytes=free, memory_nbytes=whole)
        return replace(
            ranks,
            running=running,
            number=0,
            seconds=seconds,
            ranks=tuple(workers),
            phase="running" if running else "finished",
            culprits=(),
            waited=(),
            moved=(),
            began_ns=self.began_ns,
            items=-1 if total is None else total,
            member="worker",
        )


# The two ends of a pipe.


def _raise(error: Exception) -> NoReturn:
    raise error


class WorkerPipe:
    """A worker's end of its pipe: what the library's worker takes for its two queues.

    A result that cannot be sent is what `why_unsendable` says, or a ``MaybeEncodingError`` as in the library.
    """

    def __init__(
        self, end: Any, begun: Any, interrupts: TaskInterrupts, siblings: Sequence[Any], *, says_why: bool
    ) -> None:
        self._end, self._interrupts, self._says_why = end, interrupts, says_why
        self._begun = begun
        """How many tasks this worker has read, in memory that the pool sees."""
        self._siblings = siblings
        """The pool's ends that a forked worker has: with them open, others would outlive the pool."""
        self._strategy = present_strategy() or ""
        """That of the pool's process at the last task, at first when it started this worker."""
        self._is_ready = False

    def get(self) -> Any:
        """Return the next task, None at the end."""
        if not self._is_ready:
            self._is_ready = True
            for end in self._siblings:
                end.close()
            self._end.send_bytes(_READY)
        message = self._end.recv_bytes()
        if message == _END:
            return None
        self._begun.value += 1
        start = message[0] + 1
        try:
            if (strategy := message[1:start].decode()) != self._strategy:
                follow_strategy(strategy)
                self._strategy = strategy
            task = ForkingPickler.loads(memoryview(message)[start:])
        except Exception as error:  # noqa: BLE001  it costs the task, not the worker
            return -1, -1, _raise, (error,), {}
        if task[2] is library._helper_reraises_exception:  # type: ignore[attr-defined]
            return task
        return *task[:2], self._interrupts.guard(task[0], task[2]), *task[3:]

    def put(self, result: Any) -> None:
        """Send a result."""
        try:
            data, parcel = pickle_message(result, self._end.outbox)
        except Exception as error:  # noqa: BLE001  whatever the object's own code raises
            found = why_unsendable(result[2][1], "the result of a task") or error
            if not self._says_why:
                raise found from None
            carried = library.ExceptionWithTraceback(found, found.__traceback__)  # type: ignore[attr-defined]
            data, parcel = pickle_message((*result[:2], (False, carried)), self._end.outbox)
        try:
            self._end.send_bytes(data)
        except OSError:
            withdraw_parcel(parcel)
            raise SystemExit(0) from None  # the pool has ended


class _Message(NamedTuple):
    """A task on its way."""

    task: tuple[int, int]
    """Job and index."""
    data: memoryview
    parcel: int
    first: int
    """The number of its first item."""
    items: int


class _Worker:
    """A worker, as its pool knows it."""

    def __init__(self, process: Any, end: Any, begun: Any, place: int) -> None:
        self.process, self.end, self.begun, self.place = process, end, begun, place
        self.message: _Message | None = None
        """The task that it has."""
        self.given = 0
        """Tasks; `begun` counts those that it has read."""
        self.since_ns = 0
        """When it got its task."""
        self.is_ready = self.has_ended = False

    def give(self, message: _Message) -> None:
        """Note that it has a task from now on; one over 16 MiB is not kept for another worker."""
        kept = message.data if message.data.nbytes <= _MOST_KEPT else memoryview(b"")
        self.message = message._replace(data=kept)
        self.given += 1
        self.since_ns = time.monotonic_ns()


class WorkerPipes:
    """The pool's ends of all pipes: what the library's threads take for its queues.

    Parameters
    ----------
    max_tasks : int or None
        Of each worker.
    """

    progress: ItemProgress
    """Of the calls that are under way, or were last."""

    def __init__(self, max_tasks: int | None) -> None:
        self.copies: dict[int, ArgumentCache] = {}
        """By job, of arrays that several of its tasks, or of a call's jobs, hold."""
        self._max_tasks = max_tasks
        self._lost: set[int] = set()
        self._workers: dict[int, _Worker] = {}
        """By the descriptor of the pool's end."""
        self._idle: deque[_Worker] = deque()
        self._prepared: deque[_Message] = deque()
        """Small tasks for the next workers that have none; empty while there is an idle one."""
        self._changed = threading.Condition()
        """Held while a worker is given a task or an end, or is entered or left out."""
        self._ends = self._stopped = False
        """Whether workers without a task end; whether nothing is sent or read any more."""
        self._results: deque[tuple[int, int, tuple[bool, Any]]] = deque()
        self._actions: deque[Callable[[], None] | None] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.epoll()
        self._poll.register(self._wake, select.EPOLLIN)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._wake)  # a default: `os` may be gone when the interpreter ends

    # workers

    def free_place(self) -> int:
        """Return the first place at which no worker is."""
        with self._changed:
            taken = {worker.place for worker in self._workers.values() if not worker.has_ended}
        return next(place for place in itertools.count() if place not in taken)

    def ends(self) -> list[Any]:
        """Return the pool's ends of all pipes."""
        with self._changed:
            return [worker.end for worker in self._workers.values()]

    def add(self, process: Any, end: Any, begun: Any, place: int) -> None:
        """Enter a worker that is about to start."""
        with self._changed:
            self._workers[end.fileno()] = _Worker(process, end, begun, place)
            self._poll.register(end.fileno(), select.EPOLLIN)

    def at_work(self) -> dict[int, tuple[int, int, int]]:
        """Return each worker's process, by its place, its item (-1: none), and when it got that."""
        with self._changed:
            return {
                w.place: (w.process.pid or 0, -1 if w.message is None else w.message.first, w.since_ns)
                for w in self._workers.values()
                if not w.has_ended
            }

    def note_end(self, process: Any) -> None:
        """Give no more tasks to a worker that has ended, whose place is free."""
        with self._changed:
            for worker in self._workers.values():
                worker.has_ended |= worker.process is process
            self._idle = deque(worker for worker in self._idle if not worker.has_ended)

    def leave_out(self, process: Any) -> tuple[tuple[int, int] | None, bool]:
        """Return the task that the end of a worker costs, if any, and whether any worker has been ready.

        To be called in the result thread.
        """
        with self._changed:
            (worker,) = (each for each in self._workers.values() if each.process is process)
        while is_ready(worker.end.fileno()) and self._read(worker):
            pass
        with self._changed:
            was_ready = any(each.is_ready for each in self._workers.values())
            del self._workers[worker.end.fileno()]
            self._forget(worker)
            _cut(worker.end)  # the task thread may be writing to it
            if (message := worker.message) is None:
                return None, was_ready
            if (
                worker.begun.value < worker.given
                and message.data.nbytes
                and message.task[0] not in self._lost
            ):
                self._prepared.appendleft(message)
                if self._idle:
                    self._release(self._idle.popleft())
                return None, was_ready
        withdraw_parcel(message.parcel)
        return message.task, was_ready

    def _forget(self, worker: _Worker) -> None:
        try:
            self._poll.unregister(worker.end.fileno())
        except FileNotFoundError:
            return  # it has shut its end

    # tasks

    def drop_jobs(self, jobs: Iterable[int]) -> None:
        """Send no more tasks of these jobs: they have failed as a whole."""
        with self._changed:
            self._lost.update(jobs)
            for message in [each for each in self._prepared if each.task[0] in self._lost]:
                self._prepared.remove(message)
                withdraw_parcel(message.parcel)
            self._changed.notify_all()

    def __call__(self, task: Any) -> None:
        """Send a task when a worker has none; None: let workers end that have none."""
        if task is None:
            with self._changed:
                self._ends = True
                while self._idle:
                    _send(self._idle.popleft().end, None)
            return
        job, _, *call = task
        if job in self._lost:
            return
        try:
            data, parcel = pickle_message(task, 0, self.copies.get(job), task=True)
        except Exception as error:  # noqa: BLE001  whatever the object's own code raises
            found = name_part(error, *call)
            raise found from found.__cause__
        message = self._message(task, data, parcel)
        with self._changed:
            while not self._idle and not self._stopped and job not in self._lost:
                if data.nbytes <= _SMALL and len(self._prepared) < _MOST_PREPARED:
                    self._prepared.append(message)
                    return
                self._changed.wait()
            if self._stopped or job in self._lost:
                withdraw_parcel(parcel)
                return
            worker = self._idle.popleft()
            worker.give(message)
        _send(worker.end, data)  # of any size: so not under the lock, and not in the result thread

    def _message(self, task: Any, data: memoryview, parcel: int) -> _Message:
        self.progress.sent += (items := items_of(*task[2:4]))
        return _Message(task[:2], data, parcel, self.progress.sent - items, items)

    def send_now(self, task: Any) -> bool:
        """Send or prepare a small task that needs nothing of ours in the caller's thread, or return False."""
        data = try_pickle(task)
        if data is None or data.nbytes > _SMALL:
            return False
        message = self._message(task, data, 0)
        with self._changed:
            if self._stopped or len(self._prepared) == _MOST_PREPARED:
                return False
            if not self._idle:
                self._prepared.append(message)
                return True
            if threading.current_thread() is threading.main_thread():
                return False  # an interrupt could come when a worker is neither idle nor has its task
            worker = self._idle.popleft()
            worker.give(message)
            _send(worker.end, data)
        return True

    def _release(self, worker: _Worker) -> None:
        """Give a worker that has no task the next one, or its end."""
        with self._changed:
            worker.message = None
            if worker.has_ended or worker.given == self._max_tasks:  # then it ends by itself
                return
            if self._prepared:
                worker.give(message := self._prepared.popleft())
                _send(worker.end, message.data)
            elif self._ends:
                _send(worker.end, None)
            else:
                self._idle.append(worker)
            if len(self._prepared) <= _MOST_PREPARED // 2:  # each time would cost a switch of threads
                self._changed.notify()

    # results

    def get(self) -> Any:
        """Return the next result: job, index, and whether it succeeded with what; None at the end."""
        while not self._results:
            if self._stopped:
                return None
            if self._actions:
                action = self._actions.popleft()
                if action is None:
                    return None
                action()
                del action  # it holds an error, whose traceback holds the waiter's frames
                continue
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                elif (worker := self._workers.get(descriptor)) is not None and not self._read(worker):
                    self._forget(worker)  # it ends
        return self._results.popleft()

    def act(self, action: Callable[[], None] | None) -> None:
        """Let the result thread do something soon; None: return None from `get`."""
        self._actions.append(action)
        os.eventfd_write(self._wake, 1)

    def put(self, _none: None) -> None:
        """Let `get` return None: the library puts that behind the last task."""
        self.act(None)

    def add_result(self, task: tuple[int, int], outcome: tuple[bool, Any]) -> None:
        """Enter a result, in the result thread."""
        self._results.append((*task, outcome))

    def stop(self) -> None:
        """Send and read nothing from now on: the pool is terminated, or all its jobs have ended."""
        with self._changed:
            self._stopped = True
            for worker in self._workers.values():
                _cut(worker.end)
                if worker.message is not None:
                    withdraw_parcel(worker.message.parcel)
            while self._prepared:
                withdraw_parcel(self._prepared.popleft().parcel)
            self._changed.notify_all()
        self._actions.clear()
        self.act(None)

    def _read(self, worker: _Worker) -> bool:
        """Read a message that a worker has begun to write, and return whether it can write more."""
        try:
            message = worker.end.recv_bytes()
        except (EOFError, OSError):  # it has ended, perhaps in the middle of the message
            return False
        answered, worker.is_ready = worker.message, True
        if answered is not None and answered.task[0] not in self._lost:
            self.progress.done[worker.place] += answered.items
            self.progress.busy_ns[worker.place] += time.monotonic_ns() - worker.since_ns
        self._release(worker)
        if answered is not None:
            self.add_result(answered.task, _outcome(message))
        return True


def _outcome(message: bytes) -> tuple[bool, Any]:
    try:
        outcome: tuple[bool, Any] = ForkingPickler.loads(message)[2]
    except BaseException as error:  # noqa: BLE001 - it would end the result thread and so all jobs
        return False, error
    return outcome


def _cut(end: Any) -> None:
    """End what other threads and processes read from a pipe or write to it."""
    with socket.socket(fileno=os.dup(end.fileno())) as pipe:
        try:
            pipe.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end is shut


def _send(end: Any, data: memoryview | None) -> None:
    """Send a task, or the end; a worker that has died is left out soon."""
    if data is None:
        message = _END
    else:
        strategy = (present_strategy() or "").encode()
        message = b"".join((bytes([len(strategy)]), strategy, data))
    try:
        end.send_bytes(message)
    except (BrokenPipeError, ConnectionResetError):
        return


_ONE_ARGUMENT: Any = library.mapstar  # type: ignore[attr-defined]
_ALL_ARGUMENTS: Any = library.starmapstar  # type: ignore[attr-defined]


def items_of(function: Any, args: tuple[Any, ...]) -> int:
    """Return how often a task calls the user's function."""
    if function is _ONE_ARGUMENT or function is _ALL_ARGUMENTS:
        return len(args[0][1])
    return len(function) if type(function).__module__ == "joblib.parallel" else 1  # a batch


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
    yield "the function", function
    for call in calls:
        for index, argument in enumerate(call):
            yield f"args[{index}]", argument
    for name, argument in kwargs.items():
        yield f"kwargs[{name!r}]", argument
