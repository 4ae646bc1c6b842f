"""Tasks: numbering them, sending them to ranks, and making a result or an error of what comes back."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from nbparallel import sharing
from nbparallel.errors import NbParallelError
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.monitoring import session_views
from nbparallel.session.monitoring.timeline import CellRecord
from nbparallel.session.names.delivery import NameDelivery
from nbparallel.session.output import OutputSink, TaskOutput
from nbparallel.session.processes.rank_handle import RankHandle, tell_place
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.results import CellResult
from nbparallel.session.tasks import outcomes
from nbparallel.session.tasks.task_run import TaskRun
from nbparallel.sharing.strategies import registry
from nbparallel.transfer import pickling
from nbparallel.wire.control import ControlView, TimingRecord
from nbparallel.wire.frames import Kind
from nbparallel.wire.messages import Task, runs_user_code

KEPT_OUTPUTS = 200
"""Tasks whose late output still finds its cell."""


@dataclass(frozen=True, slots=True)
class RunningTask:
    """A task that is on its ranks."""

    pool: RankPool
    run: TaskRun
    output: TaskOutput
    control: ControlView
    handles: Mapping[int, RankHandle]
    notes: list[str]
    began: float
    copied: Mapping[str, int]
    shared: Mapping[str, int]
    kept: object
    """What ranks have not taken yet must not go."""
    task: Task | None
    """What was sent to one of them."""


@dataclass(frozen=True, slots=True)
class CellClock:
    """When the last cell or call began and ended."""

    number: int = 0
    """The notebook's ``In[n]``; 0 if it was no cell."""
    began_ns: int = 0
    """By `time.monotonic_ns`."""
    ended_ns: int = 0
    """Likewise; 0 while it runs."""
    former: Mapping[int, TimingRecord] = field(default_factory=dict)
    """What the timing counters of its ranks said when it began."""

    @property
    def running(self) -> bool:
        """Whether it has begun and not ended."""
        return self.began_ns > self.ended_ns


class TaskDispatcher:
    """The tasks of one session, one at a time."""

    def __init__(self, names: NameDelivery) -> None:
        self._names = names
        self._outputs: dict[int, TaskOutput] = {}
        self._number = 0
        self.record: CellRecord | None = None
        """What ranks noted of the last cell or call that has ended."""
        self.clock = CellClock()
        self._kept_choice: object = None
        """Keeps what ranks have not unpacked yet."""

    def next_number(self) -> int:
        """Return a number that no task of the session has had."""
        self._number += 1
        return self._number

    def output_of(self, number: int) -> TaskOutput | None:
        """Return where the output of a task goes; None if that is too long ago."""
        return self._outputs.get(number)

    def launch(
        self,
        pool: RankPool,
        number: int,
        who: tuple[int, ...],
        make: Callable[[int], Task],
        presses: InterruptCounter,
        *,
        kept: object = None,
        notes: list[str],
        sink: OutputSink | None = None,
        timeout: float | None = None,
        go_on: bool = False,
        started: float | None = None,
        copied: Mapping[str, int] | None = None,
        shared: Mapping[str, int] | None = None,
    ) -> RunningTask:
        """Send ``make(rank)`` to every rank in `who`; `kept` lives until they have ended the task."""
        begin = time.monotonic() if started is None else started
        output = self._new_output(number, sink, notes)
        control = pool.ensure_epoch()
        handles: dict[int, RankHandle] = {rank: pool.handles[rank] for rank in who}
        run = TaskRun(
            number,
            handles,
            output,
            control,
            next_event=pool.next_event,
            kill=pool.supervisor.kill,
            timeout=timeout,
            go_on=go_on,
            listen=pool.listen,
        )
        self._tell_strategy(pool, handles.values())
        tell_place(handles.values())
        pool.supervisor.memory_kills.glance()
        presses.wake = pool.wake
        presses.check()  # nothing was sent yet
        task, pickled = None, b""
        former = {rank: control.read_timing(rank) for rank in handles}
        began = time.monotonic_ns()
        for rank, handle in handles.items():
            handle.task, handle.busy, handle.stderr_tail = number, True, ""
            if (other := make(rank)) != task:  # as a rule it is the same for all
                task, pickled = other, pickle.dumps(other, 5)
            handle.send_pickled(Kind.CELL, pickled, epoch=pool.epoch)
        if runs_user_code(task):
            self.clock = CellClock(getattr(task, "execution_count", 0), began, 0, former)
        return RunningTask(
            pool, run, output, control, handles, notes, begin, copied or {}, shared or {}, kept, task
        )

    def finish(self, launched: RunningTask, presses: InterruptCounter) -> CellResult:
        """Wait for all ranks, and raise what there is to raise."""
        pool, run, output, notes = launched.pool, launched.run, launched.output, launched.notes
        try:
            run.wait(presses)
            pool.check()
        except NbParallelError:
            pool.void()
            raise
        finally:
            if runs_user_code(launched.task):
                self.clock = replace(self.clock, ended_ns=time.monotonic_ns())
        while pool.supervisor.notes:
            notes.append(pool.supervisor.notes.popleft())
            output.note(notes[-1])
        self._note_delivery(run, output, notes)
        self.record = outcomes.record_of(run, launched.task) or self.record
        store = sharing.current_store()
        broker = pool.supervisor.broker
        result = outcomes.result_of(
            run,
            output,
            seconds=time.monotonic() - launched.began,
            notes=tuple(notes),
            loads=lambda value: pickling.loads(value, store, broker=broker),
            copied=launched.copied,
            shared=launched.shared,
        )
        output.forget()
        if run.deaths or any(not outcome.ok or outcome.void for outcome in run.outcomes.values()):
            pool.void()
        store.drain()
        session_views.load()
        outcomes.raise_if_failed(run, result, launched.handles, launched.control)
        return result

    def _tell_strategy(self, pool: RankPool, handles: Iterable[RankHandle]) -> None:
        """Let ranks decide as the user has before their next task; a dead one hears of it when back."""
        generation = registry.generation()
        late = [handle for handle in handles if handle.told_strategy != generation]
        if not late:
            return
        pickled = pickling.dumps(
            registry.choice(), sharing.current_store(), broker=pool.supervisor.broker, name="sharing strategy"
        )
        self._kept_choice = pickled
        for handle in late:
            handle.send(Kind.STRATEGY, pickled.data)
            handle.told_strategy = generation

    def _new_output(self, number: int, sink: OutputSink | None, notes: list[str]) -> TaskOutput:
        output = self._outputs[number] = TaskOutput(number, sink)
        while len(self._outputs) > KEPT_OUTPUTS:
            del self._outputs[next(iter(self._outputs))]
        for note in notes:
            output.note(note)
        return output

    def _note_delivery(self, run: TaskRun, output: TaskOutput, notes: list[str]) -> None:
        for outcome in run.outcomes.values():
            if outcome.applied:
                self._names.delivered(outcome.rank)
            for note in outcome.notes:
                if note not in notes:
                    notes.append(note)
                    output.note(note)
        output.finish()
