"""Node: what runs on each host of a session, and performs there what the kernel asks for."""

from __future__ import annotations

import contextvars
import pickle
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nbparallel import errors, sharing
from nbparallel.cluster import host_messages as messages
from nbparallel.cluster.host_mail import HostMail
from nbparallel.cluster.host_messages import HostReport, HostTask
from nbparallel.cluster.host_place import HostPlace
from nbparallel.distributed.runtime.failures import first_failure
from nbparallel.distributed.runtime.shared_arrays import decode_handle
from nbparallel.errors import label_of_rank, rank_list
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.elastic_pool import ElasticPool
from nbparallel.session.processes.launch import SupervisorLaunch, check_world_size
from nbparallel.session.processes.rank_handle import RankDeath, RankHandle
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.results import CellRecord
from nbparallel.session.session import Session, load_views
from nbparallel.session.tasks.outcomes import death_failure, record_of
from nbparallel.session.tasks.task_run import TaskRequest, TaskRun
from nbparallel.sharing.memory.array_layout import rebuild_dtype
from nbparallel.sharing.strategies import registry
from nbparallel.transfer import pickling
from nbparallel.transfer.pickle_format import BY_VALUE
from nbparallel.wire.messages import Display, Outcome, RankMemory, Task, runs_user_code
from nbparallel.wire.name_updates import ArrayHandle, NameKind

if TYPE_CHECKING:
    from nbparallel.session.diagnostics.doctor import Finding

# Output of a host's ranks on its way to the notebook: folded, so that events are few.

FOLD_SECONDS = 0.01
"""How long text waits for more of it after an event; the first after a pause does not wait."""


class NodeOutput(TaskOutput):
    """The output of one task, which is sent as events of ``(method, *arguments)`` of the kernel's.

    Its thread ends with `close`; what comes later is sent immediately.
    """

    def __init__(self, port: Any, number: int) -> None:
        super().__init__(number, None)
        self._port = port
        self._items: list[tuple[Any, ...]] = []
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._send_folded, name="nbparallel-output", daemon=True).start()

    # docstrings inherited

    def stream(self, rank: int, name: str, text: str) -> None:
        with self._changed:
            if self._items and self._items[-1][:-1] == ("stream", rank, name):
                text = self._items.pop()[-1] + text
            self._add("stream", rank, name, text)

    def display(self, rank: int, message: Display) -> None:
        self._add("display", rank, message)

    def note(self, text: str) -> None:
        self._add("note", text)

    def _add(self, *item: Any) -> None:
        with self._changed:
            self._items.append(item)
            if self._closed:
                self._flush()
            else:
                self._changed.notify()

    def _flush(self) -> None:
        """Send what there is, in order; the lock is held."""
        if self._items:
            items, self._items = self._items, []
            messages.send_message(self._port.emit, "output", self.number, items)

    def _send_folded(self) -> None:
        with self._changed:
            while not self._closed:
                self._changed.wait_for(lambda: self._items or self._closed)
                self._flush()
                self._changed.wait_for(lambda: self._closed, FOLD_SECONDS)

    def close(self) -> None:
        """Send what there is (idempotent)."""
        with self._changed:
            self._closed = True
            self._flush()
            self._changed.notify()


# Arrays of the notebook on one host: shared memory that lives as long as its ranks use it.


