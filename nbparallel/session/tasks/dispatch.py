"""Dispatch of tasks: number them, send them to ranks, make a result or an error of what the ranks report."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from nbparallel import sharing
from nbparallel.errors import (
    ChannelClosedError,
    NbParallelError,
    SupervisorDiedError,
    UnpicklableError,
    grouped,
    rank_list,
)
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.names.delivery import GatheredNames, NameDelivery, Preparation
from nbparallel.session.names.encoding import dump
from nbparallel.session.output import OutputSink, TaskOutput
from nbparallel.session.processes.elastic_pool import TaskPool
from nbparallel.session.processes.rank_handle import RankHandle, send_working_context
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.results import CellClock, CellRecord, CellResult, RankValues, RemoteValue
from nbparallel.session.tasks import outcomes
from nbparallel.session.tasks.cell import CellOptions
from nbparallel.session.tasks.outcomes import UnreceivedMessages
from nbparallel.session.tasks.task_run import TaskFactory, TaskRequest, TaskRun, TaskWatch
from nbparallel.sharing.memory.mapping import Files
from nbparallel.sharing.strategies import registry
from nbparallel.transfer import pickling
from nbparallel.wire.control_layout import KEEP_FRAMES, READ_IN_PLACE_OFF
from nbparallel.wire.frames import Kind
from nbparallel.wire.messages import (
    CallTask,
    CellTask,
    DebugTask,
    NamesTask,
    PushTask,
    Task,
    runs_user_code,
)
from nbparallel.wire.units import size_text

MOST_OUTPUTS = 200
"""Tasks whose late output still reaches their cell."""
NOTED_NBYTES = 1 << 20
NAMED_PART = 100
"""A line on what was copied leaves out what has a smaller part of all bytes: functions and numbers."""
"""Copying more than this for a cell is noted below it."""
DEATH_MILLISECONDS = 1000
"""A process that is killed closes its sockets a moment before its end can be seen."""

__tracebackhide__ = True  # of pytest: an error of a rank shows the test, not the way here


class TaskDispatcher:
    """The tasks of one session, one at a time; not thread-safe but for `output_of`."""

    def __init__(self, names: NameDelivery) -> None:
        self._names = names
        self._outputs: dict[int, TaskOutput] = {}
        self.output_of = self._outputs.get
        """Returns where the output of a task goes; None if that task is too old."""
        self.next_number = itertools.count(1).__next__
        """Returns a number that no task of the session has had."""
        self._sent: list[TaskRun] = []
        """The task that is being sent, or waited for."""
        self.record: CellRecord | None = None
        """The ranks' notes on the last cell or call that has ended."""
        self.clock = CellClock()
        self._messages = UnreceivedMessages()
        self._strategy_message: object = None
        """Owns memory that ranks have perhaps not unpickled yet."""
        self.read_in_place = True
        """Whether ranks may read each other's private arrays where they lie, in the tasks that follow."""
        self.keep_messages = False
        """Whether messages that no rank has received stay when they have ended."""
        self.keep_frames = False
        """Whether ranks keep the frames of a failure for `debug_task`."""

    def prepare(
        self,
        pool: TaskPool,
        make: TaskFactory,
        options: CellOptions,
        watch: TaskWatch | None = None,
        ranks: tuple[int, ...] = (),
    ) -> TaskRequest:
        """Return a request for a task that is the same for all its ranks, by default all there are."""
        number, ranks = self.next_number(), ranks or tuple(pool.ranks)
        task, keepalive = make(pool, number, ranks)
        return TaskRequest(
            number,
            ranks,
            lambda _: task,
            options,
            None,
            keepalive,
            watch=watch,
            fds=() if watch is None else watch.fds,
        )

    def prepare_cell(
        self,
        pool: TaskPool,
        cell: str,
        options: CellOptions,
        ranks: tuple[int, ...],
        names: GatheredNames | None = None,
    ) -> TaskRequest:
        """Put arrays that a cell uses into shared memory, and return the cell with what each rank needs.

        `names` was returned by `gather` when the cell was put into a queue.
        """
        preparation, notes = None, list[str]()
        if options.namespace is not None:
            try:
                preparation = self._names.deliver(
                    names
                    or self._names.gather(cell, options.namespace, tuple(options.share), tuple(options.draw)),
                    ranks,
                )
            except ChannelClosedError as error:
                if not pool.ended(DEATH_MILLISECONDS):
                    raise
                raise SupervisorDiedError(
                    "the supervisor process died while the cell's arrays were on their way: the next cell "
                    "starts new ranks"
                ) from error
            notes = [*preparation.notes, *_copied_notes(preparation)]
        updates = {} if preparation is None else preparation.updates
        number = self.next_number()

        def make(rank: int) -> Task:
            return CellTask(
                number=number,
                ranks=ranks,
                updates=tuple(updates.get(rank, ())),
                want_values=options.want_values,
                seed=options.seed,
                source=cell,
                line_offset=options.line_offset,
                execution_count=number if options.execution_count is None else options.execution_count,
                show_values=options.show_values,
                go_on=options.go_on,
                uses=None if preparation is None else preparation.uses,
                draw=tuple(options.draw),
                observers=tuple(options.observers),
                follows_names=preparation is not None,
            )

        return TaskRequest(number, ranks, make, options, preparation, notes=notes)

    def gather(self, cell: str, options: CellOptions, ranks: tuple[int, ...]) -> GatheredNames | None:
        """Return what a cell uses of the notebook as it is now, for a launch later."""
        if options.namespace is None:
            return None
        names = self._names.gather(cell, options.namespace, draw=tuple(options.draw))
        self._names.freeze(names, ranks)
        return names

    def launch(self, pool: TaskPool, request: TaskRequest, interrupts: InterruptCounter) -> TaskRun:
        """Send a task to its ranks.

        The order of the steps matters:

        1. open the task's output, so that notes and everything that ranks print reach it;
        2. give all ranks a fresh epoch if something failed in the last one;
        3. send what may have changed here: sharing strategy, working directory, search path;
        4. let an interrupt raise: until now no rank has any of the task, after this every rank gets it;
        5. record when it begins, if it runs the user's code;
        6. send each rank its task; equal tasks are pickled once.
        """
        assert isinstance(pool, RankPool), "ranks of other machines have a dispatcher of their own"
        sharing.current_store().drain()  # a rank may need the room of what the notebook dropped
        output = self._open_output(request.number, request.options.sink, request.notes)
        control = pool.ensure_epoch()
        control.words[READ_IN_PLACE_OFF] = not self.read_in_place
        control.words[KEEP_FRAMES] = self.keep_frames
        handles = {rank: pool.handle(rank) for rank in request.ranks}
        run = TaskRun(pool, request, {}, control, output)
        for note in self._messages.begin(control):
            self._note(run, note)
        self._send_strategy(pool, handles.values())
        send_working_context(handles.values())
        pool.supervisor.oom_kills.poll()
        interrupts.wake = pool.wake
        interrupts.check()
        began, pickled = time.monotonic_ns(), b""
        self._sent.append(run)
        for rank, handle in handles.items():
            run.handles[rank] = handle
            handle.task, handle.busy, handle.stderr_tail = request.number, True, ""
            if (task := request.make(rank)) != run.task:
                if run.task is None and runs_user_code(task):
                    number = getattr(task, "execution_count", 0)
                    self.clock = CellClock(
                        number,
                        request.number,
                        request.ranks,
                        began,
                        phase="running",
                        items=max(0, getattr(task, "items", 0)),
                    )
                run.task, pickled = task, pickle.dumps(task, 5)
            handle.send_pickled(Kind.TASK, pickled, request.fds, epoch=pool.epoch)
        return run

    @contextlib.contextmanager
    def stopping(self, interrupts: InterruptCounter) -> Iterator[None]:
        """Return a context that ranks have stopped a task to leave, whatever raises in it.

        Signal handlers are deferred (`InterruptCounter`); another thread can raise at any place of this one
        (PyThreadState_SetAsyncExc, as some time-outs do).
        """
        try:
            yield
        except NbParallelError:
            raise
        except BaseException as error:
            for run in self._sent:
                if run.running and not interrupts.handed_over:
                    run.pool.invalidate_epoch()
                    interrupts.keep(error)
                    run.wait(interrupts)
            raise
        finally:
            self._sent.clear()  # it owns what the task referred to

    def finish(self, run: TaskRun, interrupts: InterruptCounter) -> CellResult:
        """Wait for all ranks of a task and return its result, or raise as `outcomes.raise_if_failed`."""
        ending: dict[str, Any] = {"phase": "finished"}
        try:
            return self._finish(run, interrupts)
        except BaseException as error:
            ending = outcomes.ending_of(error)
            raise
        finally:
            # it owns what the task referred to; if ranks still run it, `stopping` has to find it
            if run in self._sent and (interrupts.handed_over or not run.running):
                self._sent.remove(run)
            if runs_user_code(run.task):
                self.clock = replace(self.clock, ended_ns=run.ended_ns, **ending)

    def await_ranks(self, run: TaskRun, interrupts: InterruptCounter) -> None:
        """Wait for all ranks of a task, and show what is to be noted."""
        pool = run.rank_pool
        try:
            run.wait(interrupts)
            pool.check()
        except NbParallelError:
            pool.invalidate_epoch()
            raise
        finally:
            run.ended_ns = time.monotonic_ns()
        while pool.supervisor.notes:
            self._note(run, pool.supervisor.notes.popleft())
        failed = bool(run.deaths) or any(
            not outcome.ok or outcome.invalidates_epoch for outcome in run.outcomes.values()
        )
        for note in self._messages.end(run, failed=failed, keep=self.keep_messages):
            self._note(run, note)
        if failed:
            pool.invalidate_epoch()

    def _finish(self, run: TaskRun, interrupts: InterruptCounter) -> CellResult:
        pool = run.pool
        self.await_ranks(run, interrupts)
        store, broker = sharing.current_store(), pool.broker
        values = outcomes.values_of(run, lambda value: pickling.loads(value, store, broker=broker))
        if isinstance(run.task, CellTask):  # a call that asked for nothing but values gets an error
            for note in outcomes.missing_values_notes(values):
                self._note(run, note)
        self._record_delivery(run)
        self._record(run)
        result = outcomes.result_of(run, values)
        run.output.forget()
        store.drain()
        outcomes.raise_if_failed(run, result, interrupts.take_raised())
        return result

    def _record(self, run: TaskRun) -> None:
        """Keep what ranks have noted."""
        if runs_user_code(run.task):
            before = {} if self.record is None else self.record.copied
            copied = {
                name: (nbytes, before.get(name, (0, 0))[1] + 1)
                for name, nbytes in _copied(run.request.preparation).items()
                if nbytes >= NOTED_NBYTES
            }
            self.record = replace(outcomes.record_of(run, self.clock.began_ns), copied=copied)

    def shrink(self, pool: TaskPool, world_size: int, interrupts: InterruptCounter) -> None:
        """End the ranks from `world_size` on.

        Raises
        ------
        ValueError
            One of them holds variables that would be lost.
        """
        assert isinstance(pool, RankPool), "others have a fixed number of ranks"
        ranks = tuple(range(world_size, len(pool.handles)))
        request = self.prepare(pool, plain_task(NamesTask, want_values=True), CellOptions(), None, ranks)
        result = self.finish(self.launch(pool, request, interrupts), interrupts)
        holding = {rank: held for rank, held in result.values.items() if held}
        if holding:
            raise ValueError(_holding_text(holding))
        for rank in ranks:
            self._names.rank_lost(rank)
        pool.shrink(world_size)

    def _send_strategy(self, pool: RankPool, handles: Iterable[RankHandle]) -> None:
        """Send the user's choice of sharing strategies to the ranks that do not have it yet."""
        generation = registry.generation()
        late = [handle for handle in handles if handle.sent_strategy != generation]
        if not late:
            return
        pickled = pickling.dumps(
            registry.choice(), sharing.current_store(), broker=pool.broker, name="sharing strategy"
        )
        self._strategy_message = pickled
        for handle in late:
            handle.send(Kind.STRATEGY, pickled.data)
            handle.sent_strategy = generation

    def _open_output(self, number: int, sink: OutputSink | TaskOutput | None, notes: list[str]) -> TaskOutput:
        output = sink if isinstance(sink, TaskOutput) else TaskOutput(number, sink)
        self._outputs[number] = output
        while len(self._outputs) > MOST_OUTPUTS:
            del self._outputs[next(iter(self._outputs))]
        for note in notes:
            output.note(note)
        return output

    def _record_delivery(self, run: TaskRun) -> None:
        """Record which ranks have the names of a cell, and show the notes of all, each once."""
        preparation, ends = run.request.preparation, [end for _, end in sorted(run.outcomes.items())]
        for end in ends:
            if end.applied and preparation is not None:
                self._names.delivered(end.rank, preparation)
        for note, saying in grouped((note, end.rank) for end in ends for note in end.notes).items():
            note = note.replace("this rank", rank_list(saying))
            if note not in run.request.notes:
                self._note(run, note)
        run.output.finish()

    def _note(self, run: TaskRun, text: str) -> None:
        run.request.notes.append(text)
        run.output.note(text)


