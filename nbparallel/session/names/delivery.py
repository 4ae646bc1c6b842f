"""Delivery of the notebook's names: what each rank needs before a cell, and how it gets there.

Pass 1 (`CellInputs.gather`, `encode_arrays`) finds the values that a cell uses, and private arrays among
them, which are moved into shared memory.  Pass 2 encodes: an array that moved in between is encoded as a
handle.

Note [what a rank keeps]
------------------------
The notebook records for each rank the version that it delivered (`RankVersions`), never what the rank did
with it.  A value of the same version is not sent again, so a rank keeps what it assigned.  A changed one
replaces the rank's value, with a note if the rank had assigned its own.  A name that a cell assigned
without reading it was perhaps never delivered: the notebook's value of that moment is recorded
(`AssignedFrom`), and as long as it has not changed the rank takes the value only if it has none of its own.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbparallel.errors import NotAnArrayError, StaleWorkError
from nbparallel.session.names.cell_inputs import (
    CellInputs,
    check_shareable,
    is_array,
    memmap_notes,
    move_arrays,
)
from nbparallel.session.names.encoding import ABSENT, AssignedFrom, RankVersions, SharedArrays, Version
from nbparallel.session.names.free_names import FreeNames, find_free_names, is_ipythons
from nbparallel.sharing import SegmentBroker, Store
from nbparallel.sharing.strategies import registry
from nbparallel.sharing.tensor_storage import (
    are_writable,
    check_movable,
    holds_tensors,
    is_dense,
    move_tensors,
    tensors_in,
)
from nbparallel.sharing.tensors import is_tensor
from nbparallel.transfer.pickle_format import BY_VALUE
from nbparallel.transfer.pickling import Serialised
from nbparallel.wire.name_updates import NameKind, NameUpdate, UsageHints
from nbparallel.wire.units import size_text

# Uses of names by a cell about which ranks may have to say something.

PREDEFINED_NAMES = frozenset((
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "dist", "gather", "irecv", "isend",
    "nbp", "rank", "recv", "reduce", "reduce_scatter", "rng", "scatter", "send", "sendrecv", "world_size",
))  # fmt: skip
"""What a rank finds defined without a line of the user's.

Written out, because the notebook would otherwise load all of `nbparallel.distributed` in its first cell, a
fifth of the time until it runs; a test compares it with the operations.
"""


def find_usage_hints(free: FreeNames, inputs: CellInputs, earlier: set[str]) -> UsageHints | None:
    """Return the uses of a cell with these names and values; None if there are none.

    `earlier` are the names that earlier cells have assigned; those of this one are added.
    """
    predefined = PREDEFINED_NAMES & (inputs.seen | free.assigned) - free.changed.deleted
    values = inputs.values
    touched = [n for n in free.changed.touched if n in values and values[n].kind is NameKind.OBJECT]
    augmented = [name for name in free.changed.augmented if name in values]
    kept = sorted((earlier & values.keys()) - free.assigned - inputs.by_word)
    earlier |= free.assigned
    found = sorted(predefined), touched, augmented, kept
    return UsageHints(*map(tuple, found)) if any(found) else None


# What is known of a cell's names before it is sent: what it uses, and what each rank then needs.


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
    """To be kept alive until the cell has ended: the updates refer to it."""
    moved_nbytes: Mapping[str, int]
    """Those of `copied_nbytes` that moved an array into shared memory, where it stays."""
    uses: UsageHints | None
    """What ranks are to look at when the cell has ended."""
    after: Mapping[int, RankVersions]
    """What each rank has once it has applied its updates."""
    costly: frozenset[str]
    """Names that `notes` have a line about, which is shown once."""


@dataclass(slots=True)
class GatheredNames:
    """What a cell uses of the notebook; what each rank needs of it is found when the cell is sent."""

    free: FreeNames
    """The cell's names."""
    inputs: CellInputs
    """Their values."""
    notes: list[str]
    """Lines for the user."""
    namespace: MutableMapping[str, Any]
    """Where they were looked up."""
    number: int = field(default_factory=itertools.count(1).__next__)
    """Of this cell among all."""


# Moves the memory of a notebook's tensors and modules into shared memory, in place.


