"""Inputs of a cell: the values that it uses, directly or through functions and classes; arrays are moved."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nbparallel.errors import (
    NotAnArrayError,
    ObjectArrayError,
    ReadOnlyArrayError,
    UnknownNameError,
    UnpicklableError,
    grouped,
    resembling,
)
from nbparallel.session.names.encoding import SharedArrays, Value, encode, encode_class, nbytes_shared
from nbparallel.session.names.free_names import (
    FreeNames,
    is_ipythons,
    is_ipythons_function,
)
from nbparallel.sharing import Store
from nbparallel.sharing.memory import array_layout
from nbparallel.sharing.tensor_storage import holds_tensors
from nbparallel.sharing.tensors import array_at
from nbparallel.transfer import definitions
from nbparallel.transfer.code_names import looks_up_strings
from nbparallel.transfer.pickling import Serialised
from nbparallel.wire.units import size_text

# Moves a notebook's arrays into shared memory, and re-binds every name that viewed the old memory.
#
# Note [same memory]
# ------------------
# Names are moved together when their arrays lie in the same memory: the array that owns it, and all views.
# The bytes are copied as they lie, from the first that any of them touches to the last, so every view keeps
# its dtype, shape, strides and its place relative to the others, whatever it is.

AnyArray: TypeAlias = npt.NDArray[Any]


_Place: TypeAlias = tuple[MutableMapping[Any, Any], Any, Any]
"""A mapping that may hold an array, under which key, and what it holds."""


@dataclass(slots=True)
class _Memory:
    """One block of private memory and the arrays that are known to view it."""

    owner: AnyArray | None
    """The array that owns it; None if something else than numpy does."""
    foreign: str
    """What kind of object owns it then."""
    arrays: dict[int, AnyArray] = field(default_factory=dict)
    """The arrays to re-create, by id."""
    names: list[tuple[MutableMapping[Any, Any], Any]] = field(default_factory=list)
    """Where each of them is bound: a namespace, or what IPython keeps of shown values, and the key."""


def is_array(value: object) -> bool:
    """Whether the array rule holds for a value: a plain array without Python objects."""
    return type(value) is np.ndarray and not value.dtype.hasobject


def move_arrays(
    names: Iterable[str],
    namespace: MutableMapping[str, Any],
    store: Store,
    copied: dict[str, int],
    *,
    for_all: bool,
    on_move: Callable[[str, int], None],
) -> list[str]:
    """Move the arrays of some names, and what shares their memory, into shared memory.

    Every name of `namespace` that is bound to one of these arrays, or to a view of one, is bound to the
    same part of the shared one.  Arrays that are shared already stay as they are; with `for_all`, unless they
    lie packed with others that ranks may only read.  Before each is moved, `on_move` gets its name and bytes;
    `copied` gets them when it was.  Returns lines for the user.
    """
    packed_in = store.packed_read_only if for_all else lambda _: None
    wanted: dict[Hashable, str] = {}
    for name in names:
        value = namespace[name]
        if is_array(value) and (packed_in(value) or not store.is_shared(value)):
            wanted.setdefault(packed_in(value) or _memory_of(value)[0], name)
    del value
    if not wanted:
        return []
    blocks = _collect(wanted, namespace, packed_in)
    notes: list[str] = []
    watched: list[tuple[str, weakref.ref[AnyArray], int]] = []
    for key, name in wanted.items():
        block = blocks.pop(key)
        root = weakref.ref(_root_of(next(iter(block.arrays.values()))))
        on_move(name, _extent(block)[1])
        copied[name] = nbytes = _move(block, store, for_all=for_all)
        if isinstance(key, tuple):
            watched.append((name, root, nbytes))  # it was shared before, packed with others
        elif block.owner is None:
            if block.foreign != "bytes":  # what cannot change cannot differ either
                notes.append(_copied_line(block, namespace, nbytes))
        else:
            watched.append((name, weakref.ref(block.owner), nbytes))
        del block
    return notes + _still_held(watched)


def _memory_of(array: AnyArray) -> tuple[int, AnyArray | None, str]:
    """Return what identifies the memory under an array, the owning array, or else the kind of owner."""
    current: Any = array
    while True:
        base = current.base
        if base is None:
            return id(current), current, ""
        if isinstance(base, memoryview):
            base = base.obj
        if not isinstance(base, np.ndarray):
            inner = getattr(base, "base", None)  # numpy's as_strided puts an object of its own between
            if not isinstance(inner, np.ndarray):
                return id(base), None, type(base).__name__
            base = inner
        current = base


def _root_of(array: AnyArray) -> AnyArray:
    """Return the last array in the chain of bases: it lives as long as any view of the memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _collect(
    wanted: dict[Hashable, str],
    namespace: MutableMapping[str, Any],
    packed_in: Callable[[object], tuple[int, int] | None],
) -> dict[Hashable, _Memory]:
    """Find what views the wanted memory: notebook's names, and what IPython keeps of shown values."""
    blocks: dict[Hashable, _Memory] = {}
    own: list[_Place] = [(namespace, name, value) for name, value in list(namespace.items())]
    for mapping, name, value in (*own, *_shown_places(namespace)):
        if not is_array(value):
            continue
        memory, owner, foreign = _memory_of(value)
        key = packed_in(value) or memory
        if key in wanted:
            block = blocks.setdefault(key, _Memory(owner, foreign))
            block.arrays[id(value)] = value
            block.names.append((mapping, name))
    return blocks


