"""Versions: which version of each of the notebook's names every rank was given.

A table with a row for each rank and name.  Before a cell a rank needs ``values of the cell - its row``
(`RankVersions.needed`).  Three events are exceptions:

* `RankVersions.array_moved`: the notebook's array lies in other memory.  It is delivered again, but it is no
  other value: a rank that has assigned the name keeps its own;
* `NameDelivery.rank_lost`: the rank has no variables any more; its row is deleted;
* `RankVersions.value_changed`: the notebook bound the name again, or changed a list or another mutable value
  in place.  The new value replaces also what the rank has assigned.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from nbparallel.session.names.encoding import Value
from nbparallel.wire.name_updates import NameKind

NO_TIES: Mapping[str, frozenset[str]] = MappingProxyType({})
ABSENT = object()
"""The value of a name that the notebook does not have."""


@dataclass(frozen=True, slots=True)
class Version:
    """A value that was delivered, without the value itself."""

    kind: NameKind
    key: Hashable
    """`Value.key`; None: to be delivered again."""
    memory_key: Hashable
    """`Value.memory_key`."""

    def covers(self, value: Value) -> bool:
        """Whether a rank with this version needs nothing more."""
        if self.kind is NameKind.MODULE and value.kind is NameKind.MODULE:
            return self._with_modules(value) == self.key
        return self.key == value.key

    def followed_by(self, value: Value) -> Version:
        """Return the version of a rank that had this one and is given `value`: it keeps submodules."""
        modules = self.kind is value.kind is NameKind.MODULE
        return Version(value.kind, self._with_modules(value) if modules else value.key, value.memory_key)

    def _with_modules(self, value: Value) -> Hashable:
        """Return the key of this module with its submodules and those of `value`."""
        mine, theirs = self.key, value.key
        if isinstance(mine, tuple) and isinstance(theirs, tuple) and mine[0] == theirs[0]:
            return mine[0], mine[1] | theirs[1]
        return theirs


class Baseline:
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


@dataclass(slots=True)
class PendingVersions:
    """What a rank has once it has applied a cell's updates; fields as in `RankVersions`."""

    versions: dict[str, Version | None] = field(default_factory=dict)
    """None: the name is deleted."""
    classes: dict[str, Hashable] = field(default_factory=dict)
    baselines: dict[str, Baseline] = field(default_factory=dict)
    deliveries: dict[str, int] = field(default_factory=dict)
    namespace: int = 0
    others: set[str] | None = None
    """None: as before."""


@dataclass(slots=True)
class RankVersions:
    """The row of one rank."""

    versions: dict[str, Version] = field(default_factory=dict)
    """By name."""
    classes: dict[str, Hashable] = field(default_factory=dict)
    """Keys of class definitions, by the id of the class."""
    baselines: dict[str, Baseline] = field(default_factory=dict)
    """Of names that a cell assigned since they were delivered."""
    deliveries: dict[str, int] = field(default_factory=dict)
    """Of names whose tensors others have as well: with which cell they came; those of one cell are tied."""
    namespace: int = 0
    """Number of the namespace in which the names of the rank's last cell were looked up."""
    others: set[str] = field(default_factory=set)
    """Names that came from other namespaces and that this one did not have; it cannot have deleted them."""
    pending: PendingVersions | None = None
    """Changes that the rank has not confirmed."""

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

    def send(self, value: Value, pending: PendingVersions) -> None:
        """Record in `pending` that a value is on its way."""
        known = self.versions.get(value.name)
        pending.versions[value.name] = (
            Version(value.kind, value.key, value.memory_key) if known is None else known.followed_by(value)
        )

    def confirm(self) -> None:
        """Make the pending changes: the rank has applied its updates (idempotent)."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        for name, version in pending.versions.items():
            self.baselines.pop(name, None)
            self.deliveries.pop(name, None)
            if version is None:
                self.versions.pop(name, None)
            else:
                self.versions[name] = version
        self.namespace = pending.namespace
        if pending.others is not None:
            self.others = pending.others
        self.others.difference_update(pending.versions)
        self.classes.update(pending.classes)
        self.baselines.update(pending.baselines)
        self.deliveries.update(pending.deliveries)

    def array_moved(self, name: str, before: Hashable, after: Hashable) -> None:
        """Have an array delivered from its new memory, without replacing what the rank assigned."""
        known, baseline = self.versions.get(name), self.baselines.get(name)
        if known is not None and known.memory_key == before:
            self.versions[name] = Version(known.kind, None, after)
        if baseline is not None and baseline.key == before:
            self.baselines[name] = Baseline(None, after)

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
