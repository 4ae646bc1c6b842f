"""Dispatch of tasks to the ranks of several hosts, and what becomes of what these report.

It stands where a session of one machine has its `TaskDispatcher`, whose steps it takes over but for two: the
task travels to nodes, and what ranks report comes from them.
"""

from __future__ import annotations

import itertools
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from nbparallel import sharing
from nbparallel.cluster.host_messages import FailureNotice, HostReport, HostTask, lost_outcomes
from nbparallel.cluster.host_pool import ANSWER_SECONDS, HostPool, host_loss, perform_calls
from nbparallel.errors import HostBoundaryError, ObjectArrayError, StartError, grouped, labelled_ranks
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.names.cell_inputs import check_known
from nbparallel.session.names.delivery import GatheredNames, NameDelivery
from nbparallel.session.names.encoding import SharedArrays, Value
from nbparallel.session.output import TaskOutput
from nbparallel.session.processes.elastic_pool import TaskPool
from nbparallel.session.results import CellClock, CellResult
from nbparallel.session.tasks.cell import CellOptions
from nbparallel.session.tasks.dispatch import NOTED_NBYTES, TaskDispatcher, name_sizes
from nbparallel.session.tasks.task_run import TaskFactory, TaskRequest, TaskRun, TaskWatch
from nbparallel.sharing.memory.array_layout import describe_dtype
from nbparallel.transfer.pickle_format import BY_VALUE
from nbparallel.wire.control import FailureKind
from nbparallel.wire.messages import runs_user_code
from nbparallel.wire.name_updates import ArrayHandle, NameKind, NameUpdate
from nbparallel.wire.units import size_text

# Arrays of the notebook on their way to hosts: each once to a host, in pieces, into shared memory there.
#
# An array has a number for as long as it is this object with this form, and hosts are asked for numbers.  So
# what is written into an array is not seen there, until its name is bound to another one, or it is renewed.

PIECE_NBYTES = 2 << 20
"""Of a piece: for each the scheduler of Dask connects with each worker anew, which holds it for a moment."""
WINDOW = 2
"""Pieces on their way at the same time."""
BAR_SECONDS, BAR_LETTERS = 0.5, 30
"""After so long a bar is shown, and how wide it is."""
ONCE = (
    "; what is written into an array here is not seen there, until its name is bound to another one or is "
    "pushed again: %parallel_push or Session.push_names"
)


