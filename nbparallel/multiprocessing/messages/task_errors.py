"""Errors about a task that cannot be sent: they name the argument as the caller of the task wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import process
from functools import partial
from multiprocessing import pool
from typing import Any

from nbparallel.multiprocessing.messages.parcels import why_unsendable

_ONE_ARGUMENT: Any = pool.mapstar  # type: ignore[attr-defined]
_ALL_ARGUMENTS: Any = pool.starmapstar  # type: ignore[attr-defined]
_CHUNK: Any = process._process_chunk


def name_part(error: Exception, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
    """Return the error about the part of a task that cannot be sent, or `error` if each of them can.

    Parameters
    ----------
    error : Exception
        What sending the task raised.
    function, args, kwargs
        What the library is to call: it may call the user's function with each element of a chunk.
    """
    for name, part in _parts(function, args, kwargs):
        found = why_unsendable(part, f"{name} of a task", task=True)
        if found is not None:
            return found
    return error


def _parts(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    calls = [args]
    if function is _ONE_ARGUMENT:
        function, chunk = args[0]
        calls = [(item,) for item in chunk]
    elif function is _ALL_ARGUMENTS:
        function, calls = args[0]
    elif isinstance(function, partial) and function.func is _CHUNK:
        function, calls = function.args[0], args[0]
    yield "the function", function
    for call in calls:
        for index, argument in enumerate(call):
            yield f"args[{index}]", argument
    for name, argument in kwargs.items():
        yield f"kwargs[{name!r}]", argument
