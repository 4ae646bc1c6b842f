"""scatter and all_to_all: one value for each member, from one or from everybody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbparallel.distributed.collectives.exchange import Exchange, Labels, Movement
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.wire.control import Operation


class Scattering:
    """One rank's side of `scatter` and `all_to_all` in a group."""

    def __init__(self, exchange: Exchange, ranks: Sequence[int]) -> None:
        self._exchange = exchange
        self._everybody = range(len(ranks))
        self._labels = Labels(Operation.scatter, ranks)
        self._all_labels = Labels(Operation.all_to_all, ranks)
        self._show_labels = Labels(Operation.broadcast, ranks)

    def scatter(
        self,
        values: Sequence[Any],
        root: int,
        output: AnyArray | None,
        deadline_ns: int | None,
        *,
        view: bool,
    ) -> Any:
        """Return this member's of the values that `root` brings; others bring none."""
        outputs = {} if output is None else {root: output}
        label = self._labels(values, outputs.values(), root, view=view)
        movement = Movement(Operation.scatter, label, values, (root,), outputs, root=root, view=view)
        return self._exchange(movement, deadline_ns)[0]

    def show(self, x: Any, root: int, deadline_ns: int | None, *, mine: bool) -> Any:
        """Return a read-only view of the root's shared array: `broadcast` without a copy."""
        values = (x,) if mine else ()
        label = self._show_labels(values, (), root, view=True)
        movement = Movement(Operation.broadcast, label, values, (root,), {}, root=root, view=True)
        return self._exchange(movement, deadline_ns)[0]

    def all_to_all(
        self, values: Sequence[Any], outputs: Sequence[AnyArray], deadline_ns: int | None, *, view: bool
    ) -> list[Any]:
        """Return what every member brought for this one, in the order of the group."""
        label = self._all_labels(values, outputs, None, view=view)
        movement = Movement(
            Operation.all_to_all, label, values, self._everybody, dict(enumerate(outputs)), view=view
        )
        return self._exchange(movement, deadline_ns)
