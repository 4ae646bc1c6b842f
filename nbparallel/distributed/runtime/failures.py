"""Failure records: how an error becomes the record that a failed rank leaves, and a record an error again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nbparallel.distributed.runtime.call_site import CallSite
from nbparallel.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlockError,
    NbParallelError,
    PeerFailedError,
    rank_list,
)
from nbparallel.errors.questions import ask, class_name, text_of, traceback_of
from nbparallel.wire.control import ControlView, DeathRecord, FailureKind, FailureRecord
from nbparallel.wire.system import signal_of

_KINDS = {
    CollectiveMismatchError: FailureKind.MISMATCH,
    DeadlockError: FailureKind.DEADLOCK,
    CollectiveTimeoutError: FailureKind.OPERATION,
}
"""Of errors whose text is the whole message."""
MOST_HANDLERS = 100
"""How often a step is repeated: what raises more often is no handler, but the step itself."""
_HEAP_TYPE = 1 << 9
"""Flag of classes that were made by a ``class`` statement (Py_TPFLAGS_HEAPTYPE)."""


def repeat_until_done(step: Callable[[], None]) -> None:
    """Call `step`, which can be repeated, again whenever a signal handler raises in it; then raise that.

    An interrupt is not raised: the notebook sends it again as long as the cell runs.
    """
    raised: BaseException | None = None
    left = MOST_HANDLERS
    while left:
        try:
            step()
            break
        except KeyboardInterrupt:
            continue
        except BaseException as error:  # noqa: BLE001  any class: the handler is the user's
            raised, left = error, left - 1
    if raised is not None:
        try:
            raise raised
        finally:
            del raised  # its frames refer to it


def line_of(error: BaseException, filename: str) -> int:
    """Return the innermost line of the cell that `error` passed; 0 if it passed none."""
    line = 0
    trace = traceback_of(error)
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == filename:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def describe(
    error: BaseException, rank: int, site: CallSite, *, in_operation: bool
) -> tuple[FailureKind, int, str]:
    """Return (kind, origin, message) of the record that `rank` leaves for `error`."""
    line = line_of(error, site.filename)
    kind = FailureKind.OPERATION if in_operation else FailureKind.EXCEPTION
    plain = kind, rank, f"{class_name(error)}{site.place(line)}: {text_of(error)}"
    return ask(lambda: _known_kind(error, rank) or plain, lambda: plain)


def _known_kind(error: BaseException, rank: int) -> tuple[FailureKind, int, str] | None:
    """Return the record of an error that has a kind of its own, else None."""
    if isinstance(error, KeyboardInterrupt) and not hasattr(error, "_nbparallel_own"):
        return FailureKind.INTERRUPTED, rank, "interrupted"
    if isinstance(error, PeerFailedError):
        return FailureKind.PEER, error.rank, str(error)
    kinds = [kind for named, kind in _KINDS.items() if isinstance(error, named)]
    return (kinds[0], rank, str(error)) if kinds else None


def without_frames(error: BaseException, rank: int) -> BaseException:
    """Return an error with the same message that keeps no frame alive, for `RankContext.refuse`."""
    text = text_of(error) or class_name(error)
    return ask(lambda: _copy(error, text, rank), lambda: PeerFailedError(text, rank=rank))


def _copy(error: BaseException, text: str, rank: int) -> BaseException:
    known = issubclass(type(error), NbParallelError) and not issubclass(type(error), BaseExceptionGroup)
    kind: Any = type(error) if known else PeerFailedError
    builtin: Any = kind
    while builtin.__flags__ & _HEAP_TYPE:
        builtin = builtin.__base__
    # Without `__init__`, which may want more than a text; `__new__` of the builtin class that lays out the
    # objects, because the one that is inherited first need not fit: NbParallelError comes before MemoryError.
    copy: BaseException = builtin.__new__(kind, text)
    builtin.__init__(copy, text)  # an OSError takes its text only there
    vars(copy)["rank"] = getattr(error, "rank", rank)
    return copy


def error_of_failure(record: FailureRecord) -> NbParallelError:
    """Return the error of a rank that waits while another one has failed."""
    if record.kind is FailureKind.MISMATCH:
        return CollectiveMismatchError(record.message)
    if record.kind is FailureKind.DEADLOCK:
        return DeadlockError(record.message)
    if record.kind is FailureKind.PEER:
        return PeerFailedError(record.message, rank=record.origin)
    if record.kind is FailureKind.INTERRUPTED:
        return PeerFailedError(f"{rank_list([record.rank])} was interrupted", rank=record.rank)
    return PeerFailedError(f"{rank_list([record.rank])} failed: {record.message}", rank=record.rank)


def error_of_death(record: DeathRecord) -> PeerFailedError:
    """Return the error of a rank that waits while another one's process has exited."""
    if name := signal_of(record.code):
        how = f"was killed by {name}"
    else:
        how = "ended" if record.code is None else f"ended (exit code {record.code})"
    return PeerFailedError(f"{rank_list([record.rank])} died: its process {how}", rank=record.rank)


def first_failure(view: ControlView, ranks: Iterable[int]) -> NbParallelError | None:
    """Return the error for what went wrong first on any of `ranks`, None if nothing did."""
    found: list[tuple[bool, int, NbParallelError]] = []
    for rank in ranks:
        record = view.read_failure(rank)
        if record is not None:
            found.append((record.kind is FailureKind.PEER, record.ns, error_of_failure(record)))
        death = view.read_death(rank)
        if death is not None:
            found.append((False, death.ns, error_of_death(death)))
    # A failure that only followed another one comes last, whatever the clock says.
    return min(found, key=lambda entry: entry[:2])[2] if found else None
