"""Say which of the notebook's arrays a rank tried to write, and what to do."""

from __future__ import annotations

import dis
import re
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from nbparallel.errors import ReadOnlyArrayError

_READ_ONLY = re.compile(r"read-?only|WRITEABLE flag|not writ(?:e)?able", re.IGNORECASE)
"""What numpy and Cython's memoryviews say: assignment destination, output array, buffer source …"""


def explain(
    error: BaseException,
    name_of: Callable[[np.ndarray[Any, Any], str], str | None],
    traceback: TracebackType | None,
) -> ReadOnlyArrayError | None:
    """Return the error to show instead if `error` came of writing to an array of the notebook, else None.

    Parameters
    ----------
    name_of : callable
        Returns the notebook's name for the memory of an array that was delivered read-only, given the array
        and the variable that holds it.
    traceback : traceback or None
        Of `error`; the arrays that the innermost lines name are asked about first.
    """
    if isinstance(error, ReadOnlyArrayError) or not isinstance(error, ValueError):
        return None
    if not _READ_ONLY.search(str(error)):
        return None
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    for frame, line in reversed(frames):
        for variable, array in _read_only_arrays(frame, line):
            name = name_of(array, variable)
            if name is not None:
                return ReadOnlyArrayError(
                    f"{name!r} is the notebook's own memory, which ranks may only read ({error}); let all "
                    f"ranks write it with `--share {name}` on this cell or `%share {name}` in the notebook, "
                    f"or work on a copy of this rank's own: `{name} = {name}.copy()`"
                )
    return None


def _read_only_arrays(frame: FrameType, line: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the read-only arrays that the line which raised names, then the other variables of a function."""
    names: dict[str, None] = {}
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.positions is not None and instruction.positions.lineno == line:
            values = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            names.update(dict.fromkeys(value for value in values if isinstance(value, str)))
    variables = frame.f_locals
    if variables is not frame.f_globals:
        names.update(dict.fromkeys(variables))
    for name in names:
        value = variables.get(name, frame.f_globals.get(name))
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            yield name, value
