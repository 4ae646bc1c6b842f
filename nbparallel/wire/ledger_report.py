"""The answer to ``LEDGER``: who holds which segment, as the supervisor knows it.

A page is a frame's payload; as many come as are needed, the last one says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PAGE_CHARACTERS = 40_000
"""A page is closed once it is that long; a row has at most a few thousand, and a frame holds 60 KiB."""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One segment that its maker has announced."""

    segment: int
    """Id."""
    nbytes: int
    """Size of the memory in bytes."""
    writable: bool
    """Whether others than its maker may write."""
    holders: tuple[int, ...]
    """Client numbers, ascending; empty: its maker may use the memory again."""


def pages(rows: Iterable[LedgerRow]) -> Iterator[bytes]:
    """Yield the payloads that carry `rows`; at least one."""
    page: list[str] = []
    length = 0
    for row in rows:
        text = json.dumps([row.segment, row.nbytes, int(row.writable), row.holders])
        page.append(text)
        length += len(text)
        if length > PAGE_CHARACTERS:
            yield _page(page, last=False)
            page, length = [], 0
    yield _page(page, last=True)


def _page(rows: list[str], *, last: bool) -> bytes:
    return f'{{"last": {json.dumps(last)}, "rows": [{", ".join(rows)}]}}'.encode()


def read_page(payload: bytes) -> tuple[list[LedgerRow], bool]:
    """Return the rows of a page, and whether it is the last one."""
    said = json.loads(payload)
    rows = [
        LedgerRow(segment, nbytes, bool(writable), tuple(holders))
        for segment, nbytes, writable, holders in said["rows"]
    ]
    return rows, said["last"]
