"""What a ring holds after some code wrote to memory that is not its own is refused, wherever it lies."""

import os
from types import SimpleNamespace

import pytest

from nbparallel.distributed.point_to_point.ring import RECORD, RingReader
from nbparallel.errors import ProtocolError
from nbparallel.wire.control import ControlView, create


@pytest.mark.parametrize("available", [8, RECORD.size, RECORD.size + 8, -8])
@pytest.mark.parametrize("from_end", [8, RECORD.size, 2048])
def test_a_damaged_record_is_refused_also_at_the_end(available, from_end):
    """The last ring of the segment is followed by nothing that could be read in its place."""
    fd = create(2, 1)
    try:
        view = ControlView(fd)
    finally:
        os.close(fd)
    with view:
        layout = view.layout
        head, tail = layout.head_word(1, 1), layout.tail_word(1, 1)
        start = 3 * layout.ring_capacity - from_end
        view.words[head], view.words[tail] = start, start + available
        ring = layout.ring_byte(1, 1)
        view.octets[ring : ring + layout.ring_capacity] = b"\xff" * layout.ring_capacity
        incoming = RingReader(view, SimpleNamespace(strong_order=True), 1, 1)
        assert incoming.has_message()
        with pytest.raises(ProtocolError, match="damaged record from rank 1"):
            incoming.take()
