"""`nbp.segments()`: a sequence of records that prints as a table."""

import re
from dataclasses import replace

from nbparallel.sharing.arrays import SHOWN, SegmentList
from nbparallel.sharing.lifecycle.segment import SegmentStatistics


def record(serial, nbytes=4096, *, phase="live", own=True, writable=False):
    """Return one record."""
    return SegmentStatistics(serial, nbytes, "mmap", own, phase, writable, 1)


def test_it_is_a_sequence_still():
    """It has a length, compares as a tuple, and its items are the records."""
    one = record(1)
    assert SegmentList([one]) == (one,)
    assert SegmentList([one])[0] is one
    assert SegmentList() == ()


def test_it_prints_as_a_table():
    """The largest segment comes first; pooled memory is one line; HTML has the same cells."""
    shown = SegmentList([record(1), record(2, 3 << 20, own=False), record(0, 1 << 20, phase="pooled")])
    lines = repr(shown).splitlines()
    assert lines[0] == "shared memory of this process: 2 segments, 3.0 MiB"
    assert [line.split()[0] for line in lines[2:4]] == ["0x2", "0x1"]
    assert lines[4].startswith("kept for the next arrays: 1.0 MiB in 1 segment;")
    html = shown._repr_html_()
    assert re.findall(r'<th scope="row"[^>]*>([^<]*)', html) == ["0x2", "0x1"]
    assert re.findall(r"<td[^>]*right[^>]*>([^<]*)", html) == ["3.0", "<0.1".replace("<", "&lt;")]
    assert "name" not in lines[1]


def test_names_have_a_column_where_there_are_any():
    """Whoever wants to open the memory from elsewhere finds its file."""
    with_name = replace(record(1), path="/dev/shm/nbp_a")
    lines = repr(SegmentList([with_name, record(2)])).splitlines()
    assert lines[1].split()[-1] == "name"
    assert lines[2].endswith("/dev/shm/nbp_a")


def test_thousands_of_segments_stay_readable():
    """Of many the largest are shown, and the rest is counted."""
    shown = repr(SegmentList([record(n, n) for n in range(1, 10_001)]))
    assert len(shown.splitlines()) == SHOWN + 3
    assert "… and 9,950 smaller ones" in shown
