"""Of the stack of a crash only the user's part is shown, however its text comes in pieces."""

from __future__ import annotations

import pytest

from nbparallel.session.processes.crash_report import CrashFrames, stderr_excerpt

USERS = """\
before
Fatal Python error: Segmentation fault

Current thread 0x00007fe1757d3b80 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
"""
OURS = """\
  File "/lib/IPython/core/interactiveshell.py", line 3823 in run_code
  File "<string>", line 1 in <module>
"""
REST = "\nExtension modules: numpy.linalg (total: 1)\n"
REPORT = f'{USERS}  File "<ipython-input-33-14>", line 3 in <module>\n{OURS}{REST}'
SHOWN = f"{USERS}  File of the cell, line 3 in <module>\n{REST}"


@pytest.mark.parametrize("size", [1000, 64, 31])
def test_frames_below_the_cells_are_not_shown(size: int) -> None:
    """Nor halves of them."""
    frames = CrashFrames()
    begin = REPORT.index("\n") + 40
    pieces = [REPORT[:begin], *(REPORT[i : i + size] for i in range(begin, len(REPORT), size))]
    assert "".join(map(frames.feed, pieces)) == SHOWN


@pytest.mark.parametrize(
    "text", ["\rbar 10%", "Fatal Python error: x\n\rbar 10%", USERS + OURS, '  File "half', OURS + "text"]
)
def test_other_text_passes_as_it_comes(text: str) -> None:
    """A bar, a crash of another process, a traceback."""
    assert CrashFrames().feed(text) == text


def test_the_excerpt_ends_with_the_cell() -> None:
    """It knows the cell's line."""
    assert stderr_excerpt(REPORT) == (f"{USERS}  File of the cell, line 3 in <module>", 3)
    assert stderr_excerpt("a\nb\n") == ("a\nb", None)
