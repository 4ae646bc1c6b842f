"""The strategy `file_descriptor`: anonymous memory behind a descriptor; see `anonymous` for how."""

from __future__ import annotations

from nbparallel.sharing.strategies.memfd import MemfdStrategy


class FileDescriptorStrategy(MemfdStrategy):
    """Sealed memfds; the default on Linux."""

    # docstrings inherited

    @property
    def name(self) -> str:  # noqa: D102
        return "file_descriptor"

    @property
    def needs_descriptor(self) -> bool:  # noqa: D102
        return True
