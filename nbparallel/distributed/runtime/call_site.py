"""Call site: the line of the cell that calls an operation, found at every call, and a call's text."""

from __future__ import annotations

import sys
from types import CodeType, FrameType


class CallSite:
    """Finds the line of one cell's code that is being executed.

    A frame knows its line only by counting through a table, which is linear in the length of the cell; so
    the answer is cached for each instruction of the code.
    """

    __slots__ = ("_filename", "_latest", "_lines_of")

    def __init__(self, filename: str = "") -> None:
        self._filename = filename
        self._latest: tuple[CodeType | None, dict[int, int]] = (None, {})
        self._lines_of: dict[int, tuple[CodeType, dict[int, int]]] = {}

    def line(self) -> int:
        """Return the line of the innermost frame of the cell above the caller's; 0 if there is none."""
        filename = self._filename
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code.co_filename == filename:
                # Code and lines in one variable: a handler or another thread may call this from other code.
                known = self._latest
                if known[0] is not code:
                    # by identity: two functions may be equal, and to find that out is slow
                    known = self._latest = self._lines_of.setdefault(id(code), (code, {}))
                lines, offset = known[1], frame.f_lasti
                line = lines.get(offset)
                if line is None:
                    line = lines[offset] = frame.f_lineno
                return line
            frame = frame.f_back
        return 0


def receive_text(name: str, src: int | None, tag: int) -> str:
    """Return the call of a receive: ``recv(src=1, tag=3)``, or ``recv()`` from any source."""
    arguments = [*([] if src is None else [f"src={src}"]), *([f"tag={tag}"] if tag else [])]
    return f"{name}({', '.join(arguments)})"
