"""Call site: the line of the cell that calls an operation, found at every call, and a call's text."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import warnings
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from nbparallel.transfer.cell_sources import source_label

_OURS = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")) + os.sep
"""The folder of the package."""
_OPERATIONS = os.path.join(_OURS, "distributed") + os.sep
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_ours(filename: str) -> bool:
    """Whether a file belongs to this package."""
    return filename.startswith(_OURS)


def is_library(filename: str) -> bool:
    """Whether a file belongs to the standard library or to an installed package.

    Of this environment or of one that it can import from too, such as the system's, or one that a ``.pth``
    file or ``PYTHONPATH`` names.
    """
    return filename.startswith(_STANDARD_LIBRARY) or any(folder in filename for folder in _INSTALLED)


def operation_runs() -> bool:
    """Whether an operation runs in any thread, other than the one that asks."""
    asking = threading.get_ident()
    for thread, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost
        while thread == asking and frame is not None and is_ours(frame.f_code.co_filename):
            frame = frame.f_back  # the operation that asks
        while frame is not None:
            if frame.f_code.co_filename.startswith(_OPERATIONS):
                return True
            frame = frame.f_back
    return False


def label_function(filename: str) -> Callable[[str], str | None]:
    """Return what names the files of the user's code, for the cell that is compiled as `filename`.

    It returns an empty string for the cell, ``In[2]`` for another one, the name of a file of the user's; None
    for a library's.
    """

    def label_of(name: str) -> str | None:
        if name == filename:
            return ""
        if label := source_label(name):
            return label
        if name.startswith("<") or is_ours(name) or is_library(os.path.abspath(name)):
            return None
        return os.path.basename(name)

    return label_of


class CallSite:
    """Finds the line of one cell's code that is being executed.

    A frame knows its line only by counting through a table, which is linear in the length of the cell; so
    the answer is cached for each instruction of the code.

    Parameters
    ----------
    filename : str
        ``co_filename`` of the code.
    label : str
        What messages call that file; empty for the cell that runs.
    """

    filename: str
    label: str

    __slots__ = ("_latest", "_lines_of", "entered", "filename", "label")

    def __init__(self, filename: str = "", label: str = "") -> None:
        self.filename, self.label = filename, label
        self.entered: Callable[[FrameType], object] = id
        """Called with a frame whose code is another than that of the call before."""
        self._latest: tuple[CodeType | None, dict[int, int]] = (None, {})
        self._lines_of: dict[int, tuple[CodeType, dict[int, int]]] = {}

    def line(self) -> int:
        """Return the line of the innermost frame of the cell above the caller's; 0 if there is none."""
        filename = self.filename
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code.co_filename == filename:
                # Code and lines in one variable: a handler or another thread may call this from other code.
                known = self._latest
                if known[0] is not code:
                    # by identity: two functions may be equal, and to find that out is slow
                    known = self._latest = self._lines_of.setdefault(id(code), (code, {}))
                    self.entered(frame)
                lines, offset = known[1], frame.f_lasti
                line = lines.get(offset)
                if line is None:
                    line = lines[offset] = frame.f_lineno
                return line
            frame = frame.f_back
        return 0

    def name(self, line: int) -> str:
        """Return ``3``, or ``3 of steps.py`` in another file than the cell's; nothing for 0."""
        if not line:
            return ""
        return f"{line} of {self.label}" if self.label else str(line)

    def place(self, line: int) -> str:
        """Return `` on line 3``, `` on line 3 of steps.py``; nothing for 0."""
        return f" on line {self.name(line)}" if line else ""

    def since(self, line: int) -> str:
        """Return `` since line 3``, for what began there; nothing for 0."""
        return f" since line {self.name(line)}" if line else ""


def receive_text(name: str, src: int | None, tag: int) -> str:
    """Return the call of a receive: ``recv(src=1, tag=3)``, or ``recv()`` from any source."""
    arguments = [*([] if src is None else [f"src={src}"]), *([f"tag={tag}"] if tag else [])]
    return f"{name}({', '.join(arguments)})"


def show_warnings_at_callers() -> None:
    """Have a warning about a line of this package show the line of the code that called it: ``In[3]:2``.

    numpy warns about the line that computes, which is one of ours inside an operation.  To be called once in
    a process.
    """
    module: Any = warnings
    show = module._showwarnmsg  # what the interpreter calls for each warning that the filters let through

    def show_at_caller(message: warnings.WarningMessage) -> None:
        frame: FrameType | None = sys._getframe(1)
        if not is_ours(message.filename):
            if label := source_label(message.filename):
                message.line = linecache.getline(message.filename, message.lineno).strip() or None
                message.filename = label
            return show(message)  # type: ignore[no-any-return]  # None
        while frame is not None and is_ours(frame.f_code.co_filename):
            # "once for each line" counts lines of the user's
            frame.f_globals.get("__warningregistry__", {}).clear()
            frame = frame.f_back
        if frame is None:
            return show(message)  # type: ignore[no-any-return]
        names = frame.f_globals
        # as `warn` does: without the names themselves, in which CPython 3.13 wants a loader
        return warnings.warn_explicit(
            message.message,
            message.category,
            frame.f_code.co_filename,
            frame.f_lineno,
            names.get("__name__", "<string>"),
            names.setdefault("__warningregistry__", {}),
            source=message.source,
        )

    module._showwarnmsg = show_at_caller
