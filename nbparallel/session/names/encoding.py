"""Encoding of the notebook's values: a key that changes with the value, and the form in which it travels.

The kinds, in the order in which they are tried: plain arrays (the same memory), modules (by name), small
immutable values, and everything else (cloudpickle).
"""

from __future__ import annotations

import sys
import time
import types
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from nbparallel import sharing
from nbparallel.errors import UnpicklableError
from nbparallel.sharing import SegmentBroker, Store
from nbparallel.sharing.memory.mapping import Files
from nbparallel.transfer import pickling
from nbparallel.transfer.definitions import find_modules
from nbparallel.transfer.pickle_format import ArrayStore, Pickled
from nbparallel.transfer.pickling import Serialised, serialise
from nbparallel.wire.handles import ArrayHandle
from nbparallel.wire.name_updates import NameKind, NameUpdate


def is_importable(module: types.ModuleType) -> bool:
    """Whether importing its name would bring this module (one made by hand travels by value)."""
    return sys.modules.get(module.__name__) is module and (
        getattr(module, "__spec__", None) is not None or module.__name__ == "__main__"
    )


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
        flags = array.flags
        form = (array.shape, array.strides, array.dtype, flags.writeable, self._store.rights_changes)
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
    if isinstance(value, types.ModuleType) and is_importable(value):
        modules = find_modules(value, mentioned)
        return Value(name, NameKind.MODULE, (modules[0], frozenset(modules)), modules=modules)
    kind = type(value)
    key: Hashable = None
    if kind in _ATOMS and (kind not in (str, bytes) or len(value) <= _LONG):
        key = (kind, value)
    elif kind in (float, complex):
        key = (kind, repr(value))  # nan equals itself here, and -0.0 is not 0.0
    serialised = None
    if key is None:
        began = time.thread_time()
        serialised = serialise(
            value, store, broker=broker, main_globals=main_globals, name=name, apart=True, files=Files.PRIVATE
        )
        key = serialised.checksum()
        seconds = time.thread_time() - began
        return Value(name, NameKind.OBJECT, key, serialised=serialised, seconds=seconds)
    return Value(name, NameKind.OBJECT, key, atom=value)


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
    store: ArrayStore | None = None,
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
