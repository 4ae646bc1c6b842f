"""NameUpdate: one change that a rank makes to its namespace before a cell runs."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

# Handles: what travels so that another process can find an array's bytes.


class ArrayHandle(NamedTuple):
    """Where an array lies.  Never trusted: the receiver validates every field.

    A tuple, because it is made and taken apart on every hand over, and marshal writes one as it is.
    """

    segment: int
    """The segment's id in its session: creator's client number << 40 | serial."""
    segment_nbytes: int
    """Size of the whole segment in bytes."""
    offset: int
    """Byte offset of the element with all indices 0."""
    shape: tuple[int, ...]
    """As ``ndarray.shape``."""
    strides: tuple[int, ...]
    """As ``ndarray.strides``, in bytes; may be zero or negative."""
    dtype: str | bytes
    """As `array_layout.describe_dtype` gives it: a name, or bytes."""
    writable: bool
    """Whether the receiver is meant to write (the supervisor decides whether it may)."""
    strategy: str = "file_descriptor"
    """Name of the sharing strategy that made the segment, and knows how to check and map it."""
    memory: int = 0
    """The memory's id, which stays when it is used again as another segment; 0: it is used once."""


class NameKind(enum.StrEnum):
    """How a value travels."""

    ARRAY = "array"
    """A numpy array: the same memory."""
    OBJECT = "object"
    """Anything else: a pickled message."""
    DEFINITION = "definition"
    """A class of the notebook; `NameUpdate.name` is its name, but nothing is bound to it."""
    MODULE = "module"
    """Imported by name."""
    DELETE = "delete"
    """The notebook deleted the name."""


@dataclass(frozen=True, slots=True)
class NameUpdate:
    """One name's new value.  Updates are applied in the order given, all or none."""

    name: str
    """As the notebook calls it."""
    kind: NameKind
    """Which of the fields below is set."""
    handle: ArrayHandle | None = None
    """`ARRAY`: where it lies and whether ranks may write."""
    data: bytes = b""
    """`OBJECT`, `DEFINITION`: a message of `nbparallel.transfer.pickling`."""
    modules: tuple[str, ...] = ()
    """`MODULE`: what to import; the first is what the name is bound to, the others are its submodules."""
    unless_assigned: bool = False
    """A rank that assigned the name itself keeps its own value."""
    ties: tuple[tuple[int, int], ...] = ()
    """Tensors in `data` that other updates contain as well: number in `data`, number among all of them."""

    def __reduce__(self) -> tuple[Any, ...]:
        # As that of handles: a cell may name ten thousand arrays.
        if self.kind is NameKind.ARRAY and self.handle is not None:
            return _array_update, (self.name, self.unless_assigned, *self.handle)
        return NameUpdate, (
            self.name,
            self.kind,
            self.handle,
            self.data,
            self.modules,
            self.unless_assigned,
            self.ties,
        )


def _array_update(name: str, unless_assigned: bool, *fields: Any) -> NameUpdate:
    return NameUpdate(name, NameKind.ARRAY, ArrayHandle(*fields), unless_assigned=unless_assigned)


class UsageHints(NamedTuple):
    """What a cell does with names, as far as a rank may have to say something about it."""

    predefined: tuple[str, ...]
    """Predefined names that it reads or binds."""
    touched: tuple[str, ...] = ()
    """Copies of the notebook's objects of which it assigns to items or attributes, or calls a method."""
    augmented: tuple[str, ...] = ()
    """Names of the notebook that it only assigns as ``x += 1`` does."""
    kept: tuple[str, ...] = ()
    """Names of the notebook that it reads and an earlier cell has assigned."""
