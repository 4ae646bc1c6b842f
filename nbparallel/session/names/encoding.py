"""Encoding of the notebook's values: a key that changes with the value, and the form in which it travels.

`RankVersions.needed`, below, decides which of them a rank is sent again.

The kinds, in the order in which they are tried: plain arrays (the same memory), modules (by name), small
immutable values, and everything else (cloudpickle).
"""

from __future__ import annotations

import sys
import time
import types
import weakref
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy.typing as npt

from nbparallel import sharing
from nbparallel.errors import UnpicklableError
from nbparallel.sharing import SegmentBroker, Store
from nbparallel.sharing.memory.mapping import Files
from nbparallel.transfer import pickling
from nbparallel.transfer.definitions import find_modules
from nbparallel.transfer.pickle_format import Pickled
from nbparallel.transfer.pickling import Serialised, serialise
from nbparallel.wire.name_updates import ArrayHandle, NameKind, NameUpdate

_ATOMS = (int, str, bool, bytes, types.NoneType)
_LONG = 4096
"""Characters or bytes; a longer string is compared by its checksum, to hold no second reference to it."""


@dataclass(slots=True, eq=False)
class Value:
    """The value of one name, encoded."""

    name: str
    """The notebook's name."""
    kind: NameKind
    """How it travels."""
    key: Hashable
    """Equal keys: the rank has this value."""
    handle: ArrayHandle | None = None
    """Of an array."""
    array: npt.NDArray[Any] | None = None
    """It; held until the cell has ended."""
    modules: tuple[str, ...] = ()
    """Of a module: what to import."""
    serialised: Serialised | None = None
    """Of everything else: pickled, its large buffers not copied yet."""
    atom: Any = None
    """A small immutable value: pickled only when it has to travel."""
    pickled: Pickled | None = field(default=None, repr=False)
    """The message; made when the first rank needs it."""
    seconds: float = 0.0
    """Processor time that it took to make `key`, which every cell does that uses the name."""
    ties: tuple[tuple[int, int], ...] = ()
    """Tensors inside that other values of the cell contain as well; see `NameUpdate.ties`."""
    memory_key: Hashable = field(init=False)
    """The part of the key that identifies the value; the rest is the right to write it, or submodules."""
    _updates: dict[bool, NameUpdate] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        key = self.key
        has_more = self.kind in (NameKind.ARRAY, NameKind.MODULE)
        self.memory_key = key[:-1] if has_more and isinstance(key, tuple) else key

    @property
    def is_only_referred_to(self) -> bool:
        """Whether its content is only in the notebook's object, which may have changed since."""
        return self.serialised is not None and self.pickled is None

    def update(self, store: Store, broker: Any, *, unless_assigned: bool) -> NameUpdate:
        """Return what a rank has to do; pickles the value the first time."""
        if unless_assigned not in self._updates:
            if self.pickled is None and self.kind in (NameKind.OBJECT, NameKind.DEFINITION):
                self.serialised = self.serialised or serialise(self.atom, store, broker=broker)
                self.pickled = self.serialised.pack(store, broker=broker)
            self._updates[unless_assigned] = NameUpdate(
                self.name, self.kind, self.handle, b"" if self.pickled is None else self.pickled.data,
                self.modules, unless_assigned, self.ties,
            )  # fmt: skip
        return self._updates[unless_assigned]


class SharedArrays:
    """A cache of encoded shared arrays: an unchanged one costs a microsecond."""

    def __init__(self, store: Store, broker: Any) -> None:
        self._store, self._broker = store, broker
        self._seen: dict[str, tuple[weakref.ref[Any], tuple[Any, ...], Hashable, ArrayHandle]] = {}

    def encode(self, name: str, array: npt.NDArray[Any]) -> Value | None:
        """Return a shared array encoded as a handle; None if its memory is private."""
        form = (array.shape, array.strides, array.dtype, array.flags.writeable, self._store.rights_changes)
        seen = self._seen.get(name)
        if seen is not None and seen[0]() is array and seen[1] == form:
            return Value(name, NameKind.ARRAY, seen[2], handle=seen[3], array=array)
        self._seen.pop(name, None)
        handle = self._store.handle(array, broker=self._broker, writable=None)
        if handle is None:
            return None
        dtype = handle.dtype if isinstance(handle.dtype, str) else repr(handle.dtype)
        key = (handle.segment, handle.offset, handle.shape, handle.strides, dtype, handle.writable)
        self._seen[name] = (weakref.ref(array), form, key, handle)
        return Value(name, NameKind.ARRAY, key, handle=handle, array=array)


