"""Names: which of the notebook's names each rank has, and what it needs before a cell.

Note [what a rank keeps]
------------------------
The kernel remembers for each rank the key of what it delivered, never what the rank did with it.  A value
whose key is the same is not sent again, so a rank keeps what it assigned.  A changed one replaces the
rank's, who says so if it had assigned its own.  A name that a cell assigned without reading it was perhaps
never delivered: the notebook's value of that moment is remembered (`_Baseline`), and as long as it has not
changed the rank is asked to take the value only if it has none of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbparallel.session.names.encoding import SharedArrays, Value
from nbparallel.session.names.free_names import FreeNames, find_free_names, is_ipythons
from nbparallel.session.names.inventory import CellInputs
from nbparallel.session.names.share_arrays import check_shareable, is_array, move_arrays
from nbparallel.sharing import SegmentBroker, Store
from nbparallel.sharing.strategies import registry
from nbparallel.wire.names import NameKind, NameUpdate


@dataclass(frozen=True, slots=True)
class Preparation:
    """What has to happen on each rank before a cell."""

    updates: Mapping[int, tuple[NameUpdate, ...]]
    """Per rank, in the order in which to apply them."""
    notes: tuple[str, ...]
    """Lines for the user."""
    copied_nbytes: Mapping[str, int]
    """Bytes that were copied for this cell, per name; names without any are left out."""
    shared_nbytes: Mapping[str, int]
    """Bytes that the cell's ranks see in shared memory, per name."""
    keep: tuple[object, ...]
    """Hold these until the cell has ended: what the updates refer to stays alive as long."""
    moved_nbytes: Mapping[str, int]
    """Those of `copied_nbytes` that brought an array into shared memory, where it stays."""


class _Baseline:
    """The notebook's value of a name when a rank assigned it; keeps nothing large alive for long."""

    def __init__(self, value: Any, key: Hashable = None) -> None:
        self.key = key
        """`Value.memory_key`, if the name had been delivered before: then a changed content shows as well."""
        self._reference: weakref.ref[Any] | None = None
        self._value: Any = None
        self._changed = False
        if key is not None:
            return
        try:
            self._reference = weakref.ref(value)
        except TypeError:  # numbers, strings, lists …
            self._value = value

    def is_same(self, value: Any) -> bool:
        """Whether the name has been bound to that value ever since."""
        if not self._changed:
            before = self._value if self._reference is None else self._reference()
            if before is value and (self._reference is None or value is not None):
                return True
            if isinstance(value, int | float | str | bytes) and type(before) is type(value):
                return bool(before == value)
            self._changed, self._value, self._reference = True, None, None
        return False


_ABSENT = object()
"""The value of a name that the notebook does not have."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What was delivered under a name."""

    kind: NameKind
    key: Hashable
    memory_key: Hashable

    def is_current(self, value: Value) -> bool:
        """Whether the rank needs nothing more."""
        if self.kind is NameKind.MODULE and value.kind is NameKind.MODULE:
            return self.modules_with(value) == self.key
        return self.key == value.key

    def modules_with(self, value: Value) -> Hashable:
        """Return the key of this module with its submodules and those of `value`."""
        mine, theirs = self.key, value.key
        if isinstance(mine, tuple) and isinstance(theirs, tuple) and mine[0] == theirs[0]:
            return mine[0], mine[1] | theirs[1]
        return theirs


@dataclass(slots=True)
class _Pending:
    """What will have been delivered once the rank says so; fields as in `_Rank`, None: deleted."""

    known: dict[str, _Known | None] = field(default_factory=dict)
    classes: dict[str, Hashable] = field(default_factory=dict)
    baselines: dict[str, _Baseline] = field(default_factory=dict)


@dataclass(slots=True)
class _Rank:
    """What one rank was given."""

    known: dict[str, _Known] = field(default_factory=dict)
    """By name."""
    classes: dict[str, Hashable] = field(default_factory=dict)
    """Checksums of class definitions, by the id of the class."""
    baselines: dict[str, _Baseline] = field(default_factory=dict)
    """Of names that a cell assigned since they were delivered."""
    pending: _Pending | None = None
    """Changes to all this that wait for `NameDelivery.delivered`."""

    def moved(self, name: str, before: Hashable, after: Hashable) -> None:
        """Note that the notebook's array lies elsewhere: to be delivered anew, but no other value."""
        known, baseline = self.known.get(name), self.baselines.get(name)
        if known is not None and known.memory_key == before:
            self.known[name] = _Known(known.kind, None, after)
        if baseline is not None and baseline.key == before:
            self.baselines[name] = _Baseline(None, after)