class HostArrays(SharedArrays):
    """Numbers of the notebook's arrays, and their way to hosts."""

    def __init__(self) -> None:
        nothing: Any = None
        super().__init__(nothing, None)
        self._known: dict[int, tuple[weakref.ref[npt.NDArray[Any]], tuple[Any, ...], ArrayHandle]] = {}
        """By the id of the object: it, its form, and what stands for it."""
        self._numbers = itertools.count(1)
        self._said = False
        self.moving: tuple[str, int] | None = None
        """The names of arrays that are being sent, and their bytes; from any thread."""

    def encode(self, name: str, array: npt.NDArray[Any]) -> Value | None:
        """Return an array encoded as a handle that has its number in place of a segment's."""
        form = (array.shape, array.strides, array.dtype)
        known = self._known.get(id(array))
        if known is None or known[0]() is not array or known[1] != form:
            try:
                dtype = describe_dtype(array.dtype)
            except ObjectArrayError:
                return None
            strides = np.empty_like(array, order="A").strides
            place = next(self._numbers), array.nbytes, 0, array.shape, strides, dtype, False
            self._known = {key: value for key, value in self._known.items() if value[0]() is not None}
            known = self._known[id(array)] = weakref.ref(array), form, ArrayHandle(*place)
        handle = known[2]
        return Value(name, NameKind.ARRAY, (handle.segment, False), handle=handle, array=array)

    def renew(self, array: object) -> None:
        """Give an array another number: its content has changed."""
        self._known.pop(id(array), None)

    def send(
        self, pool: HostPool, wanted: Mapping[str, Mapping[int, NameUpdate]], interrupts: InterruptCounter,
        output: TaskOutput,
    ) -> str:  # fmt: skip
        """Send hosts what they lack of arrays, given by their numbers; return a line about it, or nothing.

        Until it has arrived, a bar shows how much has; `StartError` says why a host has not taken it.
        """
        began = time.monotonic()
        asked = {host: ([update.handle for update in some.values()],) for host, some in wanted.items()}
        lacked: dict[str, list[int]] = pool.ask("lack", asked, ANSWER_SECONDS)
        lacking = grouped((number, host) for host, numbers in lacked.items() for number in numbers)
        arrays = {handle.segment: array() for array, _, handle in self._known.values()}
        names = {number: update.name for some in wanted.values() for number, update in some.items()}
        nbytes = {names[number]: array.nbytes for number in lacking if (array := arrays[number]) is not None}
        size, sent = sum(nbytes.values()), list[int]()

        def send(number: int, start: int, content: npt.NDArray[Any]) -> None:
            piece = content[start : start + PIECE_NBYTES]
            head = pickle.dumps((number, start, piece.size))  # of the piece it would make three copies
            pool.ask("fill", dict.fromkeys(lacking[number], head + piece.data), ANSWER_SECONDS)
            sent.append(piece.size)
            if time.monotonic() - began > BAR_SECONDS:
                output.progress(f"sending {', '.join(nbytes)}: {_bar(sum(sent), size)}")

        pieces: dict[str, Callable[[], None]] = {}
        for number in lacking:
            if (array := arrays[number]) is not None and array.nbytes:
                content = array.ravel(order="A").view(np.uint8)
                for start in range(0, content.size, PIECE_NBYTES):
                    pieces[f"piece {len(pieces)} of an array"] = partial(send, number, start, content)
        self.moving = (", ".join(nbytes), size) if pieces else None
        try:
            perform_calls(pieces, interrupts, ANSWER_SECONDS * (1 + len(pieces)), WINDOW)
        finally:
            self.moving = None
            output.progress("")
        if not lacking or (self._said and size < NOTED_NBYTES):
            return ""
        hosts = sorted({host for some in lacking.values() for host in some})
        where = f"host {hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} hosts"
        said, self._said = self._said, True
        seconds = time.monotonic() - began
        return f"sent to {where} in {seconds:.2f} s: {name_sizes(nbytes)}{'' if said else ONCE}"


