"""The file that takes a cell's output when it is more than a notebook should hold."""

from __future__ import annotations

import base64
import contextlib
import json
import mimetypes
from collections.abc import Iterable
from typing import Any

from nbparallel.wire.units import size_text
from nbparallel_magics.log_folder import LogFolder, new_file
from nbparallel_magics.output.layout import Item, Rich, Text

LARGEST_LOG = 1_000_000_000
"""Bytes; a cell that prints without end must not fill the disk."""


class OverflowLog:
    """Writes output in order of arrival, with a label wherever the rank changes.

    Parameters
    ----------
    folder : LogFolder or None
        Owns the file; without one, and where no file can be made, nothing is kept.
    limit : int
        How much the notebook shows.
    so_far : iterable of (rank, item)
        What has come until now.
    """

    def __init__(self, folder: LogFolder | None, limit: int, so_far: Iterable[tuple[int, Item]]) -> None:
        self.path = ""
        self._size = 0
        self._files = 0
        self._last: int | None = None
        self.notice = f"the cell printed more than {size_text(limit)}; "
        """The line that tells the user."""
        try:
            if folder is not None:
                self.path = folder.new_log()
        except OSError as error:
            self.notice += f"the rest is lost, since no file can be made for it: {error}"
            return
        if self.path:
            self.notice += f"all of it is in {self.path} until the kernel ends (copy it to keep it)"
        else:
            self.notice += "the rest is not kept"
        problem = next(filter(None, [self.write(rank, item) for rank, item in so_far]), "")
        if problem:
            self.notice += f"; {problem}"

    def write(self, rank: int, item: Item) -> str:
        """Append one arrival; return a line for the user if from now on nothing is kept, else nothing."""
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
                self._files += 1
                path = f"{self.path[: -len('.log')]}-{self._files}{_suffix(kind)}"
                data = _as_bytes(kind, content)
                with open(new_file(path), "wb") as file:
                    file.write(data)
                self._size += len(data)
                lines.append(f"({kind} is in {path})")
        return "\n".join(lines) + "\n"


def _suffix(kind: str) -> str:
    return mimetypes.guess_extension(kind) or (".json" if kind.endswith("json") else ".txt")


def _as_bytes(kind: str, content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    if not isinstance(content, str):
        return json.dumps(content, default=repr).encode()
    if kind.startswith("image/") and "xml" not in kind:
        with contextlib.suppress(ValueError):  # no base64: as it came
            return base64.b64decode(content, validate=True)
    return content.encode("utf-8", "backslashreplace")
