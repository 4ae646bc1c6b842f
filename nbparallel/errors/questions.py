"""Questions to a user's error whose own code may raise anything: its text, its class's name, its frames.

Standard library only, and cheap to import, as all of `nbparallel.errors`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

_T = TypeVar("_T")
_CLASS_NAME: Any = type.__dict__["__name__"]
TRACEBACK: Any = BaseException.__dict__["__traceback__"]
"""Reads and sets it, whatever the error's class makes of that name."""
CAUSE: Any = BaseException.__dict__["__cause__"]


def ask(question: Callable[[], _T], otherwise: Callable[[], _T]) -> _T:
    """Return what `question` finds out about a user's error; what `otherwise` does if that raises.

    The error's class may define ``__str__``, ``__getattr__``, ``__class__``, ``__cause__`` …, which may raise
    anything.  An interrupt is lost in it, which the notebook sends again as long as the cell runs.
    """
    try:
        return question()
    except BaseException:  # noqa: BLE001  also KeyboardInterrupt and SystemExit of the error's own code
        return otherwise()


def class_name(error: BaseException) -> str:
    """Return the name of an error's class; no code of the class or of its metaclass runs."""
    name: str = _CLASS_NAME.__get__(type(error))
    return name


def text_of(error: BaseException) -> str:
    """Return an error's text; that it is not available where the error's own code raises."""
    try:
        return str.__str__(str(error))  # `__str__` may return an object of the user's own class
    except BaseException as second:  # noqa: BLE001  also KeyboardInterrupt and SystemExit
        return f"<its text is not available: {class_name(second)}>"


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return an error's traceback; no code of its class runs."""
    trace: TracebackType | None = TRACEBACK.__get__(error)
    return trace
