"""Python's debugger on a rank, which reads commands from the notebook's user.

``breakpoint()`` opens it where it is called, ``%debug`` where the last cell failed (`FailureFrames`).

``set_trace()`` of pdb and of IPython is the same: their own would take an interrupt for a command, and the
end of the questions for the end of the program.

It stops at the line that called it (as Python 3.13 does; older ones stop at the next event, which behind a
cell's last statement is in the shell), and only in the user's code: the shell that runs a cell statement by
statement, and what is inside an operation, is stepped over.
"""

from __future__ import annotations

import bdb
import cmd
import code
import contextlib
import gc
import io
import os
import pdb
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import IPython.core.debugger
import numpy as np
from IPython.core.error import UsageError

import nbparallel
from nbparallel.errors import InputRefusedError
from nbparallel.errors.questions import traceback_of
from nbparallel.sharing.tensors import tensor_types
from nbparallel.transfer.cell_sources import label_of
from nbparallel.wire.messages import CELL_FILE, MOST_FRAME_NBYTES
from nbparallel.wire.units import size_text

_OURS = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (nbparallel, IPython))
INSIDE = tuple(str(module.__file__) for module in (bdb, pdb, cmd, code))
"""Files of the debugger itself: no part of a user's traceback."""


class Breakpoints:
    """Python's and IPython's breakpoints on a rank; `ask` is the rank's ``input``."""

    def __init__(self, ask: Callable[[str], str]) -> None:
        self._ask = ask
        self._used = False

    def install(self) -> None:
        """Replace Python's own hook, and `set_trace` of pdb and of IPython."""
        sys.breakpointhook = self.stop
        pdb.set_trace = IPython.core.debugger.set_trace = self.set_trace

    def stop(self, *args: Any, **options: Any) -> Any:
        """Start the debugger in the frame that called ``breakpoint()``.

        Raises
        ------
        InputRefusedError
            There is no user to ask, or several ranks are at a breakpoint at the same time.
        """
        if os.environ.get("PYTHONBREAKPOINT"):  # the user's own choice; "0" means none
            return sys.__breakpointhook__(*args, **options)
        return self.set_trace(sys._getframe(1), call="breakpoint()")

    def set_trace(
        self, frame: FrameType | None = None, *_: Any, call: str = "set_trace()", **_options: Any
    ) -> None:
        """Stop as `stop` does, for ``import pdb; pdb.set_trace()``; PYTHONBREAKPOINT may lead here."""
        frame = frame or sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        if frame is not None:
            self._used = True
            try:
                RankDebugger(self._ask).stop_in(frame)
            except InputRefusedError as error:
                raise InputRefusedError(f"{call} asks with input(): {error}") from None

    def end_task(self) -> None:
        """Stop tracing, so that stepping over the end of a cell does not stop in the next one."""
        if self._used:
            sys.settrace(None)
            self._used = False


