"""ItemMap: a function mapped over items by all ranks, each of which takes the next item when it is free.

::

    kernel                                                       every rank (`engine.tasks`)
    ItemMap.make     function and items, pickled
                     tickets: numbers of chunks, in a pipe  ──►  takes one, calls the function for its items,
    ItemMap.look     draws the bar, from the control segment ◄──  counts them and pickles the results
    ItemMap.take     keeps them, `iterate` yields them       ◄──  every now and then: tickets and results
    ItemMap.results  puts them in order                      ◄──  the pipe is empty; it failed: what is left

No rank waits for another one or for the kernel: the pipe was filled and closed before the first rank reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import queue
import reprlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from nbparallel import sharing
from nbparallel.errors import ParallelError, UnpicklableError
from nbparallel.session.names.encoding import dump
from nbparallel.session.processes.elastic_pool import TaskPool
from nbparallel.session.results import PROFILE, CellResult, RemoteValue
from nbparallel.session.tasks.cell_queue import PendingCell, end_cell
from nbparallel.session.tasks.task_run import LOOK_SECONDS
from nbparallel.sharing.memory.memory_limits import descriptor_error
from nbparallel.transfer import pickling
from nbparallel.transfer.pickled_items import dump_item, load_item
from nbparallel.wire.control import ControlView
from nbparallel.wire.control_layout import TICKET, ItemRecord
from nbparallel.wire.messages import CallTask, Task
from nbparallel.wire.units import seconds_text

# ProgressBar: tqdm's own, in a notebook or a terminal; without tqdm a line that is written again.

REFRESH_SECONDS = 1.0
"""After so long the time beside the bar moves on, though nothing else has."""


class ProgressBar:
    """How many of `total` items are done; owned by the thread that waits for them."""

    def __init__(self, total: int) -> None:
        self._total, self._shown, self._began = total, 0, time.monotonic()
        self._refreshed = self._began
        self._bar: Any = None
        with self._warning():
            self._bar = make_bar(total)

    def show(self, done: int) -> None:
        """Show that so many are done, if it is more than before; what the front end raises ends the bar."""
        now = time.monotonic()
        with self._warning():
            if self._bar is not None and done > self._shown:
                self._bar.update(done - self._shown)
                self._shown, self._refreshed = done, now
            elif self._bar is not None and now - self._refreshed >= REFRESH_SECONDS:
                self._bar.refresh()
                self._refreshed = now

    def close(self) -> None:
        """Leave what is done, and how long it took, as text: what is saved is the last state (idempotent)."""
        with self._warning():
            bar, self._bar = self._bar, None
            if bar is not None:
                bar.close()
                if hasattr(bar, "leave_text"):
                    seconds = seconds_text(time.monotonic() - self._began)
                    bar.leave_text(f"{self._shown:,} of {self._total:,}, {seconds}")

    @contextlib.contextmanager
    def _warning(self) -> Any:
        try:
            yield
        except Exception as error:  # noqa: BLE001  a broken front end must not stop the ranks
            self._bar = None
            text = f"the progress is no longer shown ({type(error).__name__}: {error}); the ranks go on"
            warnings.warn(text, RuntimeWarning, stacklevel=4)


class _Line:
    """What stands where tqdm is not installed."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._written = total, 0, 0.0

    def update(self, more: int) -> None:
        self._done += more
        if self._done == self._total or time.monotonic() - self._written >= REFRESH_SECONDS:
            self._written = time.monotonic()
            sys.stderr.write(f"\r{self._done} of {self._total} items")
            sys.stderr.flush()

    def refresh(self) -> None:
        """Do nothing: it shows no time."""

    def close(self) -> None:
        """Leave the line."""

    def leave_text(self, text: str) -> None:
        sys.stderr.write(f"\r{text}\n")


