"""Inputs of a cell: the values that it uses, directly or through functions and classes."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, MutableMapping
from typing import Any

from nbparallel.errors import UnpicklableError
from nbparallel.session.names.encoding import SharedArrays, Value, encode, encode_class, nbytes_shared
from nbparallel.session.names.free_names import (
    FreeNames,
    is_ipythons,
    is_ipythons_function,
    names_of_script,
)
from nbparallel.session.names.share_arrays import is_array
from nbparallel.sharing import Store
from nbparallel.transfer import definitions
from nbparallel.transfer.code_names import looks_up_strings
from nbparallel.transfer.pickling import Serialised

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
        Names whose values have tensors in common, by each of them; `find_ties` fills it.
    copied : dict of str to int
        Bytes copied to move arrays; the caller fills it.
    words : set of str
        Words in strings of the cell and of those functions.
    by_word : set of str
        Names that only such words brought, and what these use.
    seen : set of str
        Names that were looked up, whether or not the notebook has them.
    broker : SegmentBroker
        Of the ranks for which the values are encoded.
    """

    def __init__(
        self, store: Store, broker: Any, arrays: SharedArrays, namespace: MutableMapping[str, Any]
    ) -> None:
        self._store, self.broker = store, broker
        self._namespace: Mapping[str, Any] = namespace
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
        if looks_up_strings(self._mentioned, self.words, self._namespace):
            found = self.words.union(*map(names_of_script, free.scripts)) - self.seen - free.assigned
            self.by_word |= found
            self._enqueue(sorted(found & self._namespace.keys()), None, doubtful=True)
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
        """Encode the arrays that are shared; return the names of the private ones."""
        private = []
        for name in self._arrays:
            found = self._shared.encode(name, self._find(name))
            if found is not None:
                self.values[name] = found
            elif name in self._namespace:
                private.append(name)
            else:
                self._encode(name, None)
        self._arrays = private
        return private

    def copy_arrays(self) -> None:
        """Encode by value the arrays that could not be shared."""
        for name in self._arrays:
            self._encode(name, None)

    def find_ties(self) -> None:
        """Find the tensors that several values contain, such as those of a model and its optimiser."""
        places: dict[int, list[tuple[Value, int]]] = {}
        for value in self._with_tensors:
            tensors = () if value.serialised is None else value.serialised.tensors
            for number, tensor in enumerate(tensors):
                places.setdefault(id(tensor), []).append((value, number))
        for shared, found in enumerate(found for found in places.values() if len(found) > 1):
            names = frozenset[str]().union(*(self.tied.get(v.name, {v.name}) for v, _ in found))
            self.tied.update(dict.fromkeys(names, names))
            for value, number in found:
                value.ties += ((number, shared),)

    def bind(self, bindings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Look names up in `bindings` from now on, and return it."""
        self._namespace = bindings
        return bindings

    def has(self, name: str) -> bool:
        """Whether the notebook still has a name."""
        return name in self._namespace or (name in self.values) or name in self._main

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
                if is_ipythons_function(name, self._namespace.get(name)):
                    continue
                if name in self._namespace or (user is not None and name in self._main):
                    self._queue.append((name, user, doubtful))

    def _find(self, name: str) -> Any:
        # A function of a script's __main__ may be given in another namespace, without the names it uses.
        return self._namespace[name] if name in self._namespace else self._main[name]

    def key_of(self, name: str) -> Hashable:
        """Return the key of a value that the cell does not use, or None if it cannot travel."""
        value = self._find(name)
        try:
            return encode(name, value, self._store, self.broker, self._namespace, frozenset()).memory_key
        except UnpicklableError:
            return None

    def _encode(self, name: str, user: str | None) -> None:
        mentioned = frozenset(self._mentioned)
        try:
            value = encode(name, self._find(name), self._store, self.broker, self._namespace, mentioned)
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
        for cls in serialised.classes:
            identifier = definitions.tracker(cls)
            if identifier not in self.classes:
                definition = encode_class(cls, self._store, self.broker, self._namespace)
                self.classes[identifier] = definition
                if definition.serialised is not None:
                    self._follow(definition.serialised, cls.__qualname__)
