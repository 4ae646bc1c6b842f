"""RankValues: one value of every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RemoteValue:
    """Stands for a value that stayed on its rank because it cannot be pickled."""

    text: str
    """The value as text."""
    reason: str
    """Why it could not travel."""

    def __repr__(self) -> str:
        return self.text or f"<a value that stayed on its rank: {self.reason}>"


class RankValues:
    """The values of one name or expression, one of each rank; a snapshot.

    Indexed by rank (`KeyError` for a rank that took no part); iterates, compares and prints as a list in
    rank order.

    >>> parts = RankValues({0: 10, 2: 12})
    >>> parts[2], list(parts), parts == [10, 12], parts
    (12, [10, 12], True, [10, 12])
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[int, Any]) -> None:
        self._values = dict(sorted(values.items()))

    def __getitem__(self, rank: int) -> Any:
        try:
            return self._values[rank]
        except KeyError:
            has = ", ".join(map(str, self._values)) or "none"
            raise KeyError(f"rank {rank} has no value here; these have: {has}") from None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.values())

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, value: object) -> bool:
        return value in list(self)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a value, ascending."""
        return tuple(self._values)

    def items(self) -> Iterator[tuple[int, Any]]:
        """Iterate over (rank, value)."""
        return iter(self._values.items())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RankValues):
            return self._values == other._values
        if isinstance(other, (list, tuple)):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))
