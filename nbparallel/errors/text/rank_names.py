"""Names of ranks in messages, labelled where a session's ranks are in several places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar


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
    label_of, by_label = label_of_rank.get(), dict[str, list[int]]()
    for number in numbers:
        by_label.setdefault(label_of(number), []).append(number)
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