def _shown_places(namespace: Mapping[str, Any]) -> Iterator[_Place]:
    """Yield where IPython keeps what cells have shown, beside the notebook's own names (``_``, ``_5``)."""
    history = namespace.get("Out")
    shell = getattr(namespace.get("get_ipython"), "__self__", None)
    of_shell = (getattr(shell, name, None) for name in ("last_execution_result", "displayhook"))
    hidden = getattr(shell, "user_ns_hidden", None)  # `InteractiveShell.push` with interactive=False
    for mapping in (history, hidden, *(getattr(holder, "__dict__", None) for holder in of_shell)):
        if isinstance(mapping, dict):
            yield from ((mapping, name, value) for name, value in list(mapping.items()))


def _move(block: _Memory, store: Store, *, for_all: bool) -> int:
    low, nbytes = _extent(block)
    shared = store.share(array_at(None, low, (nbytes,), writable=False), for_all=for_all)
    moved: dict[int, AnyArray] = {}
    for identity, array in block.arrays.items():
        offset = array.ctypes.data - low if array.size else 0
        new: AnyArray = np.ndarray(array.shape, array.dtype, shared, offset, array.strides)
        new.flags.writeable = array.flags.writeable
        moved[identity] = new
    changes: dict[int, tuple[MutableMapping[Any, Any], dict[Any, Any]]] = {}
    for mapping, name in block.names:
        new_value = moved.get(id(mapping.get(name)))
        if new_value is not None:  # else another thread has just bound it to something else
            changes.setdefault(id(mapping), (mapping, {}))[1][name] = new_value
    for mapping, values in changes.values():
        mapping.update(values)  # one step: an interrupt leaves all names on the old memory, or none
    block.arrays.clear()
    return nbytes


def _extent(block: _Memory) -> tuple[int, int]:
    """Return the address of the first byte that is to be moved, and how many there are."""
    arrays = list(block.arrays.values())
    if block.owner is not None:
        arrays.append(block.owner)
    bounds = [_bounds(array) for array in arrays if array.size] or [_bounds(arrays[0])]
    low = min(start for start, _ in bounds)
    return low, max(stop for _, stop in bounds) - low


def _bounds(array: AnyArray) -> tuple[int, int]:
    """Return the addresses of the first byte and of the one past the last."""
    low, high = array_layout.extent(array.shape, array.strides, array.itemsize)
    return array.ctypes.data + low, array.ctypes.data + high


def _copied_line(block: _Memory, namespace: Mapping[str, Any], nbytes: int) -> str:
    known = sorted(str(bound) for mapping, bound in block.names if mapping is namespace)
    names, it_has = ", ".join(known), "have" if len(known) > 1 else "has"
    return (
        f"{names} showed the content of a {block.foreign}, and {it_has} a copy of it in shared memory now "
        f"({size_text(nbytes)}): what you change in the {block.foreign} is no longer seen in {names}"
    )


