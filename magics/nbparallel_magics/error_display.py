"""How errors look in a notebook: without the frames of nbparallel and of IPython."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from nbparallel.errors import (
    InternalError,
    NbParallelError,
    ParallelError,
    ProtocolError,
    grouped,
    rank_list,
)
from nbparallel_magics.arguments import RankSpec

if TYPE_CHECKING:  # loading the extension would take a third longer
    from nbparallel.wire.messages import RankFailure


class _CellSyntaxError(SyntaxError):
    """A cell for ranks that does not compile: shown as IPython shows that of any cell."""


class _CellIndentationError(IndentationError):
    """The same for its indentation."""


# nbclient, papermill and the notebook show the class's name: it is the builtin's, whichever module raises it
_CellSyntaxError.__name__ = _CellSyntaxError.__qualname__ = "SyntaxError"
_CellIndentationError.__name__ = _CellIndentationError.__qualname__ = "IndentationError"

_OURS = (ParallelError, _CellSyntaxError, _CellIndentationError)


def does_not_compile(error: SyntaxError) -> SyntaxError:
    """Return an equal error that is shown without a traceback."""
    kind = _CellIndentationError if isinstance(error, IndentationError) else _CellSyntaxError
    return kind(error.msg, (error.filename, error.lineno, error.offset, error.text))


def briefly(error: BaseException) -> BaseException:
    """Mark an error to be shown in one line, unless it is an internal error."""
    if not isinstance(error, (InternalError, ProtocolError)) and not hasattr(error, "_render_traceback_"):
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        error._render_traceback_ = lambda: text.splitlines()  # type: ignore[attr-defined]  # IPython's protocol
    error.__context__ = None
    return error


@contextmanager
def brief_errors() -> Iterator[None]:
    """Show errors of nbparallel and an interrupt in one line if they leave this block."""
    try:
        yield
    except (NbParallelError, KeyboardInterrupt) as error:
        raise briefly(error)  # noqa: B904 - it is the same error, only its rendering changes


_PACKAGES = tuple(
    os.path.dirname(str(sys.modules[name].__file__)) + os.sep
    for name in ("nbparallel", "nbparallel_magics", "IPython")
)


_DIRECT = "\nThe above exception was the direct cause of the following exception:\n"
_DURING = "\nDuring handling of the above exception, another exception occurred:\n"


def _follows_ours(error: BaseException | None) -> bool:
    """Return whether an error is a `ParallelError` or was raised while one was handled, shown or not."""
    seen: list[int] = []
    while error is not None and id(error) not in seen:
        if isinstance(error, ParallelError):
            return True
        seen.append(id(error))
        error = error.__context__
    return False


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error with those before it that are shown."""
    chain: list[BaseException] = []
    while error is not None and not any(error is each for each in chain):
        chain.append(error)
        further = error.__cause__
        error = error.__context__ if further is None and not error.__suppress_context__ else further
    return chain


def _user_part(trace: TracebackType | None) -> TracebackType | None:
    """Return the frames of a traceback that are neither ours nor IPython's."""
    kept = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_PACKAGES):
            kept.append(trace)
        trace = trace.tb_next
    for one, following in zip(kept, [*kept[1:], None], strict=True) if kept else ():
        one.tb_next = following
    return kept[0] if kept else None


def hide_our_frames(error: BaseException, shell: Any) -> None:
    """Have an error that the program itself raised while it waited here shown with its own frames only."""

    def render() -> list[str]:
        trace = _user_part(error.__traceback__)
        lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, trace, tb_offset=0)
        return lines

    error._render_traceback_ = render  # type: ignore[attr-defined]  # IPython's protocol


