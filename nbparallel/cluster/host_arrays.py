"""Arrays of the notebook on their way to hosts: each once to a host, in pieces, into shared memory there.

An array has a number for as long as it is this object with this form, and hosts are asked for numbers.  So
what is written into an array is not seen there, until its name is bound to another one, or it is renewed.
"""

from __future__ import annotations

import itertools
import pickle
import queue
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nbparallel.cluster.host_pool import ANSWER_SECONDS, HostPool
from nbparallel.cluster.long_calls import perform_calls
from nbparallel.errors import ObjectArrayError
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.names.encoding import SharedArrays, Value
from nbparallel.session.output import TaskOutput
from nbparallel.session.tasks.dispatch import NOTED_NBYTES, name_sizes
from nbparallel.sharing.memory.array_layout import describe_dtype
from nbparallel.wire.handles import ArrayHandle
from nbparallel.wire.name_updates import NameKind, NameUpdate
from nbparallel.wire.units import size_text

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
        self,
        pool: HostPool,
        wanted: Mapping[str, Mapping[int, NameUpdate]],
        interrupts: InterruptCounter,
        output: TaskOutput,
    ) -> str:
        """Send hosts what they lack of arrays, given by their numbers; return a line about it, or nothing.

        Until it has arrived, a bar shows how much has.

        Raises
        ------
        StartError
            A host has not taken it, such as for want of memory.
        """
        began, lacking = time.monotonic(), dict[int, list[str]]()
        asked = {host: ([update.handle for update in some.values()],) for host, some in wanted.items()}
        for host, numbers in pool.ask("lack", asked, ANSWER_SECONDS).items():
            for number in numbers:
                lacking.setdefault(number, []).append(host)
        arrays = {handle.segment: array() for array, _, handle in self._known.values()}
        names = {number: update.name for some in wanted.values() for number, update in some.items()}
        pieces: queue.SimpleQueue[tuple[int, int, npt.NDArray[Any]]] = queue.SimpleQueue()
        for number in lacking:
            if (array := arrays[number]) is not None and array.nbytes:
                content = array.ravel(order="A").view(np.uint8)
                for start in range(0, content.size, PIECE_NBYTES):
                    pieces.put((number, start, content[start : start + PIECE_NBYTES]))
        abandoned, count = threading.Event(), pieces.qsize()
        nbytes = {names[number]: array.nbytes for number in lacking if (array := arrays[number]) is not None}
        size = sum(nbytes.values())

        def send_pieces() -> None:
            while not abandoned.is_set():
                try:
                    number, start, piece = pieces.get_nowait()
                except queue.Empty:
                    return
                data = b"".join(
                    (pickle.dumps((number, start, piece.size)), piece.data)
                )  # pickling copies it thrice
                pool.ask("fill", dict.fromkeys(lacking[number], data), ANSWER_SECONDS)
                if time.monotonic() - began > BAR_SECONDS:
                    done = size * (count - pieces.qsize()) // count
                    output.progress(f"sending {', '.join(nbytes)}: {_bar(done, size)}")

        seconds = ANSWER_SECONDS * (1 + pieces.qsize())
        senders = {f"sender {n} of an array": send_pieces for n in range(min(WINDOW, pieces.qsize()))}
        self.moving = (", ".join(nbytes), size) if count else None
        try:
            perform_calls(senders, interrupts, abandoned, seconds)
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
