"""What a rank says about an exception: enough to rebuild it, to show it, and to fold equal ones."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Cause(enum.StrEnum):
    """Why a rank failed; what is nobody else's fault can be the root cause of a cell's failure."""

    ERROR = "error"
    """User code raised, or one of our operations found a mistake."""
    DIED = "died"
    """The process ended."""
    EXIT = "exit"
    """``sys.exit`` was called."""
    PEER = "peer"
    """The rank waited for another one that failed: a consequence, never the root."""
    INTERRUPT = "interrupt"
    """The rank was interrupted: a consequence, never the root."""


@dataclass(frozen=True, slots=True)
class FrameLine:
    """One frame of user code, outermost first in a failure."""

    filename: str
    """``In[7]`` for a cell of the notebook, else the path of a file."""
    line: int
    """From 1, as the cell's gutter counts."""
    function: str
    """``<module>`` for the cell itself."""
    source: str
    """The line's text without its indentation, or an empty string."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """One rank's exception; two are equal when a person would call them the same, whatever the rank."""

    rank: int = field(compare=False)
    """Who failed."""
    time_ns: int = field(compare=False)
    """``time.monotonic_ns()`` when it was raised: one clock for all ranks of a machine."""
    ename: str
    """Name of the exception's class."""
    evalue: str
    """Its text."""
    exception: bytes | None = field(default=None, compare=False, repr=False)
    """The pickled exception; None if it cannot travel."""
    traceback: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """IPython's structured traceback, one string a part, the message last; may hold colour codes."""
    frames: tuple[FrameLine, ...] = ()
    """Frames of user code only, outermost first."""
    cause: Cause = Cause.ERROR
    """Why."""

    @property
    def line(self) -> int | None:
        """The line of the cell that ran: that of the outermost frame."""
        return self.frames[0].line if self.frames else None
