"""The control segment's layout and its words."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator

import pytest

from nbparallel.errors import ProtocolError
from nbparallel.wire import control
from nbparallel.wire.control import ControlView, Layout, State


@pytest.fixture
def view() -> Iterator[ControlView]:
    """Return a control segment for four ranks."""
    fd = control.create(4, 7)
    try:
        with contextlib.closing(ControlView(fd)) as view:
            yield view
    finally:
        os.close(fd)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 33, 130])
def test_nothing_overlaps(n: int) -> None:
    """No word, slot or ring shares bytes with another, and words of different kinds are 128 bytes apart."""
    layout = Layout.of(n)
    spans = [(0, 3 * 128)]
    for rank in range(n):
        start = layout.rank_word(rank, 0) * 8
        spans.append((start, start + 29 * 128))
        spans += [
            (layout.slot_byte(rank, g), layout.slot_byte(rank, g) + 512 + layout.slot_payload)
            for g in range(4)
        ]
        for other in range(n):
            spans.append((layout.tail_word(rank, other) * 8, layout.tail_word(rank, other) * 8 + 128))
            spans.append((layout.head_word(rank, other) * 8, layout.head_word(rank, other) * 8 + 128))
            ring = layout.ring_byte(rank, other)
            spans.append((ring, ring + layout.ring_capacity))
    spans.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] <= layout.nbytes
    assert all(start % 64 == 0 for start, _ in spans)


def test_memory_stays_small() -> None:
    """Rings shrink with the number of ranks: 128 ranks need less than 100 MB."""
    assert Layout.of(4).nbytes < 4 << 20
    assert Layout.of(128).nbytes < 100 << 20
    with pytest.raises(ValueError, match="between 1 and"):
        Layout.of(0)


def test_an_unreadable_slot_counts_as_computing(view: ControlView) -> None:
    """A rank stopped in the middle of a change does not stop its readers; its next change heals it."""
    word = view.layout.rank_word(1, 3)
    view.words[word] = 1
    record = view.read_slot(1)
    assert not record.readable
    assert record.state is State.COMPUTING
    view.write_slot(1, 5, State.FINISHED)
    assert view.read_slot(1).state is State.FINISHED


def test_a_damaged_segment_is_refused() -> None:
    """A descriptor that is no control segment, or one of the wrong size, raises instead of being mapped."""
    fd = os.memfd_create("nbp-test", os.MFD_CLOEXEC)
    try:
        with pytest.raises(ProtocolError):
            ControlView(fd)
        os.pwrite(fd, b"x" * 4096, 0)
        with pytest.raises(ProtocolError):
            ControlView(fd)
        head = control.HEADER.pack(control.MAGIC, control.VERSION, 4, 1, 4096, 0)
        os.pwrite(fd, head, 0)
        with pytest.raises(ProtocolError):
            ControlView(fd)
    finally:
        os.close(fd)