def _bar(done: int, size: int) -> str:
    """Return how much of `size` bytes has arrived, as a bar.

    >>> _bar(1 << 20, 3 << 20)
    '|██████████                    | 1.0 MiB of 3.0 MiB'
    """
    letters = "█" * (BAR_LETTERS * done // size)
    return f"|{letters:<{BAR_LETTERS}}| {size_text(done)} of {size_text(size)}"


LOOK_SECONDS = 1.0
"""Between two looks whether the hosts of a task still answer."""
NOTED_LOOKS, MOST_LOOKS = 5, 15
"""How many looks after its last sign of life a line names a silent host, and it is lost.

The first of them finds that sign, and 14 questions stay without an answer: what stops between two looks is
lost 14 to 15 s later.
"""
NOT_SHARED = (
    "ranks of other machines cannot write to memory of this one: have each rank return its part (the cell's "
    "values, `pull`), or let it make an array of its own with nbp.zeros"
)


class HostNames(NameDelivery):
    """Delivers the notebook's names to ranks of other machines: everything is copied."""

    def __init__(self) -> None:
        super().__init__(BY_VALUE)
        self.arrays = self._arrays = HostArrays()

    def gather(
        self, source: str, namespace: MutableMapping[str, Any],
        share: Sequence[str] = (), draw: Sequence[str] = (),
    ) -> GatheredNames:  # fmt: skip
        """Find what a cell uses; `HostBoundaryError` if ranks are to write to an array of the notebook."""
        self.share(share, namespace)
        names = super().gather(source, namespace, draw=draw)
        for name in names.inputs.values:
            place = sharing.current_store().location(namespace.get(name))
            if place is not None and place.for_all:
                raise HostBoundaryError(
                    f"{name!r} is an array that ranks may write, and {NOT_SHARED}; to send a copy: "
                    f"`{name}_here = {name}.copy()`"
                )
        return names

    def renew(self, names: Iterable[str], namespace: Mapping[str, Any]) -> None:
        """Have arrays sent again: what the notebook has written into them is not seen on hosts."""
        for name in names:
            check_known(name, namespace)
            self.arrays.renew(namespace[name])

    def share(self, names: Any, namespace: MutableMapping[str, Any]) -> tuple[str, ...]:
        if names := list(names):
            raise HostBoundaryError(f"{', '.join(map(str, names))} cannot be shared with hosts: {NOT_SHARED}")
        return ()


class HostRun(TaskRun):
    """A task that is on its hosts."""

    pool: HostPool
    running: Any = ()
    """Hosts that have the task and have not reported."""

    def __init__(self, pool: HostPool, request: TaskRequest, output: TaskOutput) -> None:
        nothing: Any = None
        super().__init__(pool, request, {}, nothing, output)
        hosts = grouped((pool.place.host_of(rank), rank) for rank in request.ranks)
        self.hosts = {
            host: {rank: replace(request.make(rank), ranks=tuple(ranks)) for rank in ranks}
            for host, ranks in hosts.items()
        }
        """By host, the task of each of its ranks."""
        self.running = []
        self._relayed = False
        self._looked = time.monotonic()
        self._silent: dict[str, int] = {}
        """By host, how many looks ago it last gave a sign of life."""

    def send(self, keep_messages: bool) -> None:
        """Send each host its part; one that does not take it is lost for this task."""
        number, options, pool = self.request.number, self.request.options, self.pool
        self.task = next(iter(self.hosts.values()))[self.request.ranks[0]]
        whole = len(self.hosts) > 1 and len(self.request.ranks) == pool.place.world_size
        names = pool.place.hosts if whole and runs_user_code(self.task) else ()
        of_use = CellOptions(timeout=options.timeout, on_error=options.on_error)
        same = of_use, keep_messages, pool.epoch, names
        parts = {host: pickle.dumps((HostTask(number, some, *same),), 5) for host, some in self.hosts.items()}
        self.running, pool.task = list(self.hosts), number
        for host, reply in pool.cluster.call("task", parts, ANSWER_SECONDS).items():
            if reply.error or reply.silent:
                reason = reply.error or f"it did not take the task within {ANSWER_SECONDS:g} s"
                self._lose(host, reason, silent=reply.silent)

    def _step(self, interrupts: InterruptCounter) -> None:
        event = self.pool.next_event(max(0.0, self._looked + LOOK_SECONDS - time.monotonic()))
        if event is not None:
            host, (kind, *rest) = event
            if kind == "lost":
                self._lose(host, rest[0])
            elif host in self.running and rest[0] == self.request.number:  # not of an earlier task
                if kind == "failed":
                    self._relay(host, rest[1])
                else:
                    self._end(host, rest[1])
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._look()
        pressed = interrupts.count - interrupts.answered
        if pressed > 0 and self.running:
            interrupts.answered = interrupts.count
            self.escalation.interrupted = True
            for _ in range(pressed):
                self._tell(self.running, "interrupt")

    def _look(self) -> None:
        """Ask every host for a sign of life, and give up the one that has given none for long."""
        self._looked = time.monotonic()
        heard = self.pool.heard
        for host in list(self.running):
            count = self._silent[host] = 1 if host in heard else self._silent.get(host, 0) + 1
            if count == NOTED_LOOKS:
                self.output.note(f"host {host} has not answered for {NOTED_LOOKS} s")
            elif count >= MOST_LOOKS:
                reason = f"it has not answered for {MOST_LOOKS} s (stopped, or not connected any more)"
                self._lose(host, reason, silent=True)
        heard.clear()
        self._tell(self.running, "look")

    def _tell(self, hosts: Sequence[str], op: str, *what: Any) -> None:
        self.pool.cluster.call(op, dict.fromkeys(hosts, pickle.dumps(what)), 0.0)

    def _end(self, host: str, inline: bytes) -> None:
        try:
            report = inline or self.pool.ask("take", {host: ()}, ANSWER_SECONDS)[host]
        except StartError as error:
            self._lose(host, str(error))
            return
        ended: HostReport = pickle.loads(report)
        self.running.remove(host)
        self.outcomes |= {outcome.rank: outcome for outcome in ended.outcomes}
        self.request.notes.extend(note for note in ended.notes if note not in self.request.notes)
        steps = self.escalation
        steps.interrupted |= ended.interrupted
        steps.timed_out |= ended.timed_out
        steps.interrupted_for_peer |= ended.freed
        failed = [self.outcomes[rank] for rank in self.hosts[host] if not self.outcomes[rank].ok]
        if failed or any(outcome.invalidates_epoch for outcome in ended.outcomes):
            self.pool.epoch += 1
        if failed:
            self.pool.changed.add(host)  # perhaps a rank has died; the event that says so may come later
            self._relay(host, FailureNotice.of(failed[0]))

    def _lose(self, host: str, reason: str, *, silent: bool = False) -> None:
        """Give up a host; its part of the task, if it has not reported, has failed."""
        self.pool.host_lost(host, reason, silent=silent)
        if host in self.running:
            self.running.remove(host)
            ranks = list(self.hosts[host])
            error = host_loss(host, ranks, reason)
            self.outcomes |= {each.rank: each for each in lost_outcomes(self.request.number, ranks, error)}
            self._relay(host, FailureNotice(FailureKind.PEER, ranks[0], str(error)))

    def _relay(self, host: str, notice: FailureNotice) -> None:
        """Notify the other hosts, once, that a rank has failed on this one: they end the task soon."""
        if not self._relayed:
            self._relayed = True
            others = [other for other in self.running if other != host]
            self._tell(others, "peer_failed", self.request.number, notice)


class HostDispatcher(TaskDispatcher):
    """The tasks of one session on several hosts, one at a time; not thread-safe but for `output_of`."""

    # docstrings inherited

    _names: HostNames

    def prepare(
        self, pool: TaskPool, make: TaskFactory, options: CellOptions, watch: TaskWatch | None = None,
        *rest: Any,
    ) -> TaskRequest:  # fmt: skip
        if watch is not None:
            raise HostBoundaryError(
                "map divides its items among the ranks of one machine: on hosts, let each rank take "
                "items[rank::world_size] in a cell"
            )
        return super().prepare(pool, make, options, watch, *rest)

    def prepare_cell(self, pool: TaskPool, cell: str, options: CellOptions, *rest: Any) -> TaskRequest:
        if options.check_races:
            raise HostBoundaryError(
                "check_races looks at memory that ranks of one machine share: leave it out, or run the cell "
                "on ranks of this machine, without the cluster"
            )
        if options.profile:
            raise HostBoundaryError("profile is for ranks of one machine: leave it out, or the cluster")
        return super().prepare_cell(pool, cell, options, *rest)

    def launch(self, pool: TaskPool, request: TaskRequest, interrupts: InterruptCounter) -> TaskRun:
        assert isinstance(pool, HostPool), "the ranks are on hosts"
        with labelled_ranks(pool.place.label_of):
            pool.refuse_lost(request.ranks)
            output = self._open_output(request.number, request.options.sink, request.notes)
            run = HostRun(pool, request, output)
            interrupts.wake = pool.wake
            interrupts.check()
            self._send_arrays(pool, run, interrupts)
            began = time.monotonic_ns()
            self._sent.append(run)
            run.send(self.keep_messages)
        if runs_user_code(run.task):
            number = getattr(run.task, "execution_count", 0)
            self.clock = CellClock(number, request.number, request.ranks, began, phase="running")
        return run

    def _send_arrays(self, pool: HostPool, run: HostRun, interrupts: InterruptCounter) -> None:
        """Have hosts hold the arrays that the task refers to."""
        wanted: dict[str, dict[int, NameUpdate]] = {}
        for host, tasks in run.hosts.items():
            for update in itertools.chain.from_iterable(task.updates for task in tasks.values()):
                if update.kind is NameKind.ARRAY:
                    wanted.setdefault(host, {})[update.handle.segment] = update
        if wanted:
            try:
                line = self._names.arrays.send(pool, wanted, interrupts, run.output)
            except StartError:
                for host in wanted:
                    pool.refuse_gone(host)
                raise
            if line:
                self._note(run, line)

    def await_ranks(self, run: TaskRun, interrupts: InterruptCounter) -> None:
        try:
            run.wait(interrupts)
        finally:
            run.ended_ns = time.monotonic_ns()

    def _finish(self, run: TaskRun, interrupts: InterruptCounter) -> CellResult:
        with labelled_ranks(run.pool.place.label_of):
            return super()._finish(run, interrupts)