class ErrorRendering:
    """Shows our errors, in IPython's one slot for such handlers; handlers installed earlier still run.

    IPython prints exception groups as Python does and does not use `_render_traceback_` for them, also where
    one is in the chain of another error, in a script of ``%run`` or below a widget: a message to stderr, and
    no error for papermill.  And it shows a SyntaxError that a magic raises with every frame of the magic.
    """

    def __init__(self, shell: Any, debug: Callable[[Mapping[int, RankFailure]], None]) -> None:
        self._shell, self._debug_rank = shell, debug
        self._previous: tuple[type[BaseException], ...] = ()
        self._previous_handler: Any = None

    def install(self) -> None:
        """Register the handler."""
        self._previous = tuple(self._shell.custom_exceptions)
        self._previous_handler = getattr(self._shell, "CustomTB", None)
        self._shell.set_custom_exc((*_OURS, *self._previous), self._handle)
        self._installed = self._shell.CustomTB
        self._shell.debugger = self._debug
        self._shell.showtraceback = self._show

    def remove(self) -> None:
        """Release the slot, unless another handler has it now."""
        if self._shell.CustomTB is self._installed:
            self._shell.custom_exceptions = self._previous
            self._shell.CustomTB = self._previous_handler
        for name, ours in (("debugger", self._debug), ("showtraceback", self._show)):
            if self._shell.__dict__.get(name) == ours:
                delattr(self._shell, name)

    def _debug(self, force: bool = False) -> None:
        """Open ``%debug`` on the rank of the last error, if its frames are on ranks."""
        error = getattr(sys, "last_value", None)
        if failures := getattr(error, "failures", None):
            if force or self._shell.call_pdb:
                self._debug_rank(failures)
        elif not isinstance(error, _OURS):
            type(self._shell).debugger(self._shell, force)
        elif force:
            raise UsageError("%debug: the error was on ranks, and no code of the cell was running")

    def _show(self, exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        """Show an error that a `ParallelError` is a part of: that with its own text, the rest as IPython."""
        shell: Any = self._shell
        kind, error, _ = exc_tuple or sys.exc_info()
        handled = isinstance(error, (SyntaxError, UsageError)) or options.get("exception_only")
        if error is None or handled or not _follows_ours(error):
            former: Any = getattr(sys, "last_value", None)
            type(shell).showtraceback(shell, exc_tuple, *args, **options)
            if isinstance(error, UsageError) and hasattr(former, "failures"):  # %debug is still about that
                sys.last_type, sys.last_value, sys.last_traceback = type(former), former, former.__traceback__
            return
        chain = _chain(error)
        sys.last_type, sys.last_value, sys.last_traceback = kind, error, error.__traceback__
        lines: list[str] = []
        for each, following in zip(reversed(chain), [*reversed(chain[:-1]), None], strict=True):
            lines += self._lines_of(each)
            if following is not None:
                lines.append(_DIRECT if following.__cause__ is each else _DURING)
        shell._showtraceback(kind, error, lines)
        if shell.call_pdb:
            shell.debugger(force=True)

    def _lines_of(self, error: BaseException) -> list[str]:
        if isinstance(error, ParallelError):
            return list(error._render_traceback_())
        hidden = error.__cause__, error.__context__, error.__suppress_context__
        error.__cause__ = error.__context__ = None
        trace = _user_part(error.__traceback__)
        try:
            lines: list[str] = self._shell.InteractiveTB.structured_traceback(
                type(error), error, trace, tb_offset=0
            )
        except Exception:  # noqa: BLE001  what formats it fails at some code, as at `except*` of 3.11
            lines = traceback.format_exception(type(error), error, trace, chain=False)
        finally:
            error.__cause__, error.__context__, error.__suppress_context__ = hidden
        return lines

    def _handle(
        self,
        shell: Any,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
        tb_offset: int | None = None,
    ) -> list[str]:
        if not isinstance(error, _OURS):
            stb = self._previous_handler(kind, error, trace, tb_offset=tb_offset)
            return stb if isinstance(stb, list) else []
        # there is nothing for %debug here; the frames would keep the cell's arrays alive
        error.__traceback__ = None
        sys.last_type, sys.last_value, sys.last_traceback = kind, error, None
        if isinstance(error, SyntaxError):
            text = shell.SyntaxTB.structured_traceback(kind, error, [])
        else:
            text = error._render_traceback_()
        shell._showtraceback(kind, error, text)
        try:
            self._debug()  # with %pdb on
        except (
            UsageError,
            KeyboardInterrupt,
            NbParallelError,
        ) as refusal:  # IPython would remove this handler
            shell._showtraceback(type(refusal), refusal, [f"{type(refusal).__name__}: {refusal}"])
        return list(text)


def full_tracebacks(
    failures: Mapping[int, RankFailure], spec: RankSpec | None, world_size: int, parts: Mapping[str, range]
) -> str:
    """Return the whole tracebacks of the ranks that raised, or of those in `spec`; equal ones once."""
    from nbparallel.session.tasks.parallel_error import full_text

    if spec is not None:
        most = max(world_size, max(failures) + 1)  # some may have been taken away since
        chosen = spec.resolve(most, parts)
        if missing := [rank for rank in chosen if rank not in failures]:
            raise UsageError(f"{rank_list(missing)} raised nothing; {rank_list(failures)} did")
        failures = {rank: failures[rank] for rank in chosen}
    equal = grouped(("\n".join(full_text(failure)), rank) for rank, failure in failures.items())
    return "\n\n".join(f"[{rank_list(ranks)}]\n{text}" for text, ranks in equal.items())