class NodeArrays:
    """Arrays by the kernel's numbers: held here from the question for them to the end of the task.

    Before and after that only ranks hold them, and what none holds is gone.
    """

    def __init__(self) -> None:
        self._held: dict[int, npt.NDArray[Any]] = {}
        self._handles: dict[int, ArrayHandle] = {}  # of all that ranks may have

    def lack(self, wanted: Sequence[ArrayHandle], broker: Any) -> list[int]:
        """Hold arrays, and return the numbers of those that have to be sent: there is memory for them."""
        store, lacking = sharing.current_store(), []
        self._held.clear()
        for form in wanted:
            try:
                self._held[form.segment] = store.attach(self._handles[form.segment], broker=broker)
            except (KeyError, errors.SegmentLostError):
                self._handles.pop(form.segment, None)
                memory = store.empty(form.segment_nbytes, np.uint8, strategy=registry.find_strategy().name)
                dtype = rebuild_dtype(form.dtype)
                self._held[form.segment] = np.ndarray(form.shape, dtype, memory, 0, form.strides)
                lacking.append(form.segment)
        return lacking

    def fill(self, number: int, start: int, piece: memoryview) -> None:
        """Take a piece of an array that was lacking."""
        content = self._held[number].ravel(order="A").view(np.uint8)
        content[start : start + len(piece)] = np.frombuffer(piece, np.uint8)

    def localise(self, task: Task, broker: Any) -> Task:
        """Return a task whose names of arrays refer to the memory here."""
        store, updates = sharing.current_store(), []
        for update in task.updates:
            if update.kind is NameKind.ARRAY:
                number = update.handle.segment
                handle = store.handle(self._held[number], broker=broker)
                if handle is not None:
                    self._handles[number] = handle
                update = replace(update, handle=handle)
            updates.append(update)
        return replace(task, updates=tuple(updates))

    def release(self) -> None:
        """Leave the arrays to the ranks."""
        self._held.clear()


