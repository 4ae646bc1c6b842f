"""Lines of the user's code: which one is running, whatever libraries run below it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType

from nbparallel.distributed.races.access_log import Site
from nbparallel.distributed.runtime.call_site import is_library, is_ours
from nbparallel.transfer.cell_sources import source_label


class UserLines:
    """Finds the innermost line of the user's, as an index into `sites`.

    A frame knows its line only by counting through a table; so the answer is kept for each instruction.
    `CallSite` does the same for operations, where one file is meant and every nanosecond counts.

    Parameters
    ----------
    label_of : callable
        Returns what messages call a file: empty for the cell that runs; None: a library's.
    """

    def __init__(self, label_of: Callable[[str], str | None]) -> None:
        self.sites: list[Site] = []
        self._label_of = label_of
        self._indices: dict[Site, int] = {}
        self._codes: dict[int, tuple[CodeType, str | None, dict[int, int]]] = {}
        """By identity: to find out that two code objects are equal is slow."""

    def current(self, depth: int = 1) -> int:
        """Return the index of the line that runs, `depth` frames up or above."""
        frame: FrameType | None = sys._getframe(depth)
        while frame is not None:
            code = frame.f_code
            known = self._codes.get(id(code))
            if known is None:
                known = self._codes[id(code)] = code, self._label_of(code.co_filename), {}
            if known[1] is not None:
                index = known[2].get(frame.f_lasti)
                if index is None:
                    index = known[2][frame.f_lasti] = self.index(Site(known[1], frame.f_lineno))
                return index
            frame = frame.f_back
        return self.index(Site("", 0))

    def through(self, index: int, door: str) -> int:
        """Return the index of the same line, through a door."""
        return self.index(self.sites[index]._replace(door=door))

    def index(self, site: Site) -> int:
        """Return the index of a site."""
        index = self._indices.get(site)
        if index is None:
            index = self._indices[site] = len(self.sites)
            self.sites.append(site)
        return index

    def is_users(self, filename: str) -> bool:
        """Whether a file is no library's."""
        return self._label_of(filename) is not None

    def called_from_library(self, depth: int = 1) -> bool:
        """Whether the code `depth` frames up is a library's."""
        code = sys._getframe(depth).f_code
        return self._label_of(code.co_filename) is None


def label_function(filename: str) -> Callable[[str], str | None]:
    """Return what `UserLines` asks for labels, for the cell that is compiled as `filename`."""

    def label_of(name: str) -> str | None:
        if name == filename:
            return ""
        if label := source_label(name):
            return label
        if name.startswith("<") or is_ours(name) or is_library(os.path.abspath(name)):
            return None
        return os.path.basename(name)

    return label_of
