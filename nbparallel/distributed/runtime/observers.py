"""Observers: what looks at operations or cells while they run, and of which nothing else here knows.

::

    session.run(…)             CellTask.observers       names of modules that observe the cell
      rank: observe(cell)      engine                   a context around the cell's code, on each rank
        cell.send(log)         ObservedPart             what it has found so far, if that is large
      rank: its log()          Outcome.observed         what it has found
      kernel: conclude(logs)   CellResult.findings      what it says of all ranks' logs

An observer of a cell that wants to see operations too adds itself to the communicator's `Observers`, as the
tracer of the timeline does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

Call = Callable[..., Any]


class OperationObserver(Protocol):
    """What sees the calls of a rank's operations."""

    def around(self, name: str, call: Call) -> Call:
        """Return what runs in the place of an operation; it does what it likes before and after `call`."""


class Observers:
    """The observers of a communicator's operations.

    What they return from `around` stands among the communicator's own attributes, where Python looks before
    it looks at the class: one that is not observed runs as if there were none
    (decision 16).
    """

    def __init__(self, owner: object) -> None:
        self._owner: object = owner
        self._of: dict[str, list[OperationObserver]] = {}
        """Of each operation, the innermost first."""

    def add(self, observer: OperationObserver, names: Iterable[str], *, inside: bool = False) -> None:
        """Observe operations, outside of those that do so already, or inside."""
        for name in names:
            observers = self._of.setdefault(name, [])
            if observer not in observers:
                observers.insert(0 if inside else len(observers), observer)
                self._place(name)

    def remove(self, observer: OperationObserver, names: Iterable[str] | None = None) -> None:
        """Observe operations no more, by default none of them (idempotent)."""
        for name in tuple(self._of) if names is None else names:
            if observer in self._of.get(name, ()):
                self._of[name].remove(observer)
                self._place(name)

    def close(self) -> None:
        """Remove all."""
        for name in self._of:
            vars(self._owner).pop(name, None)
        self._of.clear()
        self._owner = None

    def _place(self, name: str) -> None:
        attributes = vars(self._owner)
        attributes.pop(name, None)
        if self._of[name]:
            call = getattr(self._owner, name)
            for observer in self._of[name]:
                call = observer.around(name, call)
            attributes[name] = call


@dataclass(frozen=True, slots=True)
class ObservedCell:
    """A cell that is about to run, as its observers see it on a rank."""

    communicator: Any
    """The rank's `Communicator`."""
    variables: dict[str, Any]
    """The rank's globals."""
    is_delivered: Callable[[str], bool]
    """Whether the notebook has delivered an array under a name."""
    filename: str
    """``co_filename`` of its code."""
    transformers: list[Any]
    """Of its syntax tree (`ast.NodeTransformer`)."""
    send: Callable[[Any], None]
    """Takes a part of the log before the cell ends; it travels to the kernel."""


class Observation(Protocol):
    """What an observer sees of a cell."""

    def value(self, value: Any) -> Any:
        """Return what the cell's last expression stands for."""

    def log(self) -> Any:
        """Return what was found since a part was sent; it travels to the kernel."""


class CellObserver(Protocol):
    """A module that observes cells."""

    def observe(self, cell: ObservedCell) -> AbstractContextManager[Observation]:
        """Observe a cell on a rank while the block runs."""

    def conclude(self, logs: list[Any], lost: Collection[int]) -> Any:
        """Return what the ranks' logs say; some may be lost, so a log names its rank."""


def cell_observer(name: str) -> CellObserver:
    """Return an observer of cells by the name of its module."""
    return cast(CellObserver, importlib.import_module(name))
