"""The file that takes a cell's output when it is more than a notebook should hold."""

from __future__ import annotations

import base64
import contextlib
import json
import mimetypes
import os
import tempfile
from collections.abc import Iterable
from typing import Any

from nbparallel.wire.units import size_text
from nbparallel_magics.layout import Item, Rich, Text

_LARGEST_LOG = 1_000_000_000
"""Bytes; a cell that prints without end must not fill the disk."""


class OverflowLog:
    """Writes output in order of arrival, with a label wherever the rank changes."""

    def __init__(self, so_far: Iterable[tuple[int, Item]]) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="nbparallel-output-", suffix=".log")
        os.close(descriptor)
        self._size = 0
        self._files = 0
        self._last: int | None = None
        for rank, item in so_far:
            self.write(rank, item)

    def notice(self, limit: int) -> str:
        """Return the line that tells the user."""
        return f"the cell printed more than {size_text(limit)}; all of it is in {self.path}"

    def write(self, rank: int, item: Item) -> None:
        """Append one arrival; beyond `_LARGEST_LOG` it is dropped."""
        if self._size > _LARGEST_LOG:
            return
        text = item.text if isinstance(item, Text) else self._described(item)
        if rank != self._last:
            text = f"[rank {rank}]\n{text}"
            self._last = rank
        data = text.encode("utf-8", "backslashreplace")
        self._size += len(data)
        with open(self.path, "ab") as file:
            file.write(data)

    def _described(self, item: Rich) -> str:
        """Return a display's text; what else it consists of goes into files beside the log."""
        lines = [str(item.data.get("text/plain", ""))]
        for kind, content in item.data.items():
            if kind != "text/plain":
                self._files += 1
                path = f"{self.path[: -len('.log')]}-{self._files}{_suffix(kind)}"
                data = _as_bytes(kind, content)
                self._size += len(data)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                with open(descriptor, "wb") as file:
                    file.write(data)
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
