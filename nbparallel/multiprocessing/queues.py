"""Queues whose objects travel our way; everything else is the library's ``multiprocessing.queues``."""

from __future__ import annotations

from multiprocessing import queues as library
from typing import Any

from nbparallel.multiprocessing.connection import adopt_pipe
from nbparallel.multiprocessing.messages.parcels import pickle_message, unwrapped, withdraw_parcel, wrapped


class Queue(library.Queue):  # type: ignore[type-arg]
    """A queue between processes."""

    _reader: Any
    _writer: Any

    def __init__(self, maxsize: int = 0, *, ctx: Any) -> None:
        super().__init__(maxsize, ctx=ctx)
        self._reader, self._writer = adopt_pipe(self._reader, self._writer)
        self._reset()  # type: ignore[attr-defined]

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put an object; a thread pickles and sends it."""
        super().put(self._wrapped(obj), block, timeout)

    def _wrapped(self, obj: Any) -> Any:
        return wrapped(obj, self._writer.outbox)

    def _start_thread(self) -> None:
        report = self._on_queue_feeder_error  # type: ignore[has-type]
        self._on_queue_feeder_error = lambda error, obj: report(error, unwrapped(obj))
        try:
            super()._start_thread()  # type: ignore[misc]
        finally:
            del self._on_queue_feeder_error


class JoinableQueue(Queue, library.JoinableQueue):  # type: ignore[type-arg]
    """A queue that can be waited for until all its tasks are done."""


class SimpleQueue(library.SimpleQueue):  # type: ignore[type-arg]
    """A pipe with two locks."""

    _reader: Any
    _writer: Any

    def __init__(self, *, ctx: Any) -> None:
        super().__init__(ctx=ctx)
        self._reader, self._writer = adopt_pipe(self._reader, self._writer)
        self._poll = self._reader.poll

    def put(self, obj: Any) -> None:
        """Put an object.

        Raises
        ------
        UnpicklableError
            A part cannot be sent.
        """
        data, parcel = pickle_message(obj, self._writer.outbox)  # before the lock, as the library
        try:
            with self._wlock:  # type: ignore[attr-defined]
                self._writer.send_bytes(data)
        except BaseException:
            withdraw_parcel(parcel)
            raise


def __getattr__(name: str) -> Any:
    return getattr(library, name)