def _still_held(watched: list[tuple[str, weakref.ref[AnyArray], int]]) -> list[str]:
    """Return a line for each block of old memory that something but the notebook's names still holds."""
    if any(owner() is not None for _, owner, _ in watched):
        gc.collect()  # it may only be garbage that refers to itself
    return [
        f"{name} was copied into shared memory, and a list, an attribute or another object still has the old "
        f"array ({size_text(nbytes)}): what you change in one is not seen in the other"
        for name, owner, nbytes in watched
        if owner() is not None
    ]


def check_known(name: str, namespace: Mapping[str, Any]) -> None:
    """Raise an `UnknownNameError` if the notebook has no variable of this name."""
    if name not in namespace or is_ipythons(name):
        own = (
            key
            for key, value in namespace.items()
            if not (is_ipythons(key) or is_ipythons_function(key, value))
        )
        hint = resembling(name, own)
        raise UnknownNameError(f"the notebook has no variable {name!r}{hint}")


def check_shareable(name: str, namespace: Mapping[str, Any]) -> None:
    """Check that the array, or what holds tensors, of this name can be made writable by ranks.

    Raises
    ------
    UnknownNameError
        The notebook has no such name.
    NotAnArrayError, ObjectArrayError
        It is no plain array; it is one of Python objects.
    ReadOnlyArrayError
        The notebook itself may not write it.
    """
    check_known(name, namespace)
    value = namespace[name]
    if holds_tensors(value):
        return  # what cannot be moved raises before anything is
    if type(value) is not np.ndarray:
        raise NotAnArrayError(
            f"{name!r} is of type {type(value).__qualname__}, and only plain numpy arrays, and "
            f"tensors and modules of torch, lie in shared memory: {_instead(name, value)}"
        )
    if not is_array(value):
        raise ObjectArrayError(
            f"{name!r} is an array of dtype {value.dtype}: Python objects, whose memory cannot be shared; "
            f'convert it (`{name} = {name}.astype(float)`, or "U" for text), or let it be copied'
        )
    if not value.flags.writeable:
        raise ReadOnlyArrayError(
            f"{name!r} is for reading only in the notebook, so ranks cannot write it either: "
            f"`{name} = {name}.copy()` first, or, if its memory may be written, `{name}.flags.writeable = "
            'True`; of a file nbp.from_file(path, mode="r+") makes an array that they can'
        )


def _instead(name: str, value: object) -> str:
    """Return how to have an array instead that holds what the value does."""
    if isinstance(value, np.memmap):
        return f"`{name} = {from_file_call(value)}` makes an array"
    numbers = isinstance(value, (list, tuple, range, int, float, complex)) or hasattr(value, "__array__")
    if numbers and not isinstance(value, np.ma.MaskedArray):  # which an array would lose the mask of
        return f"`{name} = np.array({name})` makes an array"
    return "only arrays inside of it can be shared, under names of their own"


def from_file_call(x: np.memmap[Any, Any]) -> str:
    """Return what to type instead of making this `numpy.memmap`, so that ranks map the file as well."""
    path, mode = str(x.filename), "r+" if x.mode in ("r+", "w+") else "r"
    if x.filename is None or isinstance(x.base, np.ndarray) or (x.offset and not path.endswith(".npy")):
        return "nbp.from_file(…)"  # a part of the file, which cannot be asked for
    form = "" if path.endswith(".npy") else f"{str(x.dtype)!r}, {x.shape}, "
    return f"nbp.from_file({path!r}, {form}mode={mode!r})"


def memmap_notes(names: Iterable[str], namespace: Mapping[str, Any]) -> list[str]:
    """Return a line for each `numpy.memmap` that was copied, as what is written there is not in its file."""
    return [
        f"{name} is a numpy.memmap and was copied for the ranks: `{name} = {from_file_call(value)}` lets "
        "them use the file itself"
        for name in sorted(names)
        if isinstance(value := namespace.get(name), np.memmap) and value.mode == "c"
    ]


COSTLY_SECONDS = 0.2
"""A longer look whether a value has changed is noted below the cell."""


