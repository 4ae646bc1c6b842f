"""The text of cells that defined functions travels with their code, so that every process can show it.

A cell is no file: only the process that compiled it has its lines, in `linecache`.  They stand in front of a
pickle stream and are no part of the value, which is the same when its cell has run again.
"""

from __future__ import annotations

import linecache
import pickle
import re
import struct
import sys
from collections.abc import Iterable

_HEADER = struct.Struct("<4sI")
_MAGIC = b"NBPS"
_labels: dict[str, str] = {}


def put_before(stream: memoryview, filenames: Iterable[str]) -> memoryview:
    """Return `stream` behind the cells among `filenames`; what is a file every process reads by itself."""
    found = []
    for filename in sorted(filenames):
        entry = linecache.cache.get(filename)
        if entry is not None and len(entry) == 4 and entry[1] is None:  # not lazy, and from no file
            found.append((filename, source_label(filename), "".join(entry[2])))
    if not found:
        return stream
    texts = pickle.dumps(found, 5)
    return memoryview(b"".join([_HEADER.pack(_MAGIC, len(texts)), texts, stream]))


def take_off(stream: memoryview) -> memoryview:
    """Remember the cells that stand before a stream, and return what is behind them."""
    if stream.nbytes < _HEADER.size or stream[:4] != _MAGIC:
        return stream
    _, length = _HEADER.unpack_from(stream)
    end = _HEADER.size + length
    for filename, label, text in pickle.loads(stream[_HEADER.size : end]):
        known = filename in linecache.cache
        if known and filename not in _labels:  # this process has compiled the cell itself
            continue
        _labels[filename] = label
        # without a time of change `linecache.checkcache` never drops it
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    return stream[end:]


def label_of(filename: str) -> str:
    """Return the ``In[n]`` of a cell that came from another process, or an empty string."""
    return _labels.get(filename, "")


def source_label(filename: str) -> str:
    """Return what tracebacks call a cell: ``In[3]``; an empty string for anything else."""
    if filename in _labels:
        return _labels[filename]
    ipython = sys.modules.get("IPython")  # a script need not have it
    get_ipython = getattr(ipython, "get_ipython", None)  # another thread may be half-way through the import
    shell = None if get_ipython is None else get_ipython()
    shown = shell.compile.format_code_name(filename) if shell is not None else None
    return shown[1] if shown else ""


def name_cells(traceback: str) -> str:
    """Return a traceback's text with cells as IPython names them: ``Cell In[3], line 4``."""

    def named(match: re.Match[str]) -> str:
        label = source_label(match[1])
        return f"Cell {label}, line" if label else match[0]

    return re.sub(r'File "([^"\n]+)", line', named, traceback)