def _copied_notes(preparation: Preparation) -> list[str]:
    """Return lines that say what was copied for this cell, if it was much."""
    moved, copied = preparation.moved_nbytes, _copied(preparation)
    total = sum(preparation.copied_nbytes.values())
    if total <= NOTED_NBYTES:
        return []
    notes = []
    if moved:
        notes.append(f"moved into shared memory, where every rank reads it: {name_sizes(moved)}")
    copied = {name: nbytes for name, nbytes in copied.items() if nbytes > total // NAMED_PART}
    if copied:
        notes.append(f"copied for the ranks: {name_sizes(copied)}")
    return notes


def _copied(preparation: Preparation | None) -> dict[str, int]:
    """Return the bytes that were copied for a cell, and not moved into shared memory, by name."""
    if preparation is None:
        return {}
    return {
        name: nbytes - preparation.moved_nbytes.get(name, 0)
        for name, nbytes in preparation.copied_nbytes.items()
    }


def name_sizes(nbytes: Mapping[str, int]) -> str:
    """Return the largest values by name with their sizes."""
    most = sorted((name for name in nbytes if nbytes[name]), key=lambda name: -nbytes[name])
    return ", ".join(f"{name} ({size_text(nbytes[name])})" for name in most[:5]) + " …" * (len(most) > 5)


SHOWN_NAMES = 8
"""Variables that a line for deleting them lists; of more, ranks are restarted rather than that typed."""


def _holding_text(holding: Mapping[int, Sequence[str]]) -> str:
    """Return why ranks cannot be ended, and the lines that delete what they hold."""
    lines, parts = [], []
    for held, ranks in grouped((tuple(held), rank) for rank, held in holding.items()).items():
        many = len(held) > SHOWN_NAMES
        parts.append(f"{rank_list(ranks)}: {', '.join(held[:SHOWN_NAMES])}{' …' if many else ''}")
        spec = rank_list(ranks).partition(" ")[2].replace(" ", "")
        lines.append(f"`%parallel_restart -r {spec}`" if many else f"`%rank {spec} del {', '.join(held)}`")
    return (
        f"{rank_list(holding)} would be ended and {'holds' if len(holding) == 1 else 'hold'} variables "
        f"({'; '.join(parts)}): delete them with {' and '.join(lines)}, or use -r, without -n, "
        "to run on fewer ranks"
    )


# Tasks that run no cell: call a function, take the values of a variable, assign variables.
#
# What a cell shows last is shown as text if it cannot travel, and a line says so.  A caller that asked for
# values alone gets them all, or an error: a text in the place of one would be found much later, if at all.


def call_task(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})
) -> TaskFactory:
    """Return what makes the task of `Session.call`."""
    called = partial(function, **kwargs) if kwargs else function

    def make(pool: TaskPool, number: int, ranks: tuple[int, ...]) -> tuple[Task, object]:
        parts = {"the function": function, **{f"argument {n}": arg for n, arg in enumerate(args, 1)}}
        parts |= {f"argument {name!r}": value for name, value in kwargs.items()}
        pickled = dump((called, args), parts, pool.broker, pool.store)
        return CallTask(number, ranks, (), True, None, pickled.data), pickled

    return make


