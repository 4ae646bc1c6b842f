"""Every exception that nbparallel raises on purpose.

Each derives from `NbParallelError` and from the builtin that a caller would catch anyway.  A message
states what happened, with the values, and what to do.  They are also attributes of `nbparallel` itself.
Standard library only: the supervisor imports it.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ContextDecorator
from types import MappingProxyType
from typing import Any, Self

from nbparallel.errors.text.escaping import encodable
from nbparallel.errors.text.rank_names import (
    grouped as grouped,
    label_of_rank as label_of_rank,
    labelled_ranks as labelled_ranks,
    rank_list as rank_list,
)

LEFT_OUT = "finished the cell without calling"
"""Stands between ranks and operation in the error about a call that they left out; the panel looks for it."""


def misspelt(name: str, module: str, known: Iterable[str]) -> AttributeError:
    """Return the error about a name that a module has not, with those that it resembles.

    >>> misspelt("sendd", "nbparallel.distributed", ["all_reduce", "send"])
    AttributeError("module 'nbparallel.distributed' has no attribute 'sendd'; did you mean 'send'?")
    """
    return AttributeError(f"module {module!r} has no attribute {name!r}{resembling(name, known)}", name=name)


def with_article(name: str) -> str:
    """Return a type's name behind its article.

    >>> with_article("odict_keys"), with_article("uint8"), with_article("Unit"), with_article("Unread")
    ('an odict_keys', 'a uint8', 'a Unit', 'an Unread')
    """
    return f"{'an' if re.match('(?i)[aeio]|un(?!i)', name) else 'a'} {name}"


def resembling(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'all_reduce'?``, or nothing if no known name is similar."""
    if name.startswith("_"):
        return ""  # Python itself asks for many of these
    import difflib  # an import of the package must be cheap

    near = difflib.get_close_matches(name, list(known), 2)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


RANKS_INTERRUPTED = "the ranks were interrupted"
"""Begin of the note on an error that the program's own code raised while it waited for ranks."""
NO_RANKS = "no ranks are running; the next %%parallel cell or Session.run starts them"
"""Message where running ranks are needed."""
STOPPED = "this session was stopped; make a new one"
"""Message of a session that cannot be used any more."""


class NbParallelError(Exception):
    """Base of all errors of nbparallel; what is passed by name becomes an attribute."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args)
        vars(self).update(attributes)

    def __str__(self) -> str:
        """Return the message, fit for every front end: a name of the user's may hold half a character."""
        return encodable(super().__str__())


class StartError(NbParallelError, RuntimeError):
    """Ranks or processes could not be started; the message holds the tail of the ranks' output."""


class RendezvousError(NbParallelError, RuntimeError):
    """Processes that called `init_process_group` formed no process group; the message has the reason."""


class ProtocolError(NbParallelError, RuntimeError):
    """A frame on a socket was damaged or unknown."""


class ChannelClosedError(NbParallelError, ConnectionError):
    """The other end of a socket is gone."""


class InternalError(NbParallelError, RuntimeError):
    """A state that should never occur was met: please file a bug."""


class ClosedError(NbParallelError, RuntimeError):
    """The session or object was closed before this call."""


class BusyError(NbParallelError, RuntimeError):
    """The ranks are running something else: wait for it, or interrupt it."""


class InputRefusedError(NbParallelError, EOFError):
    """A rank's ``input()`` cannot be answered; the message has the reason."""


class ForkedRankError(NbParallelError, RuntimeError):
    """An object of nbparallel was used in a forked child of the process that made it."""


class RankDiedError(NbParallelError, RuntimeError):
    """A rank's process ended.

    Attributes
    ----------
    rank, pid : int
    exit_code : int or None
        None if a signal ended it.
    signal_name : str or None
        ``"SIGKILL"`` and so on.
    line : int or None
        The line of the cell that it was in, counted as the gutter does.
    stderr : str
        The last lines it wrote to stderr.
    """

    rank: int = -1
    pid: int = 0
    exit_code: int | None = None
    signal_name: str | None = None
    line: int | None = None
    stderr: str = ""


class WorkerDiedError(NbParallelError, RuntimeError):
    """A worker of a pool ended, and with it what it did; the pool goes on.

    Attributes
    ----------
    pid : int
    exit_code : int or None
        None if a signal ended it.
    signal_name : str or None
        ``"SIGKILL"`` and so on.
    task : str
        What it did.
    """

    pid: int = 0
    exit_code: int | None = None
    signal_name: str | None = None
    task: str = ""


class SupervisorDiedError(NbParallelError, RuntimeError):
    """The supervisor's process ended, and with it every rank; the next cell starts new ones."""


class PeerFailedError(NbParallelError, RuntimeError):
    """Another rank failed while this one waited for it; `rank` is the one that failed."""

    rank: int = -1


class CollectiveMismatchError(NbParallelError, RuntimeError):
    """Ranks called different operations, or the same with different arguments."""


class DifferentDataError(NbParallelError, AssertionError):
    """`assert_same` found that ranks hold different data; the message names the ranks that differ, and where.

    Attributes
    ----------
    groups : tuple of tuple of int
        The ranks that hold the same, those with which the others were compared first.
    """

    groups: tuple[tuple[int, ...], ...] = ()


class DeadlockError(NbParallelError, RuntimeError):
    """Ranks wait for each other, or for one that will never answer."""


class CollectiveTimeoutError(NbParallelError, TimeoutError, RuntimeError):
    """A time-out that the caller asked for ran out; the message lists the missing ranks.

    It is a `RuntimeError` too: scripts for torch catch that.
    """