def encode(
    name: str,
    value: Any,
    store: Store,
    broker: Any,
    main_globals: Mapping[str, Any],
    mentioned: frozenset[str],
) -> Value:
    """Return the encoded value of anything but a shared array.

    Parameters
    ----------
    mentioned : frozenset of str
        Names and attributes of the cell: which submodules of a module it may use.

    Raises
    ------
    UnpicklableError
        It cannot travel.
    """
    if (  # importing its name would bring this module: one made by hand travels by value
        isinstance(value, types.ModuleType)
        and sys.modules.get(value.__name__) is value
        and (getattr(value, "__spec__", None) is not None or value.__name__ == "__main__")
    ):
        modules = find_modules(value, mentioned)
        return Value(name, NameKind.MODULE, (modules[0], frozenset(modules)), modules=modules)
    kind = type(value)
    if kind in _ATOMS and (kind not in (str, bytes) or len(value) <= _LONG):
        return Value(name, NameKind.OBJECT, (kind, value), atom=value)
    if kind in (float, complex):  # nan equals itself here, and -0.0 is not 0.0
        return Value(name, NameKind.OBJECT, (kind, repr(value)), atom=value)
    began = time.thread_time()
    serialised = serialise(
        value, store, broker=broker, main_globals=main_globals, name=name, apart=True, files=Files.PRIVATE
    )
    key = serialised.checksum()
    seconds = time.thread_time() - began
    return Value(name, NameKind.OBJECT, key, serialised=serialised, seconds=seconds)


def encode_class(cls: type, store: Store, broker: Any, main_globals: Mapping[str, Any]) -> Value:
    """Return the encoded definition of a class of the notebook."""
    serialised = serialise(
        cls, store, broker=broker, main_globals=main_globals, name=cls.__qualname__, target=cls,
        files=Files.PRIVATE,
    )  # fmt: skip
    return Value(cls.__qualname__, NameKind.DEFINITION, serialised.checksum(), serialised=serialised)


def nbytes_shared(value: Value) -> int:
    """Return the bytes of a value that ranks see without a copy."""
    if value.array is not None:
        return value.array.nbytes
    if value.serialised is not None:
        return sum(array.nbytes for array in value.serialised.arrays)
    return 0


def dump(
    whole: Any,
    parts: Mapping[str, Any],
    broker: SegmentBroker | None,
    store: Store | None = None,
    files: Files = Files.SHARED,
) -> Pickled:
    """Pickle `whole`; if that fails, raise for the first of `parts` (by the user's word for it) that does.

    `store` is this process's own unless the message leaves the machine.

    Raises
    ------
    UnpicklableError
        It names the part, and what inside of it cannot travel.
    """
    store = sharing.current_store() if store is None else store
    try:
        return pickling.dumps(whole, store, broker=broker, files=files)
    except UnpicklableError:
        for name, part in parts.items():
            pickling.dumps(part, store, broker=broker, name=name, files=files)
        raise


# Versions: which version of each of the notebook's names every rank was given.
#
# A table with a row for each rank and name.  Before a cell a rank needs ``values of the cell - its row``
# (`RankVersions.needed`), and the row that it will have then replaces this one once it has applied its
# updates. Two events are exceptions:
#
# * `NameDelivery.rank_lost`: the rank has no variables any more; its row is deleted;
# * `RankVersions.value_changed`: the notebook bound the name again, or changed a list or another mutable
#   value in place.  The new value replaces also what the rank has assigned.

NO_TIES: Mapping[str, frozenset[str]] = MappingProxyType({})
ABSENT = object()
"""The value of a name that the notebook does not have."""


class Version(NamedTuple):
    """A value that was delivered, without the value itself."""

    kind: NameKind
    key: Hashable
    """`Value.key`."""
    memory_key: Hashable
    """`Value.memory_key`."""

    def covers(self, value: Value) -> bool:
        """Whether a rank with this version needs nothing more; of a module it may have more submodules."""
        mine, theirs = self.key, value.key
        if (
            self.kind is value.kind is NameKind.MODULE
            and isinstance(mine, tuple)
            and isinstance(theirs, tuple)
        ):
            return bool(mine[0] == theirs[0] and mine[1] >= theirs[1])
        return mine == theirs