def share_tensors_of(names: Sequence[str], namespace: MutableMapping[str, Any], store: Store) -> list[str]:
    """Move the tensors and modules of some names into shared memory that ranks may write.

    Other names of the notebook for tensors over the same memory move with them.

    Returns
    -------
    list of str
        Lines for the user about what still views the old memory.

    Raises
    ------
    NotAnArrayError
        A tensor cannot lie in shared memory; nothing has changed.
    """
    owners: dict[int, str] = {}
    tensors: dict[int, Any] = {}
    before: dict[int, tuple[int, int]] = {}
    for name in names:
        for tensor in tensors_in(namespace[name]):
            try:
                check_movable(tensor)
            except NotAnArrayError as error:
                raise NotAnArrayError(f"{name!r} cannot be shared: {error}") from error.__cause__
            owners.setdefault(tensor.untyped_storage()._cdata, name)
            tensors[id(tensor)] = tensor
            before[id(tensor)] = _address(tensor)
    for value in list(namespace.values()):
        if is_tensor(value) and is_dense(value) and value.untyped_storage()._cdata in owners:
            tensors[id(value)] = value
    names_of = {identity: owners.get(t.untyped_storage()._cdata, "") for identity, t in tensors.items()}
    held: dict[str, int] = {}
    for tensor, nbytes in move_tensors(tensors.values(), store):
        held[names_of[id(tensor)]] = held.get(names_of[id(tensor)], 0) + nbytes
    notes = [
        f"{name} moved into shared memory, and a list, a view or another object still has the old memory "
        f"({size_text(nbytes)}): what you change in one is not seen in the other"
        for name, nbytes in held.items()
    ]
    moved = [(*place, names_of[i]) for i, place in before.items() if _address(tensors[i]) != place]
    return notes + [
        f"{array} is an array over the old memory of {name}: what you change in one is not seen in the other"
        for array, value in list(namespace.items())
        if is_array(value)
        for name in sorted({name for start, stop, name in moved if start <= value.ctypes.data < stop})
    ]


def _address(tensor: Any) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


LATER = "; what you assign to the name later is read-only again"
SMALL = 1 << 20
"""Bytes of an object that a cell in a queue takes with it even if the ranks have it now."""


