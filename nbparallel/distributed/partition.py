"""Which part of something is whose: contiguous, in the order of the ranks, as even as can be."""

from __future__ import annotations


def part_of(n: int, part: int, parts: int) -> slice:
    """Return part number `part` of ``range(n)``; the first ``n % parts`` parts are longer by one.

    >>> [part_of(10, i, 4) for i in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None)]
    """
    size, longer = divmod(n, parts)
    start = part * size + min(part, longer)
    return slice(start, start + size + (part < longer))