class Node(Session):
    """A host's ranks, for the kernel: a session whose ranks have the numbers that they have among all hosts.

    A call of the kernel is a method here, also one of those that a user calls; its data and reply are
    pickled.  Events go through the port.
    """

    _ranks: ElasticPool

    def __init__(self, port: Any, launch: SupervisorLaunch) -> None:
        super().__init__(1, launch=launch)  # until it gets its place
        self.port = port
        self._failing = threading.Lock()
        self._told: tuple[int, messages.FailureNotice | None, bool] = 0, None, False
        self._arrays = NodeArrays()
        self._run: TaskRun | None = None
        self._epoch = 0
        self._mail: HostMail | None = None  # of the last task in which messages crossed hosts
        self._revived: set[int] = set()
        self._clock: messages.HostClock | None = None
        """Of the task of which ranks' notes are kept; None: no messages crossed hosts in it."""
        self._report = b""

    @property
    def place(self) -> HostPlace:
        """Which ranks are where."""
        return self._ranks.place  # type: ignore[return-value]  # which `_on_start` has set

    def handle(self, op: str, data: bytes) -> bytes:
        """Handle a call of the kernel."""
        label_of_rank.set(self.place.label_of)  # each call has a thread, and its context
        if op == "fill":  # the piece stands behind what was pickled
            number, start, size = pickle.loads(data)
            self._arrays.fill(number, start, memoryview(data)[-size:])
            return pickle.dumps(None)
        call = getattr(self, f"_on_{op}", None) or getattr(self, op)
        return pickle.dumps(call(*pickle.loads(data)), 5)

    # calls --------------------------------------------------------------------------------------------

    _on_hello = staticmethod(messages.versions)

    def _on_start(self, place: HostPlace, start_method: str) -> None:
        """Start the ranks; what only few tasks need is imported after that."""
        label_of_rank.set(place.label_of)
        check_world_size(len(place.ranks))  # this session was made with one
        self._ranks.place, self._ranks.start_method = place, start_method
        self.take_revived()
        threading.Thread(target=_load, name="nbparallel-imports", daemon=True).start()

    def _on_task(self, task: HostTask) -> None:
        """Begin a task; what it prints and how it ends are events."""
        begun = threading.Event()
        run, job = contextvars.copy_context().run, (self._perform_task, task, begun)
        threading.Thread(target=run, args=job, name="nbparallel-task", daemon=True).start()
        begun.wait()

    def _on_take(self) -> bytes:
        """Return the last report, which was too large for an event."""
        return self._report

    def _on_look(self) -> None:
        """Show that this node and its connection work, by an event as output is."""
        messages.send_message(self.port.emit, "here")

    def take_revived(self) -> list[int]:
        """Start what does not run; return which ranks had died since the last time, with their variables."""
        with self._session_lock.hold() as interrupts:
            self._ensure(interrupts)
        revived, self._revived = self._revived, set()
        return sorted(revived)

    def _ensure(self, interrupts: InterruptCounter) -> RankPool:
        if (pool := self._ranks.pool) is not None:
            self._revived.update(pool.ranks if pool.ended() else [handle.rank for handle in pool.dead()])
        super()._ensure(interrupts)
        pool = self._ranks.running
        pool.listener = self._on_event
        return pool

    def _on_event(self, _: RankHandle | None, message: Any) -> None:
        """Pass on that a rank has died or failed; in the event loop's thread."""
        if isinstance(message, RankDeath) and not self.closed:
            messages.send_message(self.port.emit, "died")
        elif isinstance(message, Outcome) and not message.ok:
            label_of_rank.set(self.place.label_of)  # of this thread's messages
            notice = self.first_failure(message.number) or messages.FailureNotice.of(message)
            messages.send_message(self.port.emit, "failed", message.number, notice)

    def rename_hosts(self, hosts: tuple[str, ...]) -> None:
        """Have the messages of this host's ranks, from the next task on, name the hosts as they are now."""
        with self._session_lock.hold():
            self._ranks.place = replace(self.place, hosts=hosts)
            if (pool := self._ranks.pool) is not None:
                pool.place = self.place
                pool.invalidate_epoch()  # ranks learn it as they join the next one

    def findings(self) -> tuple[Finding, ...]:
        """Return what is wrong with this machine, with the name of the host."""
        from nbparallel.session.diagnostics.doctor import Finding, Severity, examine

        wrong = [found for found in examine(self._ranks.start_method) if found.state is not Severity.OK]
        wrong = wrong or [Finding("all that was looked at", Severity.OK, "nothing is wrong")]
        return tuple(replace(found, host=self.place.name) for found in wrong)

    def lack(self, wanted: Sequence[ArrayHandle]) -> list[int]:
        """Return the numbers of those of the notebook's arrays that have to be sent for the next task."""
        with self._session_lock.hold() as interrupts:
            return self._arrays.lack(wanted, self._ensure(interrupts).broker)

    def _perform_task(self, task: HostTask, begun: threading.Event) -> None:
        output = NodeOutput(self.port, task.number)
        try:
            report = self._report_of(task, output, begun)
        except BaseException as error:  # noqa: BLE001  whatever it is, the kernel waits for it
            internal = errors.InternalError(f"host {self.place.name}: {type(error).__name__}: {error}")
            report = HostReport(messages.lost_outcomes(task.number, task.tasks, internal))
        output.close()
        begun.set()
        self._report = pickle.dumps(report, 5)
        inline = self._report if len(self._report) <= messages.INLINE else b""
        messages.send_message(self.port.emit, "ended", task.number, inline)

    def _report_of(self, task: HostTask, output: TaskOutput, begun: threading.Event) -> HostReport:
        """Perform one task of the kernel's; sets `begun` when interrupts reach it."""
        self.keep_messages = task.keep_messages
        with self._session_lock.hold() as interrupts, self._tasks.stopping(interrupts), ExitStack() as stack:
            begun.set()
            pool = self._ensure(interrupts)
            if task.epoch != self._epoch:
                pool.invalidate_epoch()
                self._epoch = task.epoch
            if late := sorted(self._revived.intersection(task.tasks)):  # the kernel took them for alive
                why = f"{rank_list(late)} died before the cell began, and no rank of the host has begun it"
                error = errors.RankDiedError(f"{why}: run it again", rank=late[0])
                return HostReport(messages.lost_outcomes(task.number, task.tasks, error))
            notes, broker = self._ranks.take_notes(), pool.broker
            tasks = {rank: self._arrays.localise(part, broker) for rank, part in task.tasks.items()}
            mail = None
            if task.hosts:
                mail = self._mail = stack.enter_context(closing(self._open_mail(task, pool)))
            fds = () if mail is None else (mail.pokes.fileno(),)
            options = replace(task.options, sink=output)
            request = TaskRequest(task.number, tuple(tasks), tasks.__getitem__, options, notes=notes, fds=fds)
            run = self._tasks.launch(pool, request, interrupts)
            if mail is not None:
                ending = lambda: run.escalation.ending or interrupts.count > interrupts.answered  # noqa: E731
                run.closing = partial(mail.finish, ending)
            try:
                with self._failing:
                    self._run = run
                    number, notice, ends = self._told
                if number == task.number and notice is not None:  # before the ranks of this host had begun
                    self.peer_failed(number, notice, ends=ends)
                self._tasks.await_ranks(run, interrupts)
                if mail is not None:
                    mail.close()  # the memory that it had attached is returned with the report
                    if mail.error and all(outcome.ok for outcome in run.outcomes.values()):
                        raise errors.NbParallelError(mail.error)  # ranks of other hosts wait for these
                return _make_report(run, pool)
            finally:
                with self._failing:
                    self._run = None
                self._arrays.release()
                if runs_user_code(run.task):  # for views of this session
                    times, self._clock = self._tasks.clock, None if mail is None else mail.clock
                    self._tasks.record = record_of(run, times.began_ns)
                    self._tasks.clock = replace(times, ended_ns=run.ended_ns, phase="finished")

    def _open_mail(self, task: HostTask, pool: RankPool) -> HostMail:
        store, broker, number = sharing.current_store(), pool.broker, task.number

        def attach(handle: bytes) -> npt.NDArray[Any]:
            place = decode_handle(handle)
            return store.attach(place, writable=place.writable, broker=broker).reshape(-1).view(np.uint8)

        door = partial(self.port.open_door, number, task.hosts)
        failure, failed = partial(self.first_failure, number), partial(self.peer_failed, number, ends=False)
        return HostMail(self.place, pool.ensure_epoch(), self._mail, door, failure, attach, failed)

    def notes(self, task: int) -> tuple[CellRecord, messages.HostClock | None] | None:
        """Return what ranks have noted of a task, and by which clock; None if it was not the last one."""
        record = self._tasks.record
        return None if record is None or record.task != task else (record, self._clock)

    def peer_failed(self, number: int, notice: messages.FailureNotice, *, ends: bool = True) -> None:
        """Act on the failure of a rank of another host: those that run this task end it soon, if it `ends`.

        It is recorded where ranks look whose operations need that rank; the next task has another segment.
        """
        with self._failing:
            ends = ends or (self._told[0] == number and self._told[2])
            self._told, run = (number, notice, ends), self._run
            if run is not None and run.request.number == number:
                run.pool.invalidate_epoch()
                run.control.write_failure(notice.rank, notice.kind, number, notice.rank, notice.text)
                if ends:
                    run.escalation.record_failure()
                run.rank_pool.wake()

    def first_failure(self, number: int) -> messages.FailureNotice | None:
        """Return what went wrong first in a task; None if that is not known, or it has ended."""
        with self._failing:
            run, ranks = self._run, self.place.ranks
            if run is None or run.request.number != number:
                return None
            if (error := first_failure(run.control, ranks)) is None:
                return None
            kind = messages.SAME_ERRORS[type(error).__name__]
            return messages.FailureNotice(kind, getattr(error, "rank", ranks[0]), str(error))


