"""Finding the cells that the notebook's functions were defined in."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable

from nbparallel.wire.names import CellSource


def cell_sources(filenames: Iterable[str]) -> tuple[CellSource, ...]:
    """Return the cells behind those of `filenames` that are no files: a rank can read the others itself."""
    found = []
    for filename in sorted(filenames):
        entry = linecache.cache.get(filename)
        if entry is not None and len(entry) == 4 and entry[1] is None:  # not lazy, and from no file
            found.append(CellSource(filename, _label(filename), "".join(entry[2])))
    return tuple(found)


def _label(filename: str) -> str:
    """Return what the notebook's own tracebacks call the cell: ``In[3]``."""
    ipython = sys.modules.get("IPython")  # a script need not have it
    shell = ipython.get_ipython() if ipython is not None else None
    shown = shell.compile.format_code_name(filename) if shell is not None else None
    return shown[1] if shown else ""
