"""Names of ranks in messages, with those of their hosts where a session has several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

host_of_rank: ContextVar[Callable[[int], str] | None] = ContextVar("host_of_rank", default=None)
"""Returns the name of a rank's host, where messages are about a session on several hosts."""


def rank_list(ranks: Iterable[int]) -> str:
    """Name ranks as people do: ``rank 2``, ``ranks 0-1``, ``ranks 0, 2-3``, ``rank 5 (host b)``.

    >>> rank_list([2]), rank_list([0, 1, 3])
    ('rank 2', 'ranks 0-1, 3')
    """
    numbers = sorted(set(ranks))
    plural = "s" if len(numbers) != 1 else ""
    host_of = host_of_rank.get()
    if host_of is None:
        return f"rank{plural} {_ranges(numbers)}"
    by_host: dict[str, list[int]] = {}
    for number in numbers:
        by_host.setdefault(host_of(number), []).append(number)
    return f"rank{plural} " + ", ".join(f"{_ranges(some)} (host {host})" for host, some in by_host.items())


@contextmanager
def naming_hosts(hosts: Mapping[str, range]) -> Iterator[None]:
    """Have messages name the hosts of ranks, if there are several; `hosts`: the ranks of each.

    >>> with naming_hosts({"a": range(2), "b": range(2, 4)}):
    ...     rank_list([0, 2, 3])
    'ranks 0 (host a), 2-3 (host b)'
    """

    def host_of(rank: int) -> str:
        return next(host for host, ranks in hosts.items() if rank in ranks)

    token = host_of_rank.set(host_of if hosts else None)
    try:
        yield
    finally:
        host_of_rank.reset(token)


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
