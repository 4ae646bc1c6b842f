"""A rank's namespace: what the notebook delivered, and what the rank assigned itself.

A name is the rank's own if it is bound to something else than what was delivered under it.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections import ChainMap
from collections.abc import Iterable, Mapping, Set
from operator import itemgetter
from types import FunctionType, ModuleType, NoneType
from typing import Any, cast

import numpy as np

from nbparallel.errors import UnpicklableError
from nbparallel.sharing import SegmentBroker, Store
from nbparallel.sharing.memory.array_layout import span
from nbparallel.transfer.pickling import content_digest, loads
from nbparallel.transfer.tensor_pickling import Ties
from nbparallel.transfer.variable_info import advice_to_bring
from nbparallel.wire.inspection import Origin
from nbparallel.wire.name_updates import ArrayHandle, NameKind, NameUpdate, UsageHints

MISSING: Any = object()
"""Nothing was delivered under the name, or it is gone."""


_UNCHANGING = (int, float, complex, str, bytes, NoneType, FunctionType, type)
"""Kinds of delivered values that a rank does not change in place."""
_SIZED = (list, dict, set, bytearray)
"""Kinds of which one that is too large for a digest is seen to grow or shrink."""


class RankNames:
    """The names of one rank.

    Parameters
    ----------
    namespace : dict
        The rank's globals.  What is in it now is predefined: the notebook's value of such a name replaces
        it, and it comes back when the notebook deletes the name.
    defaults : mapping, optional
        More predefined names, as they are at any moment.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        store: Store,
        broker: SegmentBroker | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._namespace, self._store, self._broker = namespace, store, broker
        self._defaults: Mapping[str, Any] = ChainMap(
            cast(dict[str, Any], {} if defaults is None else defaults), dict(namespace)
        )
        self._delivered: dict[str, Any] = {}
        """What was delivered under each name that was bound to it at the last end of a task."""
        self._fingerprints: dict[str, bytes | int] = {}
        """Of delivered values that the rank can change in place, as they were when they came."""
        self._noted: set[str] = set()
        """Names that a line said the rank has changed, since they came."""
        self._handles: dict[str, ArrayHandle] = {}
        self.attached: weakref.WeakValueDictionary[ArrayHandle, np.ndarray[Any, Any]] = (
            weakref.WeakValueDictionary()
        )
        """Attached arrays by their handles."""
        # An instance may come long after the last one died, and the kernel does not send its class again.
        self._classes: dict[int, type] = {}

    def is_own(self, name: str) -> bool:
        """Whether this rank assigned a name itself."""
        value = self._namespace.get(name, MISSING)
        return (
            value is not MISSING
            and value is not self._delivered.get(name, MISSING)
            and value is not self._defaults.get(name, MISSING)
        )

    def is_delivered_array(self, name: str) -> bool:
        """Whether the notebook delivered a shared array under a name last."""
        return name in self._handles

    def origin(self, name: str) -> Origin:
        """Return the origin of a name on this rank."""
        if self.is_own(name):
            return Origin.OWN
        return Origin.SHARED if name in self._handles else Origin.COPIED

    def is_only_here(self, name: str) -> bool:
        """Whether something is lost if this rank exits, as far as is known.

        Modules can be imported again, and what the notebook delivered it can deliver again: unless it is an
        object that the rank has changed in place, or so large that it is not known whether it has.
        """
        value = self._namespace[name]
        if isinstance(value, ModuleType):
            return False
        if self.is_own(name):
            return True
        if name in self._handles or isinstance(value, _UNCHANGING):
            return False
        return self.is_as_delivered(name) is not True

    def apply(self, updates: Iterable[NameUpdate]) -> tuple[str, ...]:
        """Make the changes, all or none; return lines for the user.

        Raises
        ------
        UnpicklableError
            A value could not be rebuilt, or a module not imported; see the cause.
        SegmentLostError, InvalidHandleError
            An array could not be attached.
        """
        values: dict[str, Any] = {}
        copied: list[str] = []
        handles: dict[str, ArrayHandle] = {}
        deleted = []
        tensors: dict[int, Any] = {}
        for update in updates:
            if update.kind is NameKind.DELETE:
                deleted.append(update.name)
            elif update.kind is NameKind.DEFINITION:
                cls = self._load(update, tensors)
                self._classes[id(cls)] = cls
            elif update.unless_assigned and self.is_own(update.name):
                continue
            elif update.kind is NameKind.ARRAY and update.handle is not None:
                values[update.name] = self._attach(update.handle)
                handles[update.name] = update.handle
            elif update.kind is NameKind.MODULE:
                values[update.name] = _import(update)
            else:
                values[update.name] = self._load(update, tensors)
                copied.append(update.name)
        notes = [
            f"{name} was replaced: the notebook has changed it since this rank assigned it"
            for name, value in values.items()
            if self.is_own(name) and self._namespace[name] is not value
        ]
        for names, what, done in ((values, "replaced", "changed"), (deleted, "removed", "deleted")):
            notes += [
                f"{name} was {what}: the notebook has {done} it, and what this rank changed in it is lost"
                for name in names
                if self._is_changed_in_place(name)
            ]
        for name in values:
            self._handles.pop(name, None)
        self._handles.update(handles)
        self._delivered.update(values)
        self._namespace.update(values)
        for name in deleted:
            self._delete(name)
        for name in (*values, *deleted):
            self._fingerprints.pop(name, None)
            self._noted.discard(name)
        for name in copied:
            if not isinstance(values[name], _UNCHANGING) and (found := self._fingerprint(values[name])):
                self._fingerprints[name] = found
        return tuple(notes)

    def own(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of `names` that this rank assigned itself."""
        return frozenset(filter(self.is_own, names))

    def describe_kept(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return a line, once, for each of `names` under which the rank has what an earlier cell assigned.

        Not for modules: an import says what the name is, in the cell itself.
        """
        kept = [
            name
            for name in names
            if name not in self._noted
            and self.is_own(name)
            and not isinstance(self._namespace[name], ModuleType)
        ]
        self._noted.update(kept)
        return tuple(
            f"{name} is what an earlier cell assigned on this rank, not the notebook's: `del {name}` in a "
            "cell for ranks brings the notebook's back"
            for name in kept
        )

    def describe_changed(self, uses: UsageHints, own: Set[str]) -> tuple[str, ...]:
        """Return a line, once, for each of the notebook's objects that a cell changed only here.

        `own` are the names that were the rank's own before the cell.
        """
        changed = [name for name in uses.augmented if name not in own and self.is_own(name)]
        changed += [
            name
            for name in sorted({*uses.touched, *uses.augmented}.difference(changed, self._noted))
            if self._is_changed_in_place(name)
        ]
        self._noted.update(changed)
        return tuple(
            f"this rank changed {name}, and the notebook's {name} is as it was: "
            f"{advice_to_bring(name, self._namespace[name])}"
            for name in changed
        )

    def is_as_delivered(self, name: str) -> bool | None:
        """Whether a name is bound to what was delivered, unchanged; None: a look would take long."""
        if self.is_own(name) or isinstance(self._namespace.get(name), _UNCHANGING):
            return not self.is_own(name)
        is_known = isinstance(self._fingerprints.get(name), bytes)
        return not self._is_changed_in_place(name) if is_known else None

    def _is_changed_in_place(self, name: str) -> bool:
        """Whether a name is bound to what was delivered, and that was changed since."""
        if self.is_own(name) or (value := self._namespace.get(name, MISSING)) is MISSING:
            return False
        before = self._fingerprints.get(name)
        return before is not None and self._fingerprint(value) != before

    def _fingerprint(self, value: Any) -> bytes | int | None:
        """Return what changes with an object; of one that is too large its length, if it surely has one."""
        digest = content_digest(value, self._store, self._namespace)
        return len(value) if digest is None and type(value) in _SIZED else digest

    def name_of(self, array: np.ndarray[Any, Any], variable: str, *, whole: bool = False) -> str | None:
        """Return the notebook's name for the memory of `array`, if it was delivered read-only.

        `variable` is what the code calls it; of several names that one is preferred, then the largest.  With
        `whole` only the name of the very array counts, not that of one of which it is a part.
        """
        place = self._store.location(array)
        if place is None:
            return None
        found = []
        for name, handle in self._handles.items():
            if handle.writable or handle.segment != place.segment:
                continue
            start, stop = span(handle)
            is_it = self._delivered.get(name) is array
            if start < place.stop and place.start < stop and (is_it or not whole):
                same = name == variable and is_it
                found.append((same, stop - start, name))
        return max(found, key=itemgetter(0, 1))[2] if found else None

    def release_unbound(self) -> None:
        """Release delivered values whose names the rank has deleted or bound to something else."""
        self._delivered = {
            name: value
            for name, value in self._delivered.items()
            if self._namespace.get(name, MISSING) is value
        }

    def _attach(self, handle: ArrayHandle) -> np.ndarray[Any, Any]:
        # Two names of the notebook for one array are two names for one array here too.
        key = handle if type(handle.dtype) is str else handle._replace(dtype=repr(handle.dtype))
        array = self.attached.get(key)
        if array is None:
            array = self._store.attach(handle, writable=handle.writable, broker=self._broker)
            if not handle.writable:
                array.setflags(write=False)
            self.attached[key] = array
        return array

    def _load(self, update: NameUpdate, tensors: dict[int, Any]) -> Any:
        # The kernel identifies classes: one that was defined again is another, however alike.
        return loads(
            update.data,
            self._store,
            broker=self._broker,
            main_globals=self._namespace,
            name=update.name,
            match_classes=False,
            ties=Ties(dict(update.ties), tensors),
        )

    def _delete(self, name: str) -> None:
        own = self.is_own(name)
        self._delivered.pop(name, None)
        self._handles.pop(name, None)
        if own:
            return
        if name in self._defaults:
            self._namespace[name] = self._defaults[name]
        else:
            self._namespace.pop(name, None)


def _import(update: NameUpdate) -> ModuleType:
    """Import a module by name, and its submodules as far as they can be."""
    first, *submodules = update.modules
    try:
        importlib.import_module(first)
    except (Exception, SystemExit) as error:
        raise UnpicklableError(
            f"{update.name!r} is the module {first!r}, which a rank cannot import "
            f"({type(error).__name__}: {error}); install it, or put its folder on sys.path, and restart "
            "the ranks"
        ) from error
    for name in submodules:
        try:
            importlib.import_module(name)
        except ImportError:  # its package made it in another way; using it raises
            continue
    return sys.modules[first]