class AssignedFrom:
    """The notebook's value of a name when a rank assigned it; keeps no large object alive.

    Parameters
    ----------
    value : object
        What the notebook's name was bound to.
    key : hashable, optional
        `Value.memory_key`, if the name had been delivered before: then a changed content is seen as well.
    """

    def __init__(self, value: Any, key: Hashable = None) -> None:
        self.key = key
        self._reference = self._value = None
        try:
            self._reference = weakref.ref(value)
        except TypeError:  # numbers, strings, lists …
            self._value = value

    def is_same(self, value: Any) -> bool:
        """Whether the name is bound to that value, or to an equal number or string."""
        if self._reference is not None:
            return value is not None and self._reference() is value
        if isinstance(value, int | float | str | bytes) and type(self._value) is type(value):
            return bool(self._value == value)
        return self._value is value


@dataclass(slots=True)
class RankVersions:
    """The row of one rank."""

    versions: dict[str, Version] = field(default_factory=dict)
    """By name."""
    classes: dict[str, Hashable] = field(default_factory=dict)
    """Keys of class definitions, by the id of the class."""
    baselines: dict[str, AssignedFrom] = field(default_factory=dict)
    """Of names that a cell assigned since they were delivered."""
    deliveries: dict[str, int] = field(default_factory=dict)
    """Of names whose tensors others have as well: with which cell they came; those of one cell are tied."""
    namespace: int = 0
    """Number of the namespace in which the names of the rank's last cell were looked up."""
    others: set[str] = field(default_factory=set)
    """Names that came from other namespaces and that this one did not have; it cannot have deleted them."""
    after: RankVersions | None = None
    """The row as it is once the rank has applied the updates that it was sent last."""

    def begin_next(self) -> RankVersions:
        """Return `after` anew: a copy, to be changed as the rank is going to be."""
        self.after = RankVersions(
            dict(self.versions), dict(self.classes), dict(self.baselines), dict(self.deliveries),
            self.namespace, set(self.others),
        )  # fmt: skip
        return self.after

    def needed(self, values: Collection[Value], tied: Mapping[str, frozenset[str]] = NO_TIES) -> list[Value]:
        """Return the values of which the rank does not have this version, in order.

        Of names that are `tied`, each to a set that contains it, all are needed if one of them is, or if they
        came with different cells.
        """
        versions = self.versions
        found = [
            value
            for value in values
            if (known := versions.get(value.name)) is None or not known.covers(value)
        ]
        if not tied:
            return found
        again = {name for value in found for name in tied.get(value.name, ())}
        for names in set(tied.values()):
            if len({self.deliveries.get(name, -1) for name in names}) > 1:
                again |= names
        new = {id(value) for value in found}
        return [value for value in values if id(value) in new or value.name in again]

    def needed_definitions(self, classes: Mapping[str, Value]) -> list[Value]:
        """Return the definitions of classes, given by their ids, of which the rank lacks this version."""
        return [value for identifier, value in classes.items() if self.classes.get(identifier) != value.key]

    def set_version(self, name: str, version: Version | None) -> None:
        """Record that the rank has this version of a name, and nothing of its own; None: not the name."""
        self.baselines.pop(name, None)
        self.deliveries.pop(name, None)
        self.others.discard(name)
        if version is None:
            self.versions.pop(name, None)
        else:
            self.versions[name] = version

    def value_changed(self, value: Value, current: Any) -> bool:
        """Whether the notebook changed a value since the rank was given it, or assigned the name.

        Then it replaces the rank's own value.  `current` is what the notebook's name is bound to.
        """
        known, baseline = self.versions.get(value.name), self.baselines.get(value.name)
        if baseline is not None:
            if baseline.key is not None:
                return baseline.key != value.memory_key
            return not baseline.is_same(current)
        if known is None:
            return False  # no cell assigned the name before this value was there
        # the same memory with other rights is the same value
        return known.kind is not value.kind or known.memory_key != value.memory_key