def _load() -> None:
    """Import what is needed later: an installation may have removed the files then."""
    load_views()
    from nbparallel.session.diagnostics import doctor  # noqa: F401


def _make_report(run: TaskRun, pool: RankPool) -> HostReport:
    outcomes = [_portable(outcome, pool) for outcome in run.outcomes.values()]
    for rank, end in run.deaths.items():
        failure = death_failure(run.handles[rank], end, run.control)
        outcomes.append(messages.failed_outcome(run.request.number, failure))
    sharing.current_store().drain()
    steps, notes = run.escalation, tuple(run.request.notes)
    freed = frozenset(steps.interrupted_for_peer)
    return HostReport(tuple(outcomes), steps.interrupted, steps.timed_out, freed, notes)


def _portable(outcome: Outcome, pool: RankPool) -> Outcome:
    """Return an outcome that refers to nothing of this machine."""
    value, problem = outcome.value, outcome.value_error
    if value is not None:
        try:
            loaded = pickling.loads(value, pool.store, broker=pool.broker)
            value = pickling.dumps(loaded, BY_VALUE).data
        except Exception as error:  # noqa: BLE001  rebuilding and pickling run code of the user's classes
            value, problem = None, f"it cannot leave its host: {type(error).__name__}: {error}"
    return replace(
        outcome, value=value, value_error=problem, memory=RankMemory(), timeline=None, messages=None
    )
