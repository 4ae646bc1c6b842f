"""Conversion of a rank's exception into a message that the kernel can fold, show and raise."""

from __future__ import annotations

import inspect
import itertools
import linecache
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from types import CodeType, FrameType, TracebackType
from typing import Any

import IPython
import numpy as np

import nbparallel
from nbparallel.engine import debugger
from nbparallel.engine.interrupts import IMPORT_SYSTEM
from nbparallel.engine.namespace import RankNames
from nbparallel.engine.rank_state import RankState
from nbparallel.engine.shell import RankShell
from nbparallel.errors import (
    LET_WRITE,
    LET_WRITE_IN_A_SCRIPT,
    PeerFailedError,
    RankExitError,
    ReadOnlyArrayError,
    resembling,
)
from nbparallel.errors.questions import TRACEBACK, ask, class_name, text_of, traceback_of
from nbparallel.errors.text.escaping import encodable
from nbparallel.transfer.pickling import dump_error
from nbparallel.wire.messages import Cause, FrameLine, RankFailure

_OURS = (
    *(os.path.dirname(str(module.__file__)) + os.sep for module in (nbparallel, IPython)),
    *debugger.INSIDE,
)
_DEEPEST = 200
"""Frames kept of a runaway recursion."""
_MOST_PARTS = 1000
"""Errors of a group that are counted: groups of groups may have millions."""
_SHOWN_PARTS = 10
"""Errors of a group that are shown."""


def improve(error: BaseException, state: RankState, *, follows_names: bool = True) -> BaseException:
    """Return the exception that the user should see instead of `error`.

    `follows_names` is false for a cell that was run without a namespace: it has none of its caller's names.
    """
    if isinstance(error, SystemExit):
        code = error.code
        shown_code = "" if code is None else repr(code)
        return RankExitError(
            f"sys.exit({shown_code}) was called; the rank is still running", code=code
        ).with_traceback(traceback_of(error))
    if isinstance(error, KeyboardInterrupt) and not state.interrupts.raised:
        error.args = (" ".join(filter(None, [text_of(error), OWN_INTERRUPT])),)
        error._nbparallel_own = True  # type: ignore[attr-defined]  # the rank failed by itself
    if isinstance(error, NameError) and str(error) == f"name {error.name!r} is not defined":
        advice = _advice(str(error.name), state)
        if not advice and (file := _file_of_cell(traceback_of(error), state)):
            kind = _NO_NAMES if not follows_names else _OF_FILES if file == "<string>" else ""
            advice = kind.format(name=error.name)
        error.args = (f"{error}{advice}",)
    if isinstance(error, IPython.core.error.UsageError) and "magic function" in str(error):
        error.args = (f"{error} {_OWN_MAGICS}",)
    if isinstance(error, ValueError | TypeError) or type(error).__module__.startswith(("cv2", "numba.")):
        better = explain_read_only(error, state.names, traceback_of(error), magics=state.configure.magics)
        if better is not None:
            better.__cause__ = None
            better.__suppress_context__ = True
            shown: BaseException = better.with_traceback(traceback_of(error))
            return shown
    return error


_IMPORTS = {
    "rank": "from nbparallel.distributed import get_rank; rank = get_rank()",
    "world_size": "from nbparallel.distributed import get_world_size; world_size = get_world_size()",
    "rng": "import numpy; rng = numpy.random.default_rng()",
    "dist": "import nbparallel.distributed as dist",
    "nbp": "import nbparallel as nbp",
}
"""What gives a function that is sent the names of cells; the others are operations."""


def _advice(name: str, state: RankState) -> str:
    """Return what to write for a name that the code did not find."""
    if name not in state.defaults.values:
        if name in state.defaults.values["dist"].__all__:
            return f"; did you mean `dist.{name}`?"
        return resembling(name, state.defaults.values)
    if name not in state.variables:
        return ""  # the cell has deleted it
    how = _IMPORTS.get(name, f"from nbparallel.distributed import {name}")
    return f"; it is predefined in cells, not in a function that is sent to ranks: write `{how}` in it"


def _file_of_cell(traceback: TracebackType | None, state: RankState) -> str:
    """Return the innermost frame's file if it looks names up among the rank's variables, as a cell does."""
    last = None
    while traceback is not None:
        last, traceback = traceback.tb_frame, traceback.tb_next
    return last.f_code.co_filename if last is not None and last.f_globals is state.variables else ""


_NO_NAMES = (
    "; a session's ranks do not see your variables: `run(…, namespace=globals())` lets this cell use them, "
    "`push({name}={name})` of the session assigns this one on every rank"
)
"""What to write in a script: README shows `Session.run` beside cells, which see the notebook's variables."""
_OF_FILES = "; if the notebook has it, name it in the cell: what only a file uses is not sent to ranks"
"""What to write beside ``exec(open(path).read())``."""
_OWN_MAGICS = (
    "Ranks have IPython's magics, not what the notebook has added: load its extension (%load_ext), or define "
    "it, in a cell for ranks."
)
OWN_INTERRUPT = "(raised by this rank's own code: the rank was not interrupted)"


