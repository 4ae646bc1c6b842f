"""The file that takes a cell's output when it is more than a notebook should hold."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable

from nbparallel.wire.units import size_text
from nbparallel_magics.layout import Item, Text

_LARGEST_LOG = 1_000_000_000
"""Bytes; a cell that prints without end must not fill the disk."""


class OverflowLog:
    """Writes output in order of arrival, with a label wherever the rank changes."""

    def __init__(self, so_far: Iterable[tuple[int, Item]]) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="nbparallel-output-", suffix=".log")
        os.close(descriptor)
        self._size = 0
        self._last: int | None = None
        for rank, item in so_far:
            self.write(rank, item)

    def notice(self, limit: int) -> str:
        """Return the line that tells the user."""
        return f"the cell printed more than {size_text(limit)}; all of it is in {self.path}"

    def write(self, rank: int, item: Item) -> None:
        """Append one arrival; beyond `_LARGEST_LOG` it is dropped."""
        text = item.text if isinstance(item, Text) else str(item.data.get("text/plain", "")) + "\n"
        if rank != self._last:
            text = f"[rank {rank}]\n{text}"
            self._last = rank
        if self._size > _LARGEST_LOG:
            return
        data = text.encode("utf-8", "backslashreplace")
        self._size += len(data)
        with open(self.path, "ab") as file:
            file.write(data)
