"""The ledger on the wire: any number of segments, in pages that fit a frame."""

import pytest

from nbparallel.wire.frames import MAX_INLINE
from nbparallel.wire.inspection import LedgerRow, pages, read_page


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_a_ledger_of_any_length_arrives(count):
    """Every page fits a frame, only the last one says that it is, and all rows arrive in order."""
    rows = [LedgerRow(2 << 40 | n + 1, 4096 * n + 1, n % 2 == 0, tuple(range(n % 600))) for n in range(count)]
    sent = list(pages(iter(rows)))
    assert max(map(len, sent)) <= MAX_INLINE
    read = [read_page(page) for page in sent]
    assert [row for page, _ in read for row in page] == rows
    assert [last for _, last in read] == [False] * (len(sent) - 1) + [True]