def make_bar(total: int) -> Any:
    """Return a bar of tqdm, or a line of text where that is not installed."""
    try:
        from tqdm import std
        from tqdm.auto import tqdm
    except ImportError:
        return _Line(total)
    # tqdm's monitor is a thread that outlives the bar, and refreshes what `show` refreshes by itself
    kind: Any = type("MapBar", (tqdm,), {"monitor_interval": 0})
    if not hasattr(tqdm, "_lock"):  # tqdm's own would be a semaphore for several processes
        kind.set_lock(threading.RLock())
    if tqdm.status_printer is std.tqdm.status_printer:  # text, which ends as it is
        return kind(total=total)
    from IPython.display import display

    bar = kind(total=total, display=False)
    show: Any = display  # a widget, whose saved text would be that of its first state
    handle = show(bar.container, display_id=True)
    bar.leave_text = lambda text: handle.update({"text/plain": text}, raw=True)
    return bar


MOST_SECONDS = 10**8
"""Three years: what an alarm of the system takes on every machine."""
SEND_SECONDS = 0.05
"""Between two messages with results of one rank, if it is not `imap`: one takes some 0.1 ms here."""
PARTS = 256
"""A chunk has one in so many of the items that are left: arbitrary, as long as it is many times the ranks."""
SMALLEST_PIPE = 4096
"""Bytes that a pipe holds at least (pipe(7)), where the system does not say."""


