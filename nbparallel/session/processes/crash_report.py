"""What a rank's faulthandler writes when C code crashes: of it the user's part is shown."""

from __future__ import annotations

import re

from nbparallel.wire.messages import CELL_FILE

BEGIN = "Fatal Python error"
_FRAME = "  File "
_CELL_FRAME = re.compile(rf'"{CELL_FILE}\d+-\d+>", line (\d+)')


class CrashFrames:
    """Takes the frames below the cell's, the library's and IPython's, out of a rank's stderr."""

    def __init__(self) -> None:
        self._reports = self._below = False
        self._begun = ""

    def feed(self, text: str) -> str:
        """Return what to show of the next piece of text."""
        if not self._reports:
            before, begin, text = text.partition(BEGIN)
            if not begin:
                return before
            self._reports = True
            return before + self._lines(begin + text)
        return self._lines(text)

    def _lines(self, text: str) -> str:
        *lines, rest = (self._begun + text).split("\n")
        shown = [f"{cell_frame(line)[0]}\n" for line in lines if not self._is_below(line)]
        # the process may be another one's that goes on: only what can become a frame is held back
        self._begun = rest if rest and _FRAME.startswith(rest[: len(_FRAME)]) else ""
        return "".join(shown) + rest.removeprefix(self._begun)

    def _is_below(self, line: str) -> bool:
        below, self._below = self._below, line.startswith(_FRAME)
        if not self._below:
            return False
        self._below = below or cell_frame(line)[1] is not None
        return below


def cell_frame(line: str) -> tuple[str, int | None]:
    """Return a line of the report as a person knows the place, and its number if it is the cell's."""
    found = _CELL_FRAME.search(line)
    if found is None or not line.startswith(_FRAME):
        return line, None
    return _CELL_FRAME.sub(r"of the cell, line \1", line), int(found[1])


def stderr_excerpt(stderr: str) -> tuple[str, int | None]:
    """Return what is worth showing of a dead rank's stderr, and the cell's line if faulthandler names it.

    Of faulthandler's report that is the user's part of the stack: what called the cell is ours.
    """
    lines = stderr.strip().splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith(BEGIN)), None)
    if begin is None:
        return "\n".join(lines[-10:]), None
    shown = lines[max(0, begin - 5) : begin]
    for line in lines[begin:]:
        text, number = cell_frame(line)
        shown.append(text)
        if number is not None:
            return "\n".join(shown[:20]), number
    return "\n".join(shown[:20]), None
