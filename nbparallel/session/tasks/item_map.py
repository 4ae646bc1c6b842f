"""ItemMap: a function mapped over items by all ranks, each of which takes the next item when it is free.

::

    kernel                                                       every rank (`engine.tasks`)
    ItemMap.make     function and items, pickled
                     tickets: numbers of chunks, in a pipe  ──►  takes one, calls the function for its items,
    ItemMap.look     draws the bar, from the control segment ◄──  counts them and pickles the results
    ItemMap.results  puts them in order                      ◄──  the pipe is empty: tickets and results

No rank waits for another one or for the kernel: the pipe was filled and closed before the first rank reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import reprlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from nbparallel import sharing
from nbparallel.errors import UnpicklableError
from nbparallel.session.names.encoding import dump
from nbparallel.session.processes.elastic_pool import TaskPool
from nbparallel.session.results import RemoteValue
from nbparallel.sharing.memory.memory_limits import descriptor_error
from nbparallel.transfer.pickled_items import dump_item, load_item
from nbparallel.wire.control import ControlView
from nbparallel.wire.control_layout import TICKET, ItemRecord
from nbparallel.wire.messages import CallTask, Task

# ProgressBar: tqdm's own, in a notebook or a terminal; without tqdm a line that is written again.

REFRESH_SECONDS = 1.0
"""After so long the time beside the bar moves on, though nothing else has."""


class ProgressBar:
    """How many of `total` items are done; owned by the thread that waits for them."""

    def __init__(self, total: int) -> None:
        self._shown, self._refreshed = 0, time.monotonic()
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
        """Leave the bar as it is (idempotent)."""
        with self._warning():
            bar, self._bar = self._bar, None
            if bar is not None:
                bar.close()

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
        pass  # it shows no time

    def close(self) -> None:
        if self._written:
            sys.stderr.write("\n")


def make_bar(total: int) -> Any:
    """Return a bar of tqdm, or a line of text where that is not installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _Line(total)
    # tqdm's monitor is a thread that outlives the bar, and refreshes what `show` refreshes by itself
    kind: Any = type("MapBar", (tqdm,), {"monitor_interval": 0})
    if not hasattr(tqdm, "_lock"):  # tqdm's own would be a semaphore for several processes
        kind.set_lock(threading.RLock())
    return kind(total=total)


LOOK_SECONDS = 0.1
"""Between two looks at how far the ranks are."""
PARTS = 256
"""A chunk has one in so many of the items that are left: arbitrary, as long as it is many times the ranks."""
SMALLEST_PIPE = 4096
"""Bytes that a pipe holds at least (pipe(7)), where the system does not say."""


def chunks_of(count: int, most: int) -> list[tuple[int, int]]:
    """Divide items into at most `most` chunks, large ones first; return where each begins and how long it is.

    Up to 511 items are alone; of more, a chunk has a part of those that are left (guided self-scheduling).
    So many small items do not cost much, and the last ones are alone: no rank is late by more than one.
    """
    parts = PARTS
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

    Attributes
    ----------
    fds : tuple of int
        They travel with the task.
    """

    look_seconds = LOOK_SECONDS

    def __init__(
        self, function: Callable[[Any], Any], items: Any, *more: Any, progress: bool, errors: str
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
        self._return_errors = errors == "return"
        by_index = type(items) is range or (type(items) is np.ndarray and not items.dtype.hasobject)
        self._items = cast(Sequence[Any], items if by_index else list(items))
        self._function, self._by_index, self.count = function, by_index, len(self._items)
        self._progress, self._number, self._looked = progress, 0, 0.0
        self._bar: ProgressBar | None = None
        self._chunks: list[tuple[int, int]] = []
        self._broker: Any = None
        self._tickets: io.FileIO | None = None
        self.fds: tuple[int, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tickets is not None:
            self._tickets.close()
        if self._bar is not None:
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
        task = CallTask(number, ranks, (), True, None, pickled.data, self.count, self._return_errors)
        return task, (pickled, held)

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
            self._chunks = chunks_of(self.count, room // TICKET.size)
            tickets = b"".join(
                TICKET.pack(number, length, first) for number, (first, length) in enumerate(self._chunks)
            )
            os.set_blocking(writing, False)
            while tickets:
                tickets = tickets[os.write(writing, tickets) :]
        finally:
            os.close(writing)

    def look(self, control: ControlView) -> None:
        """Show how many items are done."""
        now = time.monotonic()
        if self._bar is None or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        records = [_record(control, rank) for rank in range(control.world_size)]
        self._bar.show(sum(record.done for record in records if record.task == self._number))

    def place(self, control: ControlView, rank: int) -> str:
        """Return the item that a rank took last, in words: ``item 7 ('abc')``."""
        if rank >= control.world_size:
            return ""
        record = _record(control, rank)
        if record.task != self._number or not 0 <= record.current < self.count:
            return ""
        return f"item {record.current} ({_short(self._items[record.current])})"

    def results(self, values: Iterable[Any]) -> list[Any]:
        """Return the results in the order of the items, from what the ranks have sent."""
        store = sharing.current_store()
        chunks: dict[int, Any] = {}
        for value in values:
            if isinstance(value, RemoteValue):
                raise value.error or UnpicklableError(f"the results of rank {value.rank}: {value.reason}")
            chunks |= value
        missing = [chunk for ticket, chunk in enumerate(self._chunks) if ticket not in chunks]
        if missing:
            names = ", ".join(_span(*chunk) for chunk in missing[:5]) + " …" * (len(missing) > 5)
            raise RuntimeError(
                f"map has no result of {names}: a process that is no rank took their turn from the ranks; "
                "the function must not read descriptors that it has not opened"
            )
        found: list[Any] = []
        for ticket, (first, length) in enumerate(self._chunks):
            name = f"the result of {_name(first, length)}"
            loaded = load_item(chunks[ticket], store, broker=self._broker, name=name)
            found += [loaded] if length == 1 else loaded
        if self._bar is not None:
            self._bar.show(self.count)
        return found


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
