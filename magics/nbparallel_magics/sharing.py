"""``%share`` and ``%sharing_strategy``: the notebook's view of `nbparallel.sharing`."""

from __future__ import annotations

import os
import resource
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from IPython.core.error import UsageError

from nbparallel.table import Table
from nbparallel.wire.units import size_text
from nbparallel_magics.live import Live

_COSTS = {
    "file_descriptor": (
        "an anonymous memory file; its descriptor travels over a socket",
        "one open file a segment; cleaned up by the system, always",
    ),
    "file_system": (
        "a named object in /dev/shm",
        "a name, and one or two open files; size of /dev/shm; cleaned up by name",
    ),
    "file_region": ("a block inside one large region", "the least for many small arrays"),
    "mmap": ("a file in a folder of your choice", "disk instead of memory; survives a restart"),
    "copy": ("nothing: arrays are copied to every rank", "memory and time for every rank"),
}
"""What each strategy is and costs, in words; DESIGN has the reasons."""


@dataclass(frozen=True, slots=True)
class StrategyTable:
    """The sharing strategies as a notebook shows them."""

    current: str
    """Name of the one in force."""
    usable: tuple[str, ...]
    """Names that `set_sharing_strategy` takes."""
    missing: dict[str, str]
    """Name -> reason of those that it does not."""

    @classmethod
    def now(cls) -> Self:
        """Look at what there is."""
        import nbparallel

        strategies = nbparallel.get_all_sharing_strategies()
        return cls(nbparallel.get_sharing_strategy(), tuple(strategies), dict(strategies.missing))

    def table(self) -> Table:
        """Return the rows: the one in force first."""
        names = [self.current, *(name for name in self.usable if name != self.current), *self.missing]
        rows = [(name, self._state(name), *_COSTS.get(name, ("", ""))) for name in names]
        return Table(
            f"sharing strategy: {self.current}",
            ("name", "here", "a segment is", "it costs"),
            rows,
            _limits(),
        )

    def _state(self, name: str) -> str:
        if name == self.current:
            return "in force"
        return f"no: {self.missing[name]}" if name in self.missing else "yes"

    def __repr__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()


def _limits() -> str:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    text = f"open files: at most {files} a process"
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return text
    free, size = shm.f_bavail * shm.f_frsize, shm.f_blocks * shm.f_frsize
    return f"{text}; /dev/shm: {size_text(free)} of {size_text(size)} free"


def switch(line: str) -> None:
    """Choose the strategy of new arrays: ``NAME [option=value …]``; UsageError if that does not work here."""
    name, *words = shlex.split(line)
    options = dict(word.partition("=")[::2] for word in words)
    if "" in options.values():
        raise UsageError("%sharing_strategy: options are written name=value, as in mmap directory=/var/tmp")
    import nbparallel
    from nbparallel.errors import StrategyUnavailableError

    try:
        nbparallel.set_sharing_strategy(name, **options)
    except (TypeError, ValueError, StrategyUnavailableError) as error:
        raise UsageError(str(error)) from None


def share(live: Live, names: Sequence[str]) -> Sequence[str]:
    """Move arrays of the notebook into shared memory, writable by ranks; return notes for the user."""
    namespace = live.shell.user_ns
    if missing := [name for name in names if name not in namespace]:
        raise UsageError(f"%share: there is no {', '.join(missing)} in the notebook")
    return live.session_for(None).share_names(names, namespace)
