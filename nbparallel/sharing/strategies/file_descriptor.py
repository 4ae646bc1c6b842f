"""The strategy `file_descriptor`: anonymous memory behind a descriptor; see `memfd` for how."""

from __future__ import annotations

from nbparallel.sharing.strategies.memfd import MemfdStrategy


class FileDescriptorStrategy(MemfdStrategy):
    """Sealed memfds; the default on Linux."""

    # docstrings inherited

    @property
    def name(self) -> str:
        return "file_descriptor"