class FailureFrames:
    """The frames of a rank's last failure, from its end to the next cell, for ``%debug`` and ``pdb.pm()``.

    `ask` is the rank's ``input``, `variables` the cell's.

    Attributes
    ----------
    failed_ns : int
        When it failed (`RankFailure.time_ns`); 0: nothing is known of a failure.
    nbytes : int
        What its frames keep alive that no variable does.
    """

    def __init__(self, ask: Callable[[str], str], variables: Mapping[str, Any]) -> None:
        self._ask, self._variables = ask, variables
        self._trace: TracebackType | None = None
        self.failed_ns = self.nbytes = 0
        self._missing = ""

    def install(self) -> None:
        """Replace Python's own ``post_mortem``, which ``pdb.pm()`` calls, too."""
        pdb.post_mortem = self.examine  # type: ignore[assignment]  # exceptions are for 3.13

    def keep(self, error: BaseException, failed_ns: int) -> None:
        """Keep the frames of a failure, unless they hold too much."""
        trace, self.failed_ns = traceback_of(error), failed_ns
        nbytes = _held_nbytes(error, trace, self._variables)
        if nbytes > MOST_FRAME_NBYTES:
            self._missing = (
                f"its frames held {size_text(nbytes)}, and at most {size_text(MOST_FRAME_NBYTES)} are kept: "
                "put breakpoint() into the cell, on one rank"
            )
        elif trace is not None:
            self._trace, self.nbytes = trace, nbytes
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
            sys.last_exc = error  # type: ignore[attr-defined]  # from 3.12 on

    def release_ours(self) -> None:
        """Clear the variables of the frames that called the user's: what ran the task has ended."""
        frame = None if self._trace is None else _last(self._trace).tb_frame
        while frame is not None:
            if frame.f_code.co_filename.startswith(_OURS):
                with contextlib.suppress(RuntimeError):  # it runs: the rank's loop
                    frame.clear()
            frame = frame.f_back

    def forget(self) -> None:
        """Drop them."""
        self._trace, self._missing, self.failed_ns, self.nbytes = None, "", 0, 0
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)

    def open(self, failed_ns: int) -> None:
        """Examine the failure of that time.

        Raises
        ------
        LookupError
            Its frames were not kept, with the reason.
        """
        if self._trace is None or failed_ns != self.failed_ns:
            known = self._missing if failed_ns == self.failed_ns else ""
            raise LookupError(
                known or "its frames are not there: a rank of %%parallel has those of its last cell"
            )
        self.examine(self._trace)

    def examine_last(self, force: bool = False) -> None:
        """Examine the last failure: IPython's ``%debug`` on a rank."""
        if force and self._trace is None:
            raise UsageError(f"%debug: {self._missing or 'this rank has no frames of a cell that failed'}")
        if force:
            self.examine(self._trace)

    def examine(self, failure: TracebackType | BaseException | None = None) -> None:
        """Ask for commands in the frames of a failure, as ``pdb.post_mortem``; of that handled, if None."""
        failure = sys.exception() if failure is None else failure
        trace = traceback_of(failure) if isinstance(failure, BaseException) else failure
        if trace is None:
            raise ValueError("there is no traceback to debug")
        RankDebugger(self._ask).examine(trace)


def _last(trace: TracebackType) -> TracebackType:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace


_OPAQUE = (ModuleType, FunctionType, type, FrameType, TracebackType)
"""What leads to whole modules, which live on."""
_CONTAINERS = (bytes, bytearray, str, list, tuple, dict, set, frozenset)
_COUNTING_SECONDS = 0.1
"""How long references are followed, from the frames on.  For each other one a small object is counted."""
_SMALL_NBYTES = 32


def _held_nbytes(error: BaseException, trace: TracebackType | None, variables: Mapping[str, Any]) -> int:
    """Return what the frames of an error keep alive that `variables` does not, about."""
    queue: deque[Any] = deque([error.args])
    while trace is not None:
        if trace.tb_frame.f_locals is not trace.tb_frame.f_globals:
            queue += trace.tb_frame.f_locals.values()
        trace = trace.tb_next
    seen, nbytes = {id(_owner(value)) for value in list(variables.values())}, 0
    end = time.monotonic() + _COUNTING_SECONDS
    while queue and time.monotonic() < end:
        value = _owner(queue.popleft())
        if id(value) in seen or issubclass(type(value), _OPAQUE):
            continue
        seen.add(id(value))
        if (own := _own_nbytes(value)) is not None:
            nbytes += own
            queue += gc.get_referents(value)
    return nbytes + _SMALL_NBYTES * len(queue)