def describe(error: BaseException, state: RankState) -> RankFailure:
    """Return a description of `error` that needs no object of this process.

    Where the error's own code raises, it is the class's name and the frames.
    """
    when = time.monotonic_ns()
    return ask(lambda: _describe(error, state, when), lambda: _describe_plainly(error, state, when))


def _describe_plainly(error: BaseException, state: RankState, when: int) -> RankFailure:
    interrupted = issubclass(type(error), KeyboardInterrupt) and state.interrupts.raised
    return RankFailure(
        rank=state.rank,
        time_ns=when,
        ename=encodable(class_name(error)),
        evalue=encodable(text_of(error)),
        exception=None,
        traceback=(),  # the kernel makes one of the frames
        frames=_frames(_user_part(traceback_of(error)), state.shell),
        cause=Cause.INTERRUPT if interrupted else Cause.ERROR,
    )


def _describe(error: BaseException, state: RankState, when: int) -> RankFailure:
    _leave_out_ours(error)
    trace = traceback_of(error)
    notes, inside = _notes(error), _parts_text(error, state.shell)
    lines = state.shell.lines_of(error)
    above = lines[: -1 - len(notes)]  # IPython has a part for the message, then one for each note
    last = "\n".join(lines[len(above) :])
    return RankFailure(
        rank=state.rank,
        time_ns=when,
        ename=encodable(class_name(error)),
        evalue=encodable("\n".join([text_of(error), *notes]) + inside),
        exception=pickled(error, state),
        traceback=tuple(map(encodable, (*above, last + inside))),
        frames=_frames(trace, state.shell),
        cause=_cause(error),
    )


def shown_text(error: BaseException, shell: RankShell) -> str:
    """Return what is shown of an error that does not end the cell: its traceback, without our frames."""

    def whole() -> str:
        _leave_out_ours(error)
        return "\n".join(shell.lines_of(error)) + _parts_text(error, shell)

    return encodable(ask(whole, lambda: f"{class_name(error)}: {text_of(error)}"))


def _notes(error: BaseException) -> list[str]:
    """Return what `add_note` has added to an error, if it is as `add_note` leaves it."""
    notes = getattr(error, "__notes__", None)
    return notes if isinstance(notes, list) and all(isinstance(note, str) for note in notes) else []