class CellTimeoutError(NbParallelError, TimeoutError):
    """The cell's ``--timeout`` ran out.

    Attributes
    ----------
    result : CellResult or None
        What there was.
    failures : Mapping[int, RankFailure]
        Where each rank was that had not finished.
    """

    result: Any = None
    failures: Mapping[int, Any] = MappingProxyType({})


IN_PLACE = "{} works in place, and this array is read-only: pass `x.copy()`, which is changed and returned"
"""Message about an array that an operation cannot change; takes the operation's name."""


LET_WRITE = "`%share x` or `x = nbp.share(x)` in the notebook"
"""How a notebook lets ranks write to an array; in messages."""
LET_WRITE_IN_A_SCRIPT = "`x = nbp.share(x)` where it was made"
"""The same where there are no magics."""


class ReadOnlyArrayError(NbParallelError, ValueError):
    """A rank was to write to an array that it may only read, such as one of the notebook."""


class ObjectArrayError(NbParallelError, TypeError):
    """An array of Python objects has no memory that could be shared."""


class NotAnArrayError(NbParallelError, TypeError):
    """Only a numpy array can lie in shared memory, and this is something else."""


class UnknownNameError(NbParallelError, NameError):
    """The notebook has no variable of that name."""


class UnpicklableError(NbParallelError, pickle.PicklingError, TypeError):
    """A value cannot travel between processes; the message names it."""


class StrategyUnavailableError(NbParallelError, OSError):
    """A sharing strategy does not work here; the message has the reason, and a strategy that works."""


class SharedMemoryFullError(NbParallelError, MemoryError):
    """There is not enough memory for a shared array: needed, free, where."""


class FileDescriptorLimitError(NbParallelError, OSError):
    """The limit of open files was reached (``ulimit -n``)."""


class SegmentLostError(NbParallelError, LookupError):
    """A shared array's memory is no longer there."""


class InvalidHandleError(NbParallelError, ValueError):
    """A handle of a shared array is damaged: it points outside its segment or makes no sense."""


class StaleWorkError(NbParallelError, RuntimeError):
    """A pending operation of an earlier epoch was used."""


class HostBoundaryError(NbParallelError, ValueError):
    """Something was asked for that works inside one host only; the message names what works instead."""


class HostLostError(NbParallelError, ConnectionError):
    """A host is gone, and its ranks with it; `host`, `ranks` and `reason` say which, and how it was seen."""

    host: str = ""
    ranks: tuple[int, ...] = ()
    reason: str = ""


class RankExitError(NbParallelError, RuntimeError):
    """A rank called ``sys.exit``; `code` is what it passed.  The rank lives."""

    code: Any = None


class RemoteError(NbParallelError, RuntimeError):
    """An exception of a rank that cannot be rebuilt here; its text and traceback are kept.

    Attributes
    ----------
    ename, evalue : str
        Name and message of the exception on the rank.
    """

    ename: str = ""
    evalue: str = ""


class ParallelError(NbParallelError, ExceptionGroup[Exception]):
    """One or more ranks failed in a cell.

    Attributes
    ----------
    errors : Mapping[int, Exception]
        One key for every rank that raised, the root cause's first.
    result : CellResult or None
        What there was.
    failures : Mapping[int, RankFailure]
        What each of these ranks reported: times, frames, tracebacks.  Not kept by pickle.
    rendering : tuple of str
        The parts of the traceback as a notebook shows it.
    """

    errors: Mapping[int, Exception]
    result: Any
    failures: Mapping[int, Any]
    rendering: tuple[str, ...]

    def __new__(
        cls,
        message: str,
        errors: Mapping[int, Exception] | Sequence[Exception],
        *,
        result: Any = None,
    ) -> Self:
        """Build from a mapping of rank to exception (a sequence when a part of a group is derived)."""
        values = list(errors.values()) if isinstance(errors, Mapping) else list(errors)
        self = super().__new__(cls, message, values)
        self.errors = dict(errors) if isinstance(errors, Mapping) else {}
        self.result = result
        self.failures, self.rendering = {}, ()
        return self

    def __init__(self, message: str, errors: Any, *, result: Any = None) -> None:
        super().__init__(message, errors)

    def add_note(self, note: str, /) -> None:
        """Add a line, which a notebook shows above the last one."""
        super().add_note(note)
        self.rendering = (*self.rendering[:-1], note, *self.rendering[-1:])

    def __str__(self) -> str:
        """Return the message alone: "(3 sub-exceptions)" behind it adds nothing."""
        return encodable(self.message)

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows instead of a traceback through our own frames."""
        return list(self.rendering) or [f"{type(self).__name__}: {self.message}"]

    def derive(self, excs: Sequence[Exception]) -> ParallelError:  # type: ignore[override]
        """Return a group of a part of the exceptions, with their ranks (PEP 654)."""
        part = {rank: error for rank, error in self.errors.items() if any(error is e for e in excs)}
        group = ParallelError(self.message, part if len(part) == len(excs) else excs, result=self.result)
        group.failures = {rank: self.failures[rank] for rank in part if rank in self.failures}
        return group

    def __reduce__(self) -> Any:
        return _rebuild_parallel_error, (self.message, dict(self.errors))


def _rebuild_parallel_error(message: str, errors: dict[int, Exception]) -> ParallelError:
    return ParallelError(message, errors)


class without_frames(ContextDecorator):  # noqa: N801 - a decorator, as contextlib names them
    """Lets an error that ranks or the session report out of a function without the frames of this package.

    What counts is on ranks, and its text says it: also in a log, which no notebook shortens.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, _trace: Any) -> None:
        interrupted = kind is KeyboardInterrupt and hasattr(error, "failures")
        if interrupted or (kind and issubclass(kind, (ParallelError, CellTimeoutError, BusyError))):
            error.__traceback__ = None  # the function's own frame goes, too: it is added no second time