class NameDelivery:
    """How the notebook's names reach the ranks of one session.

    Parameters
    ----------
    store : Store
        The kernel's.
    broker : SegmentBroker, optional
        The session's.
    transform : callable, optional
        Turns IPython's syntax into Python; by default that of a plain IPython.

    Notes
    -----
    Thread-safe; two cells that run at once must be on different ranks.
    """

    def __init__(
        self,
        store: Store,
        broker: SegmentBroker | None = None,
        *,
        transform: Callable[[str], str] | None = None,
    ) -> None:
        self._store, self._broker, self._transform = store, broker, transform
        self._arrays = SharedArrays(store, broker)
        self._ranks: dict[int, _Rank] = {}
        self._namespace: MutableMapping[str, Any] | None = None
        self._lock = threading.RLock()

    def prepare(
        self,
        source: str,
        namespace: MutableMapping[str, Any],
        ranks: Sequence[int],
        share: Sequence[str] = (),
    ) -> Preparation:
        """Find what the ranks need for a cell.

        Private arrays among it are moved into shared memory and their names in `namespace` re-bound.
        Call `delivered` for each rank that has applied its updates; those of the others are sent again.

        Parameters
        ----------
        share : sequence of str
            Arrays that ranks may write from now on.

        Raises
        ------
        SyntaxError
            The cell does not compile.
        UnpicklableError
            A value that the cell uses cannot travel.  Nothing is sent.
        """
        free = find_free_names(source, self._transform)
        with self._lock:
            notes = list(self.share(share, namespace)) if share else []
            inventory = CellInputs(self._store, self._broker, self._arrays, namespace)
            inventory.gather(free)
            notes += inventory.notes
            private = inventory.look_at_arrays()
            if private and registry.find_strategy().shares:
                notes += self._move(private, namespace, inventory.copied)
                inventory.look_at_arrays()
            inventory.copy_arrays()
            updates = {rank: self._updates(rank, inventory, free, namespace) for rank in ranks}
            self._namespace = namespace
            return Preparation(updates, tuple(notes), *inventory.accounts(), dict(inventory.copied))

    def share(self, names: Iterable[str], namespace: MutableMapping[str, Any]) -> tuple[str, ...]:
        """Move arrays into shared memory and let the ranks write them; return lines for the user.

        Raises
        ------
        UnknownNameError
            The notebook has no such name.
        ObjectArrayError
            It is no array, or one of Python objects.
        ReadOnlyArrayError
            The notebook's own array is flagged read-only.
        """
        with self._lock:
            names = list(names)
            for name in names:
                check_shareable(name, namespace)
            notes = self._move(names, namespace, {}, for_all=True)
            for name in names:
                self._store.allow_write(namespace[name])
            return tuple(notes)

    @property
    def namespace(self) -> Mapping[str, Any] | None:
        """Where the last cell's names were looked up; None before the first."""
        return self._namespace

    def delivered(self, rank: int) -> None:
        """Note that a rank has applied what the last `prepare` gave it."""
        with self._lock:
            state = self._ranks.get(rank)
            if state is None or state.pending is None:
                return
            pending, state.pending = state.pending, None
            for name, known in pending.known.items():
                state.baselines.pop(name, None)
                if known is None:
                    state.known.pop(name, None)
                else:
                    state.known[name] = known
            state.classes.update(pending.classes)
            state.baselines.update(pending.baselines)

    def forget(self, rank: int) -> None:
        """Note that a rank has no variables any more: it was restarted."""
        with self._lock:
            self._ranks.pop(rank, None)

    def forget_all(self) -> None:
        """Note that no rank has variables any more."""
        with self._lock:
            self._ranks.clear()
            self._namespace = None

    def connect(self, broker: SegmentBroker | None) -> None:
        """Register arrays with `broker` from now on: the session's processes are new."""
        with self._lock:
            if broker is not self._broker:
                self._broker = broker
                self._arrays = SharedArrays(self._store, broker)
                self.forget_all()

    def _move(
        self,
        names: Sequence[str],
        namespace: MutableMapping[str, Any],
        copied: dict[str, int],
        *,
        for_all: bool = False,
    ) -> list[str]:
        """Move private arrays into shared memory; the names stay unchanged in the sense of the rules."""
        if not names:
            return []
        unchanged = [
            (state, name)
            for state in self._ranks.values()
            for name, baseline in state.baselines.items()
            if baseline.key is None and baseline.is_same(namespace.get(name, _ABSENT))
        ]
        packed = self._packed_keys(namespace) if for_all else {}
        moves = move_arrays(names, namespace, self._store, for_all=for_all)
        for state, name in unchanged:
            state.baselines[name] = _Baseline(namespace.get(name, _ABSENT))
        for name, before in packed.items():
            moved = self._arrays.look_at(name, namespace[name])
            if moved is not None and moved.memory_key != before:
                for state in self._ranks.values():
                    state.moved(name, before, moved.memory_key)
        copied.update(moves.copied)
        return moves.notes

    def _packed_keys(self, namespace: Mapping[str, Any]) -> dict[str, Hashable]:
        """Return the memory keys of delivered arrays that have to be moved before ranks may write them."""
        keys: dict[str, Hashable] = {}
        for name in {name for state in self._ranks.values() for name in (*state.known, *state.baselines)}:
            value = namespace.get(name, _ABSENT)
            if is_array(value) and self._store.packed_read_only(value) is not None:
                seen = self._arrays.look_at(name, value)
                if seen is not None:
                    keys[name] = seen.memory_key
        return keys

    def _updates(
        self, rank: int, inventory: CellInputs, free: FreeNames, namespace: MutableMapping[str, Any]
    ) -> tuple[NameUpdate, ...]:
        state = self._ranks.setdefault(rank, _Rank())
        pending = state.pending = _Pending()
        updates = []
        for identifier, definition in inventory.classes.items():
            if state.classes.get(identifier) != definition.key:
                updates.append(definition.update(self._store, self._broker, unless_assigned=False))
                inventory.sent.append(definition)
                pending.classes[identifier] = definition.key
        for name, value in inventory.values.items():
            known = state.known.get(name)
            if known is not None and known.is_current(value):
                continue
            keeps = _rank_keeps(known, state.baselines.get(name), value, namespace.get(name, _ABSENT))
            updates.append(value.update(self._store, self._broker, unless_assigned=keeps))
            inventory.sent.append(value)
            key = value.key
            if known is not None and known.kind is value.kind is NameKind.MODULE:
                key = known.modules_with(value)
            pending.known[name] = _Known(value.kind, key, value.memory_key)
        if namespace is self._namespace:
            for name in state.known:
                if not inventory.has(name):
                    updates.append(NameUpdate(name, NameKind.DELETE))
                    pending.known[name] = None
                    pending.baselines[name] = _Baseline(_ABSENT)
        for name in (free.assigned | inventory.assigned) - pending.known.keys():
            if not is_ipythons(name) and name not in inventory.values:
                pending.baselines[name] = self._baseline(name, state, inventory, namespace)
        return tuple(updates)

    def _baseline(
        self, name: str, state: _Rank, inventory: CellInputs, namespace: Mapping[str, Any]
    ) -> _Baseline:
        if name not in namespace:
            return _Baseline(_ABSENT)
        key = inventory.key_of(name) if name in state.known else None
        return _Baseline(None if key is not None else namespace[name], key)


def _rank_keeps(known: _Known | None, baseline: _Baseline | None, value: Value, current: Any) -> bool:
    """Whether a rank that assigned the name itself is to keep its own value."""
    if baseline is not None:
        return baseline.key == value.memory_key if baseline.key is not None else baseline.is_same(current)
    if known is None:
        return True  # nobody saw it assign the name; if it did, the notebook has not changed it since
    return known.kind is value.kind and known.memory_key == value.memory_key  # only who may write changed