def _parts(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in a group, and in groups inside of it."""
    for part in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield from _parts(part) if isinstance(part, BaseExceptionGroup) else (part,)


def _parts_text(error: BaseException, shell: RankShell) -> str:
    """Return a line for each error in a group, of which IPython shows the number only."""
    lines, parts = [], list(itertools.islice(_parts(error), _MOST_PARTS))
    for part in parts[:_SHOWN_PARTS]:
        frames = _frames(traceback_of(part), shell)
        place = f" (line {frames[-1].line} of {frames[-1].filename})" if frames else ""
        lines.append(f"\n  {class_name(part)}: {text_of(part)}{place}")
    more = f"\n  … and {len(parts) - _SHOWN_PARTS} more" if len(parts) > _SHOWN_PARTS else ""
    return "".join(lines) + more


def _cause(error: BaseException) -> Cause:
    if isinstance(error, KeyboardInterrupt) and not hasattr(error, "_nbparallel_own"):
        return Cause.INTERRUPT
    if causes := {_cause(part) for part in itertools.islice(_parts(error), _MOST_PARTS)}:
        return causes.pop() if len(causes) == 1 else Cause.ERROR
    if isinstance(error, PeerFailedError):
        return Cause.PEER
    if isinstance(error, RankExitError):
        return Cause.EXIT
    return Cause.ERROR


def pickled(error: BaseException, state: RankState) -> bytes | None:
    """Return the exception by value, or None if it would not arrive as what it is."""
    return ask(lambda: dump_error(error, state.variables), lambda: None)


def _user_part(trace: TracebackType | None, *, into_imports: bool = True) -> TracebackType | None:
    """Return the frames of the user's code and of other libraries: without ours, wherever they stand.

    `into_imports` is false for an interrupt: where in an import it was says nothing, and the sources of such
    frames take seconds.
    """
    kept = []
    while trace is not None and (into_imports or not _is_imported(trace.tb_frame)):
        if not trace.tb_frame.f_code.co_filename.startswith(_OURS):
            kept.append(trace)
        trace = trace.tb_next
    for frame, following in zip(kept, [*kept[1:], None], strict=True) if kept else ():
        frame.tb_next = following
    return kept[0] if kept else None


def _is_imported(frame: FrameType) -> bool:
    """Return whether a frame is a module's that an import ran, whose own frames Python leaves out."""
    return frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(IMPORT_SYSTEM)


def _leave_out_ours(error: BaseException) -> None:
    """Take our frames out of the tracebacks of an error, of what caused it, and of a group's parts."""
    queue: list[BaseException | None] = [error]
    seen: set[int] = set()
    while queue:
        each = queue.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        TRACEBACK.__set__(
            each, _user_part(traceback_of(each), into_imports=not issubclass(type(each), KeyboardInterrupt))
        )
        queue += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            queue += each.exceptions


def _frames(trace: TracebackType | None, shell: RankShell) -> tuple[FrameLine, ...]:
    frames: list[FrameLine] = []
    while trace is not None and len(frames) < _DEEPEST:
        code = trace.tb_frame.f_code
        shown = shell.compile.format_code_name(code.co_filename)
        filename = f"{shown[0]} {shown[1]}".replace("Cell ", "") if shown else code.co_filename
        source = encodable(linecache.getline(code.co_filename, trace.tb_lineno).strip())
        if frames and _is_class_body(code) and frames[-1].filename == encodable(filename):
            # it runs where it stands: the line is the fault's, not that of ``class``
            frames[-1] = replace(frames[-1], line=trace.tb_lineno, source=source)
        else:
            frames.append(FrameLine(encodable(filename), trace.tb_lineno, encodable(code.co_name), source))
        trace = trace.tb_next
    return tuple(frames)


def _is_class_body(code: CodeType) -> bool:
    return not code.co_flags & inspect.CO_OPTIMIZED and code.co_name != "<module>"


_READ_ONLY = re.compile(r"read-?only|WRITEABLE flag|not writ(?:e)?able", re.IGNORECASE)
"""What numpy and Cython's memoryviews say: assignment destination, output array, buffer source …"""
_READ_ONLY_ELSEWHERE = re.compile(
    r"read-only memory|read-write bytes-like|marked as readonly|readonly array|buffer is not writable"
)
"""What memoryviews, files, sockets, `struct`, `ctypes`, cv2 and numba say, in errors of their own."""
_CODE, _X = re.compile("`[^`]*`"), re.compile(r"\bx\b")


def explain_read_only(
    error: BaseException, names: RankNames, traceback: TracebackType | None, *, magics: bool
) -> ReadOnlyArrayError | None:
    """Return the error to show instead if `error` came of writing to an array of the notebook, else None.

    One of an operation says itself what to write; its `x` becomes the notebook's name of the array.

    Parameters
    ----------
    names : RankNames
        Finds the notebook's name for the memory of an array that was delivered read-only.
    traceback : traceback or None
        Of `error`; the arrays that the innermost lines name are asked about first.
    magics : bool
        Whether to advise them.
    """
    pattern = _READ_ONLY if isinstance(error, ValueError) else _READ_ONLY_ELSEWHERE
    said = next((line.strip(" >-") for line in text_of(error).splitlines() if pattern.search(line)), None)
    if said is None:
        return None
    advises = isinstance(error, ReadOnlyArrayError)
    text = str(error) if magics else str(error).replace(LET_WRITE, LET_WRITE_IN_A_SCRIPT)
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno, traceback.tb_lasti))
        traceback = traceback.tb_next
    for frame, line, offset in reversed(frames):
        for variable, array in _read_only_arrays(frame, line, offset, output=str(error).startswith("output")):
            name = names.name_of(array, variable, whole=advises)
            if name is not None and advises:
                return ReadOnlyArrayError(_naming(text, name))
            if name is not None:
                owner = "the notebook's own memory"
                way = f"`--share {name}` on this cell or `%share {name}` in the notebook"
                if not magics:
                    owner = "memory of the program that started the ranks"
                    way = f"`{name} = nbp.share({name})` there"
                return ReadOnlyArrayError(
                    f"{name!r} is {owner}, which ranks may only read ({said}); let all ranks write it with "
                    f"{way}, or work on a copy of this rank's own: `{name} = {name}.copy()`"
                )
    return ReadOnlyArrayError(text) if text != str(error) else None


def _naming(advice: str, name: str) -> str:
    """Return advice with a variable's name for the ``x`` in its code."""
    return _CODE.sub(lambda code: _X.sub(name, code[0]), advice)


def _read_only_arrays(
    frame: FrameType, line: int, offset: int, *, output: bool
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the read-only arrays that the expression which raised names, those of its line, then the rest.

    Of ``a[0] = b.sum()`` the expression that raised is ``a[0]``: `b` may be read-only, too.  A function's
    `output` is its last argument.
    """
    variables = frame.f_locals
    names = dict.fromkeys(_named(frame.f_code, line, offset, output=output))
    if variables is not frame.f_globals:
        names.update(dict.fromkeys(variables))
    for name in names:
        value = variables.get(name, frame.f_globals.get(name))
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            yield name, value


def _named(code: CodeType, line: int, offset: int, *, output: bool) -> list[str]:
    """Return what is named in the expression of the instruction at `offset`, then on the rest of `line`."""
    first, last, start, end = list(code.co_positions())[offset // 2]
    if first is None or last is None or start is None or end is None:  # as with -X no_debug_ranges
        first, last, start, end = line, line, 0, 0
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
    if not any(lines):
        return [*code.co_names, *code.co_varnames]
    text = b"".join(lines)
    end += len(text) - len(lines[-1])
    parts = text[start:end], text[:start], text[end:]
    inside, *beside = (re.findall(r"[^\W\d]\w*", part.decode(errors="replace")) for part in parts)
    if output and b"=" not in parts[0].partition(b"(")[0]:  # `x += y` is no call
        inside.reverse()
    return [*inside, *itertools.chain(*beside)]
