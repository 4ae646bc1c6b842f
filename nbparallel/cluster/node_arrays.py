"""Arrays of the notebook on one host: shared memory that lives as long as its ranks use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nbparallel import sharing
from nbparallel.errors import SegmentLostError
from nbparallel.sharing.memory.array_layout import rebuild_dtype
from nbparallel.sharing.strategies import registry
from nbparallel.wire.handles import ArrayHandle
from nbparallel.wire.messages import Task
from nbparallel.wire.name_updates import NameKind


class NodeArrays:
    """Arrays by the kernel's numbers: held here from the question for them to the end of the task.

    Before and after that only ranks hold them, and what none holds is gone.
    """

    def __init__(self) -> None:
        self._held: dict[int, npt.NDArray[Any]] = {}
        self._handles: dict[int, ArrayHandle] = {}
        """Of all that ranks may have."""

    def lack(self, wanted: Sequence[ArrayHandle], broker: Any) -> list[int]:
        """Hold arrays, and return the numbers of those that have to be sent: there is memory for them."""
        store, lacking = sharing.current_store(), []
        self._held.clear()
        for form in wanted:
            try:
                self._held[form.segment] = store.attach(self._handles[form.segment], broker=broker)
            except (KeyError, SegmentLostError):
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