def chunks_of(count: int, most: int, parts: int = PARTS) -> list[tuple[int, int]]:
    """Divide items into at most `most` chunks, large ones first; return where each begins and how long it is.

    Up to 511 items are alone; of more, a chunk has a part of those that are left (guided self-scheduling).
    So many small items do not cost much, and the last ones are alone: no rank is late by more than one.
    """
    while True:
        chunks: list[tuple[int, int]] = []
        first = 0
        while first < count and len(chunks) <= most:
            length = max(1, (count - first) // parts)
            chunks.append((first, length))
            first += length
        if len(chunks) <= most:
            return chunks
        parts //= 2


class ItemMap:
    """One mapping of a function over items; a context manager, which closes the tickets and the bar.

    Parameters
    ----------
    function : callable
    items : iterable
        An array's items are its rows.
    progress : bool
        Whether to show how many items are done.
    errors : {"raise", "return"}
        What becomes of an error of the function.
    timeout : float, optional
        Seconds that the function may take for an item.
    profile : bool
        Whether its lines are measured.

    Attributes
    ----------
    fds : tuple of int
        They travel with the task.
    done : dict
        Index of an item -> its result, as far as results have arrived.
    """

    overdue = "ended: the item's time-out had passed, and its code did not answer"

    def __init__(
        self,
        function: Callable[[Any], Any],
        items: Any,
        *more: Any,
        progress: bool = True,
        errors: str = "raise",
        timeout: float | None = None,
        profile: bool = False,
    ) -> None:
        if not callable(function):
            raise TypeError(f"map needs a function to call, not {type(function).__name__}")
        if more:
            raise TypeError(
                f"map takes one iterable of items, not {1 + len(more)}: zip makes one of them, as in "
                "`map(lambda pair: f(*pair), zip(xs, ys))`"
            )
        if not isinstance(items, Iterable) or (isinstance(items, np.ndarray) and items.ndim == 0):
            what = "an array without axes" if isinstance(items, np.ndarray) else type(items).__name__
            raise TypeError(f"map needs items to call the function with, as a list has them, not {what}")
        if errors not in ("raise", "return"):
            raise ValueError(f"errors must be 'raise' or 'return', not {errors!r}")
        if timeout is not None and not (isinstance(cast(Any, timeout), Real) and 0 < timeout <= MOST_SECONDS):
            raise ValueError(f"timeout must be seconds for an item, not {timeout!r} (at most {MOST_SECONDS})")
        self._return_errors, self._timeout = errors == "return", timeout
        self._observers = (PROFILE,) * profile
        self.go_on = self._return_errors and timeout is not None
        by_index = type(items) is range or (type(items) is np.ndarray and not items.dtype.hasobject)
        # `list` would look for no interrupt while it takes endless items of `itertools`
        self._items = cast(Sequence[Any], items if by_index else [item for item in items])  # noqa: C416
        self._function, self._by_index, self.count = function, by_index, len(self._items)
        self._progress, self._number, self._looked = progress, 0, 0.0
        self._bar: ProgressBar | None = None
        self._chunks: list[tuple[int, int]] = []
        self._broker: Any = None
        self._tickets: io.FileIO | None = None
        self.fds: tuple[int, ...] = ()
        self.done: dict[int, Any] = {}
        self._send_seconds = SEND_SECONDS if timeout is None else 0.0
        self._late: dict[int, int] = {}
        """Rank -> the item that it has had for too long."""
        self._received, self._yielded = set[int](), 0
        self._lost: Exception | None = None
        self._arrived: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tickets is not None:
            self._tickets.close()
        if self._bar is not None:
            self._bar.show(len(self._received))
            self._bar.close()

    def make(self, pool: TaskPool, number: int, ranks: tuple[int, ...]) -> tuple[Task, object]:
        """Return the task, and what owns memory that it refers to (`TaskFactory`)."""
        self._fill_pipe()
        broker = self._broker = pool.broker
        sent: Any = self._items
        held: list[Any] = []
        if not self._by_index:
            sent, store = [], sharing.current_store()
            for first, length in self._chunks:
                some = self._items[first] if length == 1 else self._items[first : first + length]
                item, arrays = dump_item(some, _name(first, length), store, broker)
                sent.append(item)
                held += arrays
        pickled = dump((self._function, sent), {"the function": self._function}, broker)
        if self._progress:
            self._bar = ProgressBar(self.count)
        self._number = number
        how = self._return_errors, self._timeout, self._send_seconds, self._observers
        return CallTask(number, ranks, (), True, None, pickled.data, self.count, *how), (pickled, held)

    def _fill_pipe(self) -> None:
        """Put a ticket for every chunk into a new pipe."""
        try:
            reading, writing = os.pipe2(os.O_CLOEXEC)
        except OSError as error:
            raise descriptor_error(error) from error
        self._tickets = io.FileIO(reading)  # closed with this object, if an interrupt is before its exit
        self.fds = (reading,)
        try:
            get_size = getattr(fcntl, "F_GETPIPE_SZ", None)
            room = SMALLEST_PIPE if get_size is None else fcntl.fcntl(writing, get_size)
            # a rank that is ended at a time-out takes the rest of its ticket along: then items are alone
            parts = PARTS if self._timeout is None else self.count
            self._chunks = chunks_of(self.count, room // TICKET.size, max(PARTS, parts))
            tickets = b"".join(
                TICKET.pack(number, length, first) for number, (first, length) in enumerate(self._chunks)
            )
            os.set_blocking(writing, False)
            while tickets:
                tickets = tickets[os.write(writing, tickets) :]
        finally:
            os.close(writing)

    def look(self, control: ControlView) -> dict[int, float]:
        """Show how many items are done; return for how long ranks are beyond the time-out of their items."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return {}
        self._looked = now
        records = {rank: _record(control, rank) for rank in range(control.world_size)}
        records = {rank: record for rank, record in records.items() if record.task == self._number}
        if self._bar is not None:
            self._bar.show(sum(record.done for record in records.values()))
        due = now - (self._timeout or 0)
        late = {rank: due - record.began_ns / 1e9 for rank, record in records.items() if record.began_ns}
        self._late |= {rank: records[rank].current for rank in late}
        return late

    def place(self, control: ControlView, rank: int) -> str:
        """Return the item that a rank took last, in words: ``item 7 ('abc')``."""
        record = _record(control, rank)
        if record.task != self._number or not 0 <= record.current < self.count:
            return ""
        return f"item {record.current} ({_short(self._items[record.current])})"

    def take(self, part: Any) -> None:
        """Keep results that a rank has sent; what cannot be had here is an error at the end."""
        try:
            self._keep(pickling.loads(part, sharing.current_store(), broker=self._broker))
        except Exception as error:  # noqa: BLE001  of the user's classes; or the rank, and its memory, are gone
            self._lost = self._lost or error

    def _keep(self, chunks: Mapping[int, Any]) -> None:
        for ticket, chunk in chunks.items():
            first, length = self._chunks[ticket]
            loaded = load_item(
                chunk,
                sharing.current_store(),
                broker=self._broker,
                name=f"the result of {_name(first, length)}",
            )
            for index, result in enumerate([loaded] if length == 1 else loaded, first):
                self._add(index, result)

    def _add(self, index: int, result: Any) -> None:
        if index not in self._received:
            self._received.add(index)
            self.done[index] = result
            self._arrived.put(index)

    def complete(self, perform: Callable[[], CellResult]) -> CellResult:
        """Have the ranks do it, and keep all results; an error gets those that are there (``.result``)."""
        try:
            result = perform()
        except (ParallelError, KeyboardInterrupt) as error:
            whole: CellResult | None = getattr(error, "result", None)
            self._attach_results(error)
            if whole is None or not self._have_timed_out(error):
                raise
            return whole
        for value in result.values:
            if isinstance(value, RemoteValue):
                raise value.error or UnpicklableError(f"the results of rank {value.rank}: {value.reason}")
            self._keep(value)
        if self._lost is not None:
            raise self._lost
        missing = [chunk for chunk in self._chunks if chunk[0] not in self._received]
        if missing:
            names = ", ".join(_span(*chunk) for chunk in missing[:5]) + " …" * (len(missing) > 5)
            raise RuntimeError(
                f"map has no result of {names}: a process that is no rank took their turn from the ranks; "
                "the function must not read descriptors that it has not opened"
            )
        if self._bar is not None:
            self._bar.show(self.count)
        return result

    def _have_timed_out(self, error: BaseException) -> bool:
        """Whether all that has failed are ranks that were ended for items, which get that as results."""
        failed = getattr(error, "errors", {}) if self._return_errors else {}
        if not failed or any(self.overdue not in str(each) for each in failed.values()):
            return False
        for rank, each in failed.items():
            self._add(self._late[rank], TimeoutError(str(each)))
        return len(self._received) == self.count

    def _attach_results(self, error: ParallelError | KeyboardInterrupt) -> None:
        """Have an error say how many items were done, and hold their results."""
        result = getattr(error, "result", None)
        if result is None:
            return  # none was begun
        for value in result.values:
            if isinstance(value, dict):
                with contextlib.suppress(Exception):  # what cannot be had here is not done
                    self._keep(value)
        error.result = dict(sorted(self.done.items()))  # type: ignore[union-attr]
        done = f"{len(self._received)} of {self.count} items"
        where = "the error's .result has their results, by index"
        where += ", that were not yielded" if self._yielded else ""
        if isinstance(error, ParallelError):
            error.add_note(f"{done} are done: {where}")
        else:
            text = f"the map was interrupted when {done} were done: {where}"
            error.args = (str(error).replace("the cell was interrupted", text),)

    def results(self, perform: Callable[[], CellResult]) -> list[Any]:
        """Have the ranks do it, and return the results in the order of the items."""
        self.complete(perform)
        return [self.done[index] for index in range(self.count)]

    def iterate(self, begin: Callable[[], PendingCell], *, ordered: bool) -> Iterator[Any]:
        """Yield results, in the order of the items or as they come; a caller that leaves ends the map."""
        self._send_seconds = 0.0
        with self:
            pending = begin()
            pending.add_done_callback(lambda _: self._arrived.put(None))
            try:
                for arrived in iter(self._arrived.get, None):
                    index = self._yielded if ordered else arrived
                    while index in self.done:
                        self._yielded += 1
                        yield self.done.pop(index)
                        index = self._yielded if ordered else index
                pending.result()
            except KeyboardInterrupt as stop:
                end_cell(pending)
                raise pending.exception() or stop from None
            finally:
                end_cell(pending)


def _record(control: ControlView, rank: int) -> ItemRecord:
    return ItemRecord.read(control.words, control.layout, rank)


def _span(first: int, count: int) -> str:
    return f"item {first}" if count == 1 else f"items {first}-{first + count - 1}"


def _name(first: int, count: int) -> str:
    return _span(first, count) if count == 1 else f"one of {_span(first, count)}"


def _short(item: Any) -> str:
    if isinstance(item, np.ndarray) and item.size > 4:
        return f"array of {' × '.join(map(str, item.shape))} {item.dtype}"
    try:
        return reprlib.repr(item)
    except (Exception, SystemExit):  # noqa: BLE001  a user's __repr__ may do anything
        return f"of type {type(item).__name__}"
