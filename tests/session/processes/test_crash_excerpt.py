"""Of the stack of a crash the error shows the user's part."""

from __future__ import annotations

from nbparallel.session.processes.rank_handle import stderr_excerpt

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


def test_the_excerpt_ends_with_the_cell() -> None:
    """It knows the cell's line."""
    assert stderr_excerpt(REPORT) == (f"{USERS}  File of the cell, line 3 in <module>", 3)
    assert stderr_excerpt("a\nb\n") == ("a\nb", None)