def plain_task(kind: Callable[..., Task], *fields: Any, want_values: bool = False) -> TaskFactory:
    """Return what makes a task of a kind with fields that refer to no memory here."""
    return lambda _, number, ranks: (kind(number, ranks, (), want_values, None, *fields), None)


debug_task = partial(plain_task, DebugTask)
"""Returns what makes the task in which the user examines the failure of that time, on its rank."""


def push_task(values: Mapping[str, Any]) -> TaskFactory:
    """Return what makes the task of `Session.push`."""

    def make(pool: TaskPool, number: int, ranks: tuple[int, ...]) -> tuple[Task, object]:
        pickled = dump(values, values, pool.broker, pool.store, Files.PRIVATE)
        return PushTask(number, ranks, (), False, None, pickled.data), pickled

    return make


def all_values(result: CellResult, what: str) -> RankValues:
    """Return the values of `what`, of all ranks.

    Raises
    ------
    UnpicklableError
        Some cannot travel; the error's `result` has the others.
    FileDescriptorLimitError, SharedMemoryFullError
        This process lacks what it needs to receive them.
    """
    stayed = [value for value in result.values if isinstance(value, RemoteValue)]
    if stayed:
        reason = stayed[0].reason
        ranks = rank_list(value.rank for value in stayed if value.reason == reason)
        error = stayed[0].error or UnpicklableError(f"{what} stayed on {ranks}: {reason}")
        error.result = result  # type: ignore[attr-defined]  # as `ParallelError.result`
        raise error
    return result.values
