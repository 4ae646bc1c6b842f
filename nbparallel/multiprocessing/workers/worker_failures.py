"""WorkerFailure: an exception of another process, as it travels, and as it is raised here."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from multiprocessing import pool as library
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from nbparallel.errors import RemoteError
from nbparallel.errors.questions import ask, class_name, text_of, traceback_of
from nbparallel.multiprocessing.messages.parcels import pickle_message, withdraw_parcel


class WorkerFailure(NamedTuple):
    """An exception, as text and, if it can be pickled, itself."""

    ename: str
    evalue: str
    text: str
    message: bytes | None


def describable(error: BaseException) -> BaseException:
    """Return `error`; one with its class's name, text and frames where its own code raises when shown."""

    def shown() -> BaseException:
        traceback.format_exception(error)
        return error

    def plain() -> BaseException:
        name, text = class_name(error), text_of(error)
        frames = "".join(traceback.format_tb(traceback_of(error)))
        return RemoteError(f"{name}: {text}\n\n{frames}", ename=name, evalue=text)

    return ask(shown, plain)


def failure_of(error: BaseException, dumps: Callable[[Any], Any] | None = None) -> WorkerFailure:
    """Return an exception as what refers to no frame, and so keeps nothing alive.

    `dumps` pickles it for this very process; otherwise it is pickled for another one.
    """
    error = describable(error)
    text = "".join(traceback.format_exception(error))
    # a pool's way: the receiver gets the exception with the text of its traceback as cause
    carried = library.ExceptionWithTraceback(error, traceback_of(error))  # type: ignore[attr-defined]
    try:
        data, parcel = pickle_message(carried) if dumps is None else (dumps(carried), 0)
        message = None if parcel else bytes(data)
        withdraw_parcel(parcel)
    except Exception:  # noqa: BLE001  it holds what cannot be sent
        message = None
    return WorkerFailure(class_name(error), text_of(error), text, message)


def raised(content: WorkerFailure) -> Exception:
    """Return what a worker raised, with its traceback as cause."""
    error: Exception | None = None
    if content.message is not None:
        with contextlib.suppress(Exception):  # its class cannot be called with what it is pickled as
            error = ForkingPickler.loads(content.message)
    if isinstance(error, Exception):
        return error
    return RemoteError(
        f"{content.ename}: {content.evalue}\n\n{content.text}", ename=content.ename, evalue=content.evalue
    )
