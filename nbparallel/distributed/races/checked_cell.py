"""A checked cell on a rank: while it runs, shared arrays are traced, and operations note what they order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from nbparallel import sharing
from nbparallel.distributed.races.access_log import AccessLog, ArrayName
from nbparallel.distributed.races.access_recorder import (
    LIMIT_NBYTES,
    AccessRecorder,
    UserLines,
)
from nbparallel.distributed.races.doors import doors
from nbparallel.distributed.races.operations import CheckedOperations, OperationOrder
from nbparallel.distributed.races.seen_code import SEEN_NAMES, SeenCode
from nbparallel.distributed.races.traced_array import TracedArray, plain, recording, trace
from nbparallel.distributed.runtime.call_site import label_function
from nbparallel.distributed.runtime.observers import ObservedCell
from nbparallel.sharing.memory.array_layout import extent


class CheckedCell:
    """Records what the user's code of one cell does with shared arrays.

    When the recorder has `LIMIT_NBYTES`, a part of the log is sent at the next operation.
    """

    def __init__(self, cell: ObservedCell) -> None:
        self._variables, self._is_delivered, self._rank = (
            cell.variables, cell.is_delivered, cell.communicator.rank,
        )  # fmt: skip
        self._store = sharing.current_store()
        self._lines = UserLines(label_function(cell.filename))
        self._recorder = AccessRecorder(self._locate, self._lines)
        self._order = OperationOrder(self._recorder, self.send_if_full)
        self._operations = CheckedOperations(cell.communicator, self._order)
        self._send = cell.send
        self._originals: dict[int, tuple[Any, Any]] = {}
        """Traced arrays that stand for delivered ones, by identity, with these."""
        self._names: list[ArrayName] = []
        self._notebook_names: list[ArrayName] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Trace the rank's arrays and operations while the block runs; afterwards nothing is traced."""
        with ExitStack() as stack:
            stack.callback(self._restore_names)
            self._trace_names()
            stack.enter_context(self._operations.observing())
            stack.enter_context(recording(self._recorder))
            stack.enter_context(doors(self._recorder, self._variables))
            yield

    def send_if_full(self) -> None:
        """Send a part of the log if what is recorded takes more than `LIMIT_NBYTES`."""
        if self._recorder.nbytes >= LIMIT_NBYTES:
            self._send(self.log())

    def log(self) -> AccessLog:
        """Return what was recorded since the last call."""
        events, broadcasts = tuple(self._order.events), tuple(self._order.broadcasts)
        self._order.events.clear()
        self._order.broadcasts.clear()
        accesses, count = self._recorder.take()
        return AccessLog(
            self._rank,
            events=events,
            accesses=accesses,
            names=tuple(self._names),
            notebook_names=tuple(self._notebook_names),
            count=count,
            broadcasts=broadcasts,
        )

    def _locate(self, array: np.ndarray[Any, Any]) -> tuple[int, int] | None:
        location = self._store.location(plain(array))
        if location is None:
            return None
        low, _ = extent(array.shape, array.strides, array.itemsize)
        return location.segment, location.start - low

    def _trace_names(self) -> None:
        """Bind names of shared arrays that some rank may write to traced arrays over the same memory."""
        traced: dict[int, TracedArray] = {}
        for name, value in list(self._variables.items()):
            if type(value) is TracedArray or not self._may_be_written(value):
                continue
            if id(value) not in traced:
                traced[id(value)] = found = trace(value)
                self._originals[id(found)] = found, value
            self._variables[name] = traced[id(value)]
            self._note_name(name, value)

    def _note_name(self, name: str, array: np.ndarray[Any, Any]) -> None:
        place = self._locate(array)
        if place is None:
            return
        segment, offset = place
        found = ArrayName(name, segment, offset, array.shape, array.strides, array.itemsize)
        own = name in self._variables and not self._is_delivered(name)
        names = self._names if own else self._notebook_names
        if found not in names:
            names.append(found)

    def _may_be_written(self, value: object) -> bool:
        if type(value) is not np.ndarray or not value.size:
            return False
        location = self._store.location(value)
        return location is not None and (location.writable or location.for_all)

    def _restore_names(self) -> None:
        """Bind all names to plain arrays again: delivered ones to the very objects that were delivered."""
        for name, value in list(self._variables.items()):
            if type(value) is TracedArray:
                self._note_name(name, value)
                self._variables[name] = self.value(value)

    def value(self, value: Any) -> Any:
        """Return the plain array that a traced one stands for; anything else as it is."""
        if type(value) is not TracedArray:
            return value
        known = self._originals.get(id(value))
        return plain(value) if known is None else known[1]


@contextmanager
def checking(cell: ObservedCell) -> Iterator[CheckedCell]:
    """Record a cell's accesses to shared arrays while the block runs."""
    check, code = CheckedCell(cell), SeenCode()
    cell.transformers.append(code)
    cell.variables.update(SEEN_NAMES)
    try:
        with check.recording():
            yield check
    finally:
        if code in cell.transformers:
            cell.transformers.remove(code)
        for name in SEEN_NAMES:
            cell.variables.pop(name, None)
