"""Queues whose objects travel our way; everything else is the library's ``multiprocessing.queues``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from multiprocessing import queues as library
from types import FunctionType, SimpleNamespace
from typing import Any

from nbparallel.multiprocessing.connection import adopt_pipe
from nbparallel.multiprocessing.messages.parcels import pickle_message, withdraw_parcel


def _over_names(function: Any, **names: Any) -> Callable[..., Any]:
    """Return a function of the library's that finds these instead of its module's globals of that name."""
    return FunctionType(function.__code__, {**vars(library), **names})


class Queue(library.Queue):  # type: ignore[type-arg]
    """A queue between processes; a thread pickles and sends what is put."""

    _reader: Any
    _writer: Any

    def __init__(self, maxsize: int = 0, *, ctx: Any) -> None:
        super().__init__(maxsize, ctx=ctx)
        self._reader, self._writer = adopt_pipe(self._reader, self._writer)
        self._reset()  # type: ignore[attr-defined]

    def _start_thread(self) -> None:
        # it names the library's class where others say ``self``
        _over_names(library.Queue._start_thread, Queue=type(self))(self)  # type: ignore[attr-defined]

    @classmethod
    def _feed(cls, buffer: Any, notempty: Any, send_bytes: Any, *others: Any) -> None:
        # The library's loop with our pickling.  Not the queue's own method: the thread would keep the queue.
        pickler = SimpleNamespace(dumps=partial(cls._message, mailbox=send_bytes.__self__.outbox))
        feed = _over_names(library.Queue._feed, _ForkingPickler=pickler)  # type: ignore[attr-defined]
        feed(buffer, notempty, send_bytes, *others)

    @classmethod
    def _message(cls, obj: Any, mailbox: int) -> memoryview:
        """Pickle what was put, in the thread."""
        return pickle_message(obj, mailbox)[0]


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
