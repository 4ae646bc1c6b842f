"""Versions: which version of each of the notebook's names every rank was given.

A table with a row for each rank and name.  Before a cell a rank needs ``values of the cell - its row``
(`RankVersions.needed`), and the row that it will have then replaces this one once it has applied its updates.
Two events are exceptions:

* `NameDelivery.rank_lost`: the rank has no variables any more; its row is deleted;
* `RankVersions.value_changed`: the notebook bound the name again, or changed a list or another mutable value
  in place.  The new value replaces also what the rank has assigned.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from nbparallel.session.names.encoding import Value
from nbparallel.wire.name_updates import NameKind

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
    baselines: dict[str, Baseline] = field(default_factory=dict)
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
