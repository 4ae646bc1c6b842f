"""``breakpoint()`` on a rank: Python's debugger, which reads commands from the notebook's user.

``set_trace()`` of pdb and of IPython is the same: their own would take an interrupt for a command, and the
end of the questions for the end of the program.

It stops at the line that called it (as Python 3.13 does; older ones stop at the next event, which behind a
cell's last statement is in the shell), and only in the user's code: the shell that runs a cell statement by
statement, and what is inside an operation, is stepped over.
"""

from __future__ import annotations

import bdb
import cmd
import io
import os
import pdb
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import IPython.core.debugger

import nbparallel
from nbparallel.errors import InputRefusedError
from nbparallel.wire.messages import CELL_FILE

_OURS = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (nbparallel, IPython))
INSIDE = tuple(str(module.__file__) for module in (bdb, pdb, cmd))
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
        self._stop_in(sys._getframe(1), "breakpoint()")
        return None

    def set_trace(self, frame: FrameType | None = None, *_: Any, **_options: Any) -> None:
        """Stop as `stop` does, for ``import pdb; pdb.set_trace()``; PYTHONBREAKPOINT may lead here."""
        frame = frame or sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        if frame is not None:
            self._stop_in(frame, "set_trace()")

    def _stop_in(self, frame: FrameType, call: str) -> None:
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


class RankDebugger(pdb.Pdb):
    """The debugger of one ``breakpoint()``."""

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
        return self._ask("(Pdb) ") + "\n"
