"""Log files for the output of a cell beyond what a notebook should hold."""

from __future__ import annotations

import base64
import contextlib
import json
import mimetypes
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable
from typing import Any

from nbparallel.wire.units import size_text
from nbparallel_magics.output.layout import Item, Rich, Text

PREFIX = "nbparallel-output-"


class LogFolder:
    """A temporary folder of log files, written by this process and readable by this user alone.

    Like any program's, it stays where a signal kills the process.
    """

    def __init__(self) -> None:
        self._path = ""
        self._removed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def new_log(self) -> str:
        """Return the path of a new empty file; `OSError` if there is no place for one."""
        with self._lock:
            if self._removed:
                raise FileNotFoundError("the extension was unloaded")
            if not os.path.isdir(self._path):  # not made yet, or removed by a clean-up of temporary files
                self._path = tempfile.mkdtemp(prefix=PREFIX)
            fd, path = tempfile.mkstemp(".log", "output-", self._path)
        os.close(fd)
        return path

    def remove(self) -> None:
        """Remove the folder and its files (idempotent); a forked child removes nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            path, self._path, self._removed = self._path, "", True
        if path:
            shutil.rmtree(path, ignore_errors=True)


LARGEST_LOG = 1_000_000_000
"""Bytes; a cell that prints without end must not fill the disk."""


class OverflowLog:
    """Writes output in order of arrival, with a label wherever the rank changes.

    Parameters
    ----------
    folder : LogFolder
        Owns the file; where none can be made, nothing is kept.
    limit : int
        How much the notebook shows.
    so_far : iterable of (rank, item)
        What has come until now.
    """

    def __init__(self, folder: LogFolder, limit: int, so_far: Iterable[tuple[int, Item]]) -> None:
        self.path = ""
        self._size = 0
        self._last: int | None = None
        self.notice = f"the cell printed more than {size_text(limit)}; "
        """The line for the user."""
        try:
            self.path = folder.new_log()
        except OSError as error:
            self.notice += f"the rest is lost, since no file can be made for it: {error}"
            return
        self.notice += f"all of it is in {self.path} until the kernel ends (copy it to keep it)"
        problem = next(filter(None, [self.write(rank, item) for rank, item in so_far]), "")
        if problem:
            self.notice += f"; {problem}"

    def write(self, rank: int, item: Item) -> str:
        """Append one arrival; return a line for the user if logging stops with it, else nothing."""
        if not self.path:
            return ""
        try:
            self._append(rank, item)
        except OSError as error:
            path, self.path = self.path, ""
            return f"what comes from now on is lost: {path} cannot be written to ({error.strerror})"
        if self._size > LARGEST_LOG:
            path, self.path = self.path, ""
            return f"what comes from now on is lost: {path} has {size_text(self._size)}, which is the most"
        return ""

    def _append(self, rank: int, item: Item) -> None:
        text = item.text if isinstance(item, Text) else self._described(item)
        if rank != self._last:
            text = f"[rank {rank}]\n{text}"
            self._last = rank
        data = text.encode("utf-8", "backslashreplace")
        with open(self.path, "ab") as file:
            file.write(data)
        self._size += len(data)

    def _described(self, item: Rich) -> str:
        """Return a display's text; what else it consists of goes into files beside the log."""
        lines = [str(item.data.get("text/plain", ""))]
        for kind, content in item.data.items():
            if kind != "text/plain":
                data, (log, _) = _as_bytes(kind, content), os.path.splitext(self.path)
                suffix = mimetypes.guess_extension(kind) or (".json" if kind.endswith("json") else ".txt")
                fd, path = tempfile.mkstemp(suffix, f"{os.path.basename(log)}-", os.path.dirname(log))
                with open(fd, "wb") as file:
                    file.write(data)
                self._size += len(data)
                lines.append(f"({kind} is in {path})")
        return "\n".join(lines) + "\n"


def _as_bytes(kind: str, content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    if not isinstance(content, str):
        return json.dumps(content, default=repr).encode()
    if kind.startswith("image/") and "xml" not in kind:
        with contextlib.suppress(ValueError):  # no base64: as it came
            return base64.b64decode(content, validate=True)
    return content.encode("utf-8", "backslashreplace")