def _own_nbytes(value: Any) -> int | None:
    """Return the bytes of an object without what it refers to; None: that is not to be followed."""
    kind = type(value)
    try:
        if str(kind.__module__).startswith("nbparallel"):
            return None
        if issubclass(kind, np.ndarray):  # a view with overlaps has less memory than its elements
            array: np.ndarray[Any, Any] = value.view(np.ndarray)
            spans = ((n - 1) * abs(step) for n, step in zip(array.shape, array.strides, strict=True))
            return int(min(array.nbytes, sum(spans) + array.itemsize))
        if issubclass(kind, (memoryview, *tensor_types())):
            return int(value.nbytes)
        return sys.getsizeof(value) if kind in _CONTAINERS else 0
    except Exception:  # noqa: BLE001  a class of the user's raises, or a view was released
        return None


def _owner(value: Any) -> Any:
    """Return the array that has the memory of an array."""
    while issubclass(type(value), np.ndarray) and issubclass(type(value.base), np.ndarray):
        value = value.base
    return value


_CELL = re.compile(rf"{CELL_FILE}(\d+)-\d+>")


class RankDebugger(pdb.Pdb):
    """The debugger of one ``breakpoint()`` or ``%debug``."""

    def __init__(self, ask: Callable[[str], str]) -> None:
        super().__init__(stdin=_Questions(ask), stdout=sys.stdout, nosigint=True, readrc=False)
        self.use_rawinput = False  # with it a refusal would be taken for the end of the commands
        self.prompt = ""  # it is part of the question
        self._task_files: set[str] = set()

    def stop_in(self, frame: FrameType) -> None:
        """Ask for commands in `frame`, and follow the program as they say."""
        self.reset()
        above: FrameType | None = frame
        while above is not None and not above.f_code.co_filename.startswith(_OURS):
            above.f_trace = self.trace_dispatch
            self.botframe = above
            self._task_files = {above.f_code.co_filename}  # a cell's, or a function's or script's
            above = above.f_back
        self.set_step()
        sys.settrace(self.trace_dispatch)
        try:
            self.interaction(frame, None)
        except BaseException:
            sys.settrace(None)
            raise
        if self.quitting:
            sys.settrace(None)
            raise bdb.BdbQuit("the debugger was left with q")

    def examine(self, trace: TracebackType) -> None:
        """Ask for commands in the frames of a failure, until the user leaves."""
        self.reset()
        self.interaction(None, trace)

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        """Return a frame's line, with the notebook's name of its cell."""
        entry, name = super().format_stack_entry(frame_lineno, lprefix), frame_lineno[0].f_code.co_filename
        return entry.replace(name, label_of(name) or _CELL.sub(r"In[\1]", name), 1)

    def do_run(self, arg: str) -> None:
        """Refuse to start the program again."""
        self.error("there is nothing to restart: run the cell again")

    do_restart = do_run

    def stop_here(self, frame: FrameType) -> bool:
        """Stop as the base class does, in the user's code only."""
        return self._is_users(frame) and bool(super().stop_here(frame))

    def _is_users(self, frame: FrameType) -> bool:
        """Whether a frame is the task's own, or called by one without library frames between."""
        above: FrameType | None = frame
        while above is not None and not above.f_code.co_filename.startswith(_OURS):
            if above.f_code.co_filename in self._task_files or above.f_code.co_filename.startswith(CELL_FILE):
                return True
            above = above.f_back
        return False

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        """Report a call, except the one by which the shell runs a cell's next statement."""
        if frame.f_code.co_name != "<module>":
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """Report a return, except at the end of a cell's statement."""
        if frame.f_code.co_name != "<module>":  # there the base class would leave a `__return__` behind
            super().user_return(frame, return_value)

    def _cmdloop(self) -> None:
        self.cmdloop()  # the base class would keep an interrupt from ending the cell


class _Questions(io.StringIO):
    """A file of debugger commands that come from the user's input."""

    def __init__(self, ask: Callable[[str], str]) -> None:
        super().__init__()
        self._ask = ask

    def readline(self, _size: int | None = -1, /) -> str:  # type: ignore[override]  # as StringIO has it
        try:
            return self._ask("(Pdb) ") + "\n"
        except InputRefusedError as error:
            if str(error).endswith(EOFError.__name__):  # a terminal's Ctrl-D
                return ""
            raise