class NameDelivery:
    """Delivers the notebook's names to the ranks of one session.

    Parameters
    ----------
    store : Store
        The notebook's.
    broker : SegmentBroker, optional
        The session's.

    Notes
    -----
    Thread-safe; two cells that run at the same time must be on different ranks.
    """

    def __init__(
        self,
        store: Store,
        broker: SegmentBroker | None = None,
    ) -> None:
        self._store, self._broker = store, broker
        self._arrays = SharedArrays(store, broker)
        self._ranks: dict[int, RankVersions] = {}
        self._assigned: set[str] = set()
        """Names that cells have assigned."""
        self._costly: set[str] = set()
        """Names that a line was shown about."""
        self._unshown: list[str] = []
        """Lines on what was done for a cell that could not be prepared then: the next one has them."""
        self.namespace: Mapping[str, Any] | None = None
        """Where the last cell's names were looked up; None before the first."""
        self._namespace_number = 0
        self._lock = threading.RLock()
        self.moving: tuple[str, int] | None = None
        """What is being moved or copied into shared memory, and its bytes; from any thread."""
        self.copies: dict[int, tuple[str, weakref.ref[Any]]] = {}
        """Segments that hold copies for ranks: the name, and the memory as long as this process uses it."""

    def gather(
        self,
        source: str,
        namespace: MutableMapping[str, Any],
        share: Sequence[str] = (),
        draw: Sequence[str] = (),
    ) -> GatheredNames:
        """Find what a cell uses, and move private arrays among it into shared memory, bound anew.

        Parameters
        ----------
        share : sequence of str
            Arrays that ranks may write from now on.
        draw : sequence of str
            Names that count as used.

        Raises
        ------
        SyntaxError
            The cell does not compile.
        UnpicklableError
            A value that the cell uses cannot travel.  Nothing is sent.
        """
        free = find_free_names(source).with_drawn(draw)
        with self._lock:
            notes = self._unshown
            notes += self.share(share, namespace) if share else ()
            inputs = CellInputs(self._store, self._broker, self._arrays, namespace)
            inputs.gather(free, self._is_own)
            private = inputs.encode_arrays()
            if private and registry.find_strategy().shares and self._store is not BY_VALUE:
                notes += self._move(private, namespace, inputs.copied)
                inputs.encode_arrays()
            inputs.complete()
            self._unshown = []
            return GatheredNames(free, inputs, [*notes, *inputs.notes], namespace)

    def freeze(self, names: GatheredNames, ranks: Sequence[int]) -> None:
        """Make `names` independent of what the notebook does from now on, until they are delivered.

        Objects are copied that `ranks` do not have now; shared arrays stay the same memory.
        """
        with self._lock:
            names.inputs.namespace = dict(names.namespace)
            classes, values = names.inputs.classes, names.inputs.values.values()
            wanted = [value for value in values if value.serialised and _nbytes(value.serialised) <= SMALL]
            for row in [self._ranks.get(rank, RankVersions()) for rank in ranks]:
                wanted += [*row.needed_definitions(classes), *row.needed(values, names.inputs.tied)]
            for value in wanted:
                value.update(self._store, self._broker, unless_assigned=False)

    def deliver(self, names: GatheredNames, ranks: Sequence[int]) -> Preparation:
        """Find what each rank needs of what a cell uses.

        Call `delivered` for each rank that has applied its updates; those of other ranks are sent again.

        Raises
        ------
        StaleWorkError
            The cell waited in a queue, and ranks have lost what it was going to find on them.
        """
        with self._lock:
            inputs = names.inputs
            if inputs.broker is not self._broker:
                raise StaleWorkError(
                    "the ranks were started again while this cell waited for its turn: run it again"
                )
            if names.namespace is not self.namespace:
                self.namespace, self._namespace_number = names.namespace, self._namespace_number + 1
            again = {name for rank in ranks for name in self._sent_for_ties(rank, inputs)}
            updates = {rank: self._updates(rank, names) for rank in ranks}
            costly = inputs.costly_notes(self._costly)
            notes = [*names.notes, *costly.values()]
            notes += [
                f"{name} was sent again: it has tensors in common with {', '.join(others)}"
                for name in sorted(again)
                if (others := sorted(inputs.tied[name] - again))
            ]
            notes += memmap_notes({value.name for value in inputs.sent}, inputs.namespace)
            uses = find_usage_hints(names.free, inputs, self._assigned)
            after = {rank: row for rank in ranks if (row := self._ranks[rank].after) is not None}
            accounts = *inputs.accounts(), dict(inputs.copied)
            return Preparation(updates, tuple(notes), *accounts, uses, after, frozenset(costly))

    def share(self, names: Iterable[str], namespace: MutableMapping[str, Any]) -> tuple[str, ...]:
        """Move arrays, tensors and modules into shared memory that ranks may write; return lines.

        Raises
        ------
        UnknownNameError
            The notebook has no such name.
        NotAnArrayError, ObjectArrayError
            It is none of them; it is an array of Python objects.
        ReadOnlyArrayError
            The notebook's own array is flagged read-only.
        """
        with self._lock:
            names = list(names)
            for name in names:
                check_shareable(name, namespace)
            opened = [name for name in dict.fromkeys(names) if not self._all_may_write(namespace[name])]
            closed = self._read_only(namespace) - set(names)
            tensors = [name for name in names if holds_tensors(namespace[name])]
            arrays = [name for name in names if name not in tensors]
            notes = share_tensors_of(tensors, namespace, self._store) if tensors else []
            notes += self._move(arrays, namespace, {}, for_all=True)
            for name in arrays:
                self._store.allow_write(namespace[name])
            if opened:
                also = sorted(closed - self._read_only(namespace))
                are = "is" if len(also) == 1 else "are"
                same = f", and {', '.join(also)}, which {are} the same memory" if also else ""
                notes.append(f"ranks may write {', '.join(opened)} from now on{same}{LATER}")
            return tuple(notes)

    def _read_only(self, namespace: Mapping[str, Any]) -> set[str]:
        """Return the names of the user's arrays that ranks may not write."""
        return {
            name
            for name, value in namespace.items()
            if is_array(value) and not is_ipythons(name) and not self._all_may_write(value)
        }

    def _all_may_write(self, value: Any) -> bool:
        if holds_tensors(value):
            return are_writable(value, self._store)
        place = self._store.location(value)
        return place is not None and place.for_all

    def delivered(self, rank: int, preparation: Preparation) -> None:
        """Record that a rank has applied its updates of a preparation; one that was never sent counts not."""
        with self._lock:
            row, after = self._ranks.get(rank), preparation.after.get(rank)
            if row is not None and after is not None and row.after is after:
                self._ranks[rank] = after
                self._costly |= preparation.costly

    def rank_lost(self, rank: int) -> None:
        """Record that a rank has no variables any more: its process has ended."""
        with self._lock:
            self._ranks.pop(rank, None)

    def renew(self, names: Iterable[str], namespace: Mapping[str, Any]) -> None:
        """Have values sent again: nothing to do where ranks have the same memory, and not copies."""

    def all_ranks_lost(self) -> None:
        """Record that no rank has variables any more."""
        with self._lock:
            self._ranks.clear()
            self.namespace = None

    def connect(self, broker: SegmentBroker | None) -> None:
        """Register arrays with `broker` from now on: the session's processes are new."""
        with self._lock:
            if broker is not self._broker:
                self._broker = broker
                self._arrays = SharedArrays(self._store, broker)
                self.all_ranks_lost()

    def _move(
        self,
        names: Sequence[str],
        namespace: MutableMapping[str, Any],
        copied: dict[str, int],
        *,
        for_all: bool = False,
    ) -> list[str]:
        """Move private arrays into shared memory; that is no change of their values."""
        if not names:
            return []
        unchanged = [
            (row.baselines, name)
            for known in self._ranks.values()
            for row in (known, known.after or RankVersions())
            for name, baseline in row.baselines.items()
            if baseline.key is None and baseline.is_same(namespace.get(name, ABSENT))
        ]
        try:
            notes = move_arrays(names, namespace, self._store, copied, for_all=for_all, on_move=self._on_move)
        finally:
            self.moving = None
        for baselines, name in unchanged:
            baselines[name] = AssignedFrom(namespace.get(name, ABSENT))
        return notes

    def _on_move(self, name: str, nbytes: int) -> None:
        self.moving = name, nbytes

    def _is_own(self, name: str, value: Any) -> bool:
        """Whether some rank has assigned a name since the notebook bound it to `value`."""
        baselines = (row.baselines.get(name) for row in self._ranks.values())
        return any(known is not None and known.key is None and known.is_same(value) for known in baselines)

    def _updates(self, rank: int, names: GatheredNames) -> tuple[NameUpdate, ...]:
        """Return what a rank has to do before the cell; `delivered` confirms it."""
        inputs, namespace = names.inputs, names.inputs.namespace
        row = self._ranks.setdefault(rank, RankVersions())
        after, settled = row.begin_next(), names.free.changed.deleted & names.free.assigned
        definitions = row.needed_definitions(inputs.classes)
        after.classes.update({identifier: value.key for identifier, value in inputs.classes.items()})
        needed = row.needed(inputs.values.values(), inputs.tied)
        lost = [value.name for value in (*definitions, *needed) if value.is_only_referred_to]
        if namespace is not names.namespace and lost:  # the cell waited in a queue
            raise StaleWorkError(
                f"rank {rank} has lost {', '.join(lost)} while this cell waited for its turn: run it again"
            )
        updates = [value.update(self._store, self._broker, unless_assigned=False) for value in definitions]
        for value in needed:
            keeps = not row.value_changed(value, namespace.get(value.name, ABSENT))
            size = sum(buffer.nbytes for buffer in value.serialised.buffers) if value.serialised else 0
            if value.is_only_referred_to and size > SMALL:
                self.moving = value.name, size
            try:
                updates.append(value.update(self._store, self._broker, unless_assigned=keeps))
            finally:
                self.moving = None
            if size and value.pickled is not None and value.pickled.segments:
                memory = weakref.ref(value.pickled.keep[-1])
                self.copies[value.pickled.segments[-1]] = f"{value.name} (copy)", memory
            after.set_version(value.name, Version(value.kind, value.key, value.memory_key))
            if value.name in inputs.tied:
                after.deliveries[value.name] = names.number
        inputs.sent += [*definitions, *needed]
        for name in settled:
            after.set_version(name, None)  # it is sent again
        after.namespace = self._namespace_number
        if row.namespace != self._namespace_number:
            after.others = {name for name in after.versions if not inputs.has(name)}
        else:
            gone = [name for name in row.versions if not inputs.has(name) and name not in row.others]
            for name in gone:
                updates.append(NameUpdate(name, NameKind.DELETE))
                after.set_version(name, None)
                after.baselines[name] = AssignedFrom(ABSENT)
            settled = settled.union(gone)
        for name in (names.free.assigned | inputs.assigned) - settled:
            if not is_ipythons(name) and name not in inputs.values:
                after.baselines[name] = self._baseline(name, row, inputs, namespace)
        return tuple(updates)

    def _sent_for_ties(self, rank: int, inputs: CellInputs) -> list[str]:
        """Return the names that a rank has and needs again, so that their tensors are those of others."""
        row = self._ranks.get(rank)
        if row is None or not inputs.tied:
            return []
        values = inputs.values.values()
        new = {value.name for value in row.needed(values)}
        return [v.name for v in row.needed(values, inputs.tied) if v.name not in new]

    def _baseline(
        self, name: str, row: RankVersions, inputs: CellInputs, namespace: Mapping[str, Any]
    ) -> AssignedFrom:
        if name not in namespace:
            return AssignedFrom(ABSENT)
        known = row.versions.get(name)
        key = None if known is None or known.kind is NameKind.ARRAY else inputs.key_of(name)
        return AssignedFrom(None if key is not None else namespace[name], key)


def _nbytes(serialised: Serialised) -> int:
    return serialised.stream.nbytes + sum(buffer.nbytes for buffer in serialised.buffers)
