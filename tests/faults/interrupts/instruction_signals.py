"""Signals at given instructions of given files: for tests of an interrupt between any two steps.

Some facts about tracing (sys.settrace, PEP 669):

* events of instructions come only for frames that ask for them, by ``f_trace_opcodes``;
* CPython 3.12 makes them only where some frame wanted them before tracing begins;
* CPython 3.13 makes them of a frame that has its trace function already.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any


class InstructionSignals:
    """Sends a signal to this thread at instructions of some files; counts those that it passes.

    Parameters
    ----------
    files : collection of str
        Of the code whose instructions count, as ``__file__`` of its modules has them.
    number : int
        The signal's.
    at : int
        Instructions, counted from 1, at which it is sent; without any they are only counted.
    """

    def __init__(self, files: Collection[str | None], number: int, *at: int) -> None:
        self._files, self._number, self._at = files, number, at
        self.count = 0

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace = self._on_instruction
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._on_instruction

    def _on_instruction(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self.count += 1
            if self.count in self._at:
                signal.raise_signal(self._number)
        return self._on_instruction

    def run(self, function: Callable[[], object]) -> None:
        """Call `function`, with the signals; what their handlers raise is raised."""
        former = sys.gettrace()
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._on_call)
        try:
            function()
        finally:  # no context manager: contextlib may be among the files
            sys.settrace(former)
