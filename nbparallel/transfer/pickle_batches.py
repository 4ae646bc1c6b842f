"""PickleBatch: many objects that are pickled one by one and travel in one message.

A receiver rebuilds only those that it needs; one segment holds the large buffers of all.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbparallel.errors import NbParallelError, UnpicklableError
from nbparallel.sharing.memory.mapping import Files
from nbparallel.transfer.pickle_format import ArrayStore, is_plain
from nbparallel.transfer.pickling import serialise
from nbparallel.transfer.unpickling import own_globals, unpickle


@dataclass(slots=True)
class PickleBatch:
    """Pickled objects; `transfer.pickling` makes bytes of them, and puts large buffers into a segment."""

    stream: Any = b""
    """The pickle streams of all, one after the other."""
    ends: list[int] = field(default_factory=list)
    """Where each ends."""
    buffers: dict[int, list[Any]] = field(default_factory=dict)
    """Large buffers, of those that have any."""
    special: set[int] = field(default_factory=set)
    """Which of them need our own unpickler; Python's is much sooner done with numbers and short strings."""

    def __len__(self) -> int:
        return len(self.ends)

    def __reduce__(self) -> tuple[Any, ...]:
        buffers = {n: [pickle.PickleBuffer(part) for part in parts] for n, parts in self.buffers.items()}
        return PickleBatch, (pickle.PickleBuffer(self.stream), self.ends, buffers, self.special)

    def load(self, number: int, store: ArrayStore, *, broker: Any = None, name: str = "an object") -> Any:
        """Rebuild one object.

        Parameters
        ----------
        name : str
            The user's word for it, for errors.

        Raises
        ------
        UnpicklableError
            The object's own code raised; that is the cause.
        """
        stream = memoryview(self.stream)[self.ends[number - 1] if number else 0 : self.ends[number]]
        if number not in self.special:
            return pickle.loads(stream)
        try:
            buffers = self.buffers.get(number, [])
            return unpickle(stream, buffers, store, broker, own_globals(), match_classes=True)
        except (NbParallelError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            text = f"{name} could not be rebuilt in this process: {type(error).__name__}: {error}"
            raise UnpicklableError(f"{text}; see the cause for the line that raised") from error


class PickleBatchWriter:
    """Takes objects apart for `PickleBatch`.

    Parameters
    ----------
    store, broker, main_globals
        As for `transfer.pickling.dumps`.
    copy : bool
        Copy large buffers now, because the objects may change before the message is made: they are results.

    Attributes
    ----------
    arrays : list of array
        Shared arrays to which the pieces refer; hold them until the receivers have loaded all.
    """

    def __init__(
        self,
        store: ArrayStore,
        broker: Any,
        *,
        main_globals: Mapping[str, Any] | None = None,
        copy: bool = False,
    ) -> None:
        self._store, self._broker, self._main_globals, self._copy = store, broker, main_globals, copy
        self._files = None if copy else Files.SHARED
        self._stream = bytearray()
        self._pieces = PickleBatch()
        self.arrays: list[Any] = []

    def add(self, obj: Any, name: str) -> None:
        """Pickle one more object, for errors called `name`.

        Raises
        ------
        UnpicklableError
            It cannot travel.
        """
        pieces = self._pieces
        if is_plain(obj):
            self._stream += pickle.dumps(obj, 5)
        else:
            try:
                made = serialise(
                    obj, self._store, broker=self._broker, main_globals=self._main_globals, files=self._files
                )
            except UnpicklableError as error:
                raise UnpicklableError(f"{name}: {error}") from error.__cause__
            number = len(pieces)
            pieces.special.add(number)
            if made.buffers:
                pieces.buffers[number] = [bytearray(b) for b in made.buffers] if self._copy else made.buffers
            self._stream += made.with_sources()
            self.arrays += made.arrays
        pieces.ends.append(len(self._stream))

    def pieces(self) -> PickleBatch:
        """Return what was added so far."""
        self._pieces.stream = self._stream
        return self._pieces
