"""The ledger on the wire: any number of segments, in one frame."""

import socket

import pytest

from nbparallel.supervisor.clients import Outbox
from nbparallel.wire import frames
from nbparallel.wire.frames import Kind
from nbparallel.wire.inspection import IntroducedRow, LedgerRow, pack_report, read_report


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_a_ledger_of_any_length_arrives(count):
    """All rows arrive in order, also where they take more than a frame holds."""
    rows = tuple(
        LedgerRow(2 << 40 | n + 1, 4096 * n + 1, n % 2 == 0, tuple(range(n % 600)), n % 3)
        for n in range(count)
    )
    guests = (IntroducedRow(1 << 22, 77, 0, daemon=True),)
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs:
        mine.setblocking(False)
        Outbox(mine).send(Kind.LEDGER, pack_report(iter(rows), guests), sequence=7)
        frame = frames.receive(theirs)
    assert (frame.kind, frame.sequence, frame.fds) == (Kind.LEDGER, 7, [])
    assert read_report(frame.payload) == (rows, guests)
