"""all_gather and gather: everybody's value, for everybody or for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbparallel.distributed.collectives.exchange import Exchange, Labels, Movement
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.distributed.slots.fingerprint import Fingerprint
from nbparallel.wire.control import Operation


class Gathering:
    """One rank's side of `all_gather` and `gather` in a group."""

    def __init__(self, exchange: Exchange, ranks: Sequence[int], index: int) -> None:
        self._exchange, self._index, self._ranks = exchange, index, ranks
        self._everybody = range(len(ranks))
        self._all_labels = Labels(Operation.all_gather, ranks)
        self._labels = Labels(Operation.gather, ranks)
        self._labels_of: dict[Operation, Labels] = {}

    def all_gather(
        self, x: Any, outputs: Sequence[AnyArray], deadline_ns: int | None, *, view: bool
    ) -> list[Any]:
        """Return everybody's value in the order of the group; arrays in `outputs`, if there are any."""
        label = self._all_labels((x,), outputs, None, view=view)
        movement = Movement(
            Operation.all_gather, label, (x,), self._everybody, dict(enumerate(outputs)), view=view
        )
        return self._exchange(movement, deadline_ns)

    def tell(self, operation: Operation, shown: Any, value: Any, deadline_ns: int | None) -> list[Any]:
        """Return everybody's value, as one step of an `operation` that the user called with `shown`."""
        label = self.label(operation, shown)
        return self._exchange(Movement(operation, label, (value,), self._everybody, {}), deadline_ns)

    def label(self, operation: Operation, shown: Any) -> Fingerprint:
        """Return the fingerprint of a step of an operation."""
        labels = self._labels_of.get(operation)
        if labels is None:
            labels = self._labels_of[operation] = Labels(operation, self._ranks)
        return labels((shown,), (), None, view=False)

    def gather(
        self, x: Any, root: int, outputs: Sequence[AnyArray], deadline_ns: int | None, *, view: bool
    ) -> list[Any] | None:
        """Return everybody's value on `root`, None elsewhere."""
        label = self._labels((x,), outputs, root, view=view)
        mine = self._index == root
        movement = Movement(
            Operation.gather, label, (x,), self._everybody if mine else (), dict(enumerate(outputs)),
            root=root, to_root=True, view=view,
        )  # fmt: skip
        found = self._exchange(movement, deadline_ns)
        return found if mine else None
