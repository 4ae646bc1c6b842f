"""The notebook's cells that defined what a rank was sent, for tracebacks.

A function of the notebook keeps the file name that the kernel compiled it under.  No such file exists, so
the text goes where `traceback` and IPython look for it, and the ``In[n]`` is kept for IPython's headline.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable

from nbparallel.wire.names import CellSource

_labels: dict[str, str] = {}


def remember(sources: Iterable[CellSource]) -> None:
    """Keep the text of cells; that of a cell that ran again replaces the older one."""
    for source in sources:
        _labels[source.filename] = source.label
        lines = source.text.splitlines(keepends=True)
        # without a time of change `linecache.checkcache` never drops it
        linecache.cache[source.filename] = (len(source.text), None, lines, source.filename)


def label_of(filename: str) -> str:
    """Return the ``In[n]`` of a cell of the notebook, or an empty string."""
    return _labels.get(filename, "")
