"""Names of ranks in messages, labelled where a session's ranks are in several places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


def grouped(pairs: Iterable[tuple[_K, _V]]) -> dict[_K, list[_V]]:
    """Return the values of each key, in order: of texts the ranks that they are about.

    >>> grouped([("a", 0), ("b", 1), ("a", 2)])
    {'a': [0, 2], 'b': [1]}
    """
    groups: dict[_K, list[_V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _no_label(rank: int) -> str:
    return ""


label_of_rank: ContextVar[Callable[[int], str]] = ContextVar("label_of_rank", default=_no_label)
"""Returns what stands behind a rank's number."""


def rank_list(ranks: Iterable[int]) -> str:
    """Name ranks as people do: ``rank 2``, ``ranks 0-1``, ``ranks 0, 2-3``; with labels behind them.

    >>> rank_list([2]), rank_list([0, 1, 3])
    ('rank 2', 'ranks 0-1, 3')
    """
    numbers = sorted(set(ranks))
    plural = "s" if len(numbers) != 1 else ""
    by_label = grouped((label_of_rank.get()(number), number) for number in numbers)
    return f"rank{plural} " + ", ".join(f"{_ranges(some)}{label}" for label, some in by_label.items())


@contextmanager
def labelled_ranks(label_of: Callable[[int], str] = _no_label) -> Iterator[None]:
    """Have messages label ranks; by default not.

    >>> with labelled_ranks(lambda rank: " (host b)" if rank > 1 else " (host a)"):
    ...     rank_list([0, 2, 3])
    'ranks 0 (host a), 2-3 (host b)'
    """
    token = label_of_rank.set(label_of)
    try:
        yield
    finally:
        label_of_rank.reset(token)


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[str] = []
    start = previous = None
    for number in [*numbers, None]:
        if start is not None and (number is None or previous is None or number != previous + 1):
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = None
        if start is None:
            start = number
        previous = number
    return ", ".join(parts)