class CellInputs:
    """The values that a cell uses, and those that the notebook's functions and classes among them use.

    Attributes
    ----------
    values : dict of str to Value
        By the notebook's name.
    classes : dict of str to Value
        Definitions of notebook classes, by the id of the class.
    assigned : set of str
        Names that the functions bind (``global``).
    notes : list of str
        Lines for the user.
    sent : list of Value
        Values that at least one rank was sent; the caller fills it.
    tied : dict of str to frozenset of str
        Names whose values have tensors in common, by each of them; `complete` fills it.
    copied : dict of str to int
        Bytes copied to move arrays; the caller fills it.
    words : set of str
        Words in strings of the cell and of those functions.
    by_word : set of str
        Names that only such words brought, and what these use.
    seen : set of str
        Names that were looked up, whether or not the notebook has them.
    namespace : mapping
        Where they are looked up: the notebook's, or what that was when the cell was put into a queue.
    broker : SegmentBroker
        Of the ranks for which the values are encoded.
    """

    def __init__(
        self, store: Store, broker: Any, arrays: SharedArrays, namespace: MutableMapping[str, Any]
    ) -> None:
        self._store, self.broker = store, broker
        self.namespace: Mapping[str, Any] = namespace
        self._shared = arrays
        main = sys.modules.get("__main__")
        self._main: Mapping[str, Any] = {} if main is None else main.__dict__
        self._arrays: list[str] = []
        self._mentioned: set[str] = set()
        self.by_word: set[str] = set()
        self._with_tensors: list[Value] = []
        self._queue: list[tuple[str, str | None, bool]] = []
        self.seen: set[str] = set()
        self.words: set[str] = set()
        self.values: dict[str, Value] = {}
        self.classes: dict[str, Value] = {}
        self.assigned: set[str] = set()
        self.notes: list[str] = []
        self.sent: list[Value] = []
        self.tied: dict[str, frozenset[str]] = {}
        self.copied: dict[str, int] = {}

    def gather(self, free: FreeNames, is_own: Callable[[str, Any], bool]) -> None:
        """Find and pickle what the cell uses, arrays left out; copies nothing large.

        Parameters
        ----------
        is_own : callable
            Whether some rank has a value of its own in place of the notebook's, given a name and that.

        Raises
        ------
        UnpicklableError
            A value cannot travel; the message names it, and what uses it.
        """
        self._mentioned |= free.mentioned
        self.words |= free.words
        self._enqueue(sorted(free.needed), None, doubtful=False)
        self._enqueue(sorted(free.doubtful), None, doubtful=True)
        modules: list[str] = []
        self._take_queue(is_own, modules)
        if "__main__" in self._mentioned:
            self.words |= self._mentioned  # as ``__main__.x``
        if looks_up_strings(self._mentioned, self.words, self.namespace):
            found = self.words - self.seen - free.assigned
            self.by_word |= found
            self._enqueue(sorted(found & self.namespace.keys()), None, doubtful=True)
            self._take_queue(is_own, modules)
        for name in modules:
            self._encode(name, None)

    def _take_queue(self, is_own: Callable[[str, Any], bool], modules: list[str]) -> None:
        while self._queue:
            name, user, doubtful = self._queue.pop(0)
            value = self._find(name)
            if is_array(value):
                self._arrays.append(name)
            elif isinstance(value, types.ModuleType):
                modules.append(name)  # last: which submodules depends on what the functions mention
            else:
                try:
                    self._encode(name, user)
                except UnpicklableError as error:
                    if name in self.by_word:
                        continue  # the cell may well not mean it, and an error about it says what to write
                    if user is None and is_own(name, value):
                        self.notes.append(f"{name} is only on ranks that assigned it: {error}")
                    elif doubtful:
                        self.notes.append(f"{name} is not on the ranks: {error}")
                    else:
                        raise

    def encode_arrays(self) -> list[str]:
        """Encode the arrays that are shared; return the notebook's names of the private ones."""
        private = []
        for name in self._arrays:
            found = self._shared.encode(name, self._find(name))
            if found is not None:
                self.values[name] = found
            else:
                private.append(name)
        self._arrays = private
        return [name for name in private if name in self.namespace]

    def complete(self) -> None:
        """Encode by value the arrays that could not be shared; find the tensors that several values contain.

        These are such as those of a model and its optimiser.
        """
        for name in self._arrays:
            self._encode(name, None)
        places = grouped(
            (id(tensor), (value, number))
            for value in self._with_tensors
            for number, tensor in enumerate(value.serialised.tensors if value.serialised else ())
        )
        for shared, found in enumerate(found for found in places.values() if len(found) > 1):
            names = frozenset[str]().union(*(self.tied.get(v.name, {v.name}) for v, _ in found))
            self.tied.update(dict.fromkeys(names, names))
            for value, number in found:
                value.ties += ((number, shared),)

    def has(self, name: str) -> bool:
        """Whether the notebook still has a name."""
        return name in self.namespace or (name in self.values) or name in self._main

    def costly_notes(self, known: Container[str]) -> dict[str, str]:
        """Return a line for each name that every cell takes long to find unchanged, if it is not `known`."""
        sent = {id(value) for value in self.sent}
        return {
            value.name: f"finding out whether {value.name} has changed takes {value.seconds:.1f} s in each "
            "cell that uses it: make an array of it, which needs no such check, or have each rank keep what "
            "it needs of it under a name of its own"
            for value in self.values.values()
            if value.seconds > COSTLY_SECONDS and id(value) not in sent and value.name not in known
        }

    def accounts(self) -> tuple[dict[str, int], dict[str, int], tuple[object, ...]]:
        """Return bytes copied and bytes shared, per name, and what to keep alive until the cell has ended."""
        copied = dict(self.copied)
        keep: list[object] = [value.array for value in self.values.values() if value.array is not None]
        for value in {id(value): value for value in self.sent}.values():
            if value.pickled is not None:
                copied[value.name] = copied.get(value.name, 0) + value.pickled.copied_nbytes
                keep.append(value.pickled.keep)
        shared = {name: nbytes_shared(value) for name, value in self.values.items()}
        return copied, {name: nbytes for name, nbytes in shared.items() if nbytes}, tuple(keep)

    def _enqueue(self, names: Iterable[str], user: str | None, *, doubtful: bool) -> None:
        for name in names:
            if name not in self.seen and not is_ipythons(name):
                self.seen.add(name)
                if user in self.by_word:
                    self.by_word.add(name)
                if is_ipythons_function(name, self.namespace.get(name)):
                    continue
                if name in self.namespace or (user is not None and name in self._main):
                    self._queue.append((name, user, doubtful))

    def _find(self, name: str) -> Any:
        # A function of a script's __main__ may be given in another namespace, without the names it uses.
        return self.namespace[name] if name in self.namespace else self._main[name]

    def key_of(self, name: str) -> Hashable:
        """Return the key of a value that the cell does not use, or None if it cannot travel."""
        try:
            return encode(
                name, self._find(name), self._store, self.broker, self.namespace, frozenset()
            ).memory_key
        except UnpicklableError:
            return None

    def _encode(self, name: str, user: str | None) -> None:
        mentioned = frozenset(self._mentioned)
        try:
            value = encode(name, self._find(name), self._store, self.broker, self.namespace, mentioned)
            if value.serialised is not None:
                self._follow(value.serialised, name)
        except UnpicklableError as error:
            if user is None:
                raise
            raise UnpicklableError(f"{error} (the cell uses it through {user})") from error.__cause__
        self.values[name] = value
        if value.serialised is not None and value.serialised.tensors:
            self._with_tensors.append(value)

    def _follow(self, serialised: Serialised, name: str) -> None:
        """Queue the names that functions inside use; encode the classes that it refers to."""
        self._mentioned |= serialised.mentioned
        self.words |= serialised.words
        self.assigned |= serialised.assigned
        self._enqueue(sorted(serialised.global_names), name, doubtful=False)
        for cls in serialised.classes.values():
            identifier = definitions.tracker(cls)
            if identifier not in self.classes:
                definition = encode_class(cls, self._store, self.broker, self.namespace)
                self.classes[identifier] = definition
                if definition.serialised is not None:
                    self._follow(definition.serialised, cls.__qualname__)
