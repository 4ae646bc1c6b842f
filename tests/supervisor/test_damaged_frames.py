"""F48: whatever a client of the same user sends to the supervisor, only that client loses."""

import os
import random

import pytest

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.ledger.segment_server import SegmentServer
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.segments import (
    AllowWrite,
    Fetch,
    Forget,
    Freed,
    Hold,
    Intend,
    Register,
    Release,
    Removed,
    segment_id,
)
from tests.supervisor.test_segment_server import memory


def mutated(random_, payload):
    """Return a payload with some bits, bytes or its end changed."""
    data = bytearray(payload)
    for _ in range(random_.choice([0, 1, 1, 2, 5])):
        if data:
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    pick = random_.random()
    if pick < 0.1:
        del data[random_.randrange(len(data) + 1) :]
    elif pick < 0.2:
        data += random_.randbytes(random_.choice([1, 7, 100]))
    return bytes(data)


def test_f48_a_desk_survives_mutated_frames(tmp_path):
    """Damage ends its sender's connection; files of the user and descriptors of the desk are untouched."""
    check_mutated_frames(tmp_path, 5_000)


@pytest.mark.stress
@pytest.mark.once
@pytest.mark.time_limit(1800)
def test_f48_a_million_mutated_frames(tmp_path):
    """Of a million as well none brings the desk down or costs it a descriptor."""
    check_mutated_frames(tmp_path, 1_000_000)


def check_mutated_frames(tmp_path, count):
    """Send frames with bits, bytes or their end changed, from clients that come and go."""
    random_ = random.Random(count)
    bystander = tmp_path / "keep"
    bystander.write_text("keep")
    server = SegmentServer()
    alive = set()
    before = len(os.listdir("/proc/self/fd"))
    refused = 0
    for turn in range(count):
        client = random_.randrange(4)
        if client not in alive:
            server.ledger.clients.add(client)
            alive.add(client)
        segment = segment_id(random_.randrange(4), random_.randint(1, 6))
        paths = [str(bystander), str(tmp_path / "nbp_a"), f"/dev/shm/nbp_{client}", "nbp_x", "/nbp_/../etc"]
        kind, payload = random_.choice(
            [
                (
                    Kind.REGISTER,
                    Register(segment, 4096, True, path=random_.choice(["", "/dev/shm/nbp_b"])).pack(),
                ),
                (Kind.FETCH, Fetch(segment, random_.random() < 0.5).pack()),
                (Kind.REGISTER, Register(segment, 4096, True, segment).pack()),
                (Kind.RELEASE, Release(segment).pack()),
                (Kind.RELEASE, Release(segment, segment).pack()),
                (Kind.HOLD, Hold(segment, segment, random_.random() < 0.5).pack()),
                (Kind.FREED, Freed(segment).pack()),
                (Kind.FORGET, Forget(segment).pack()),
                (Kind.ALLOW_WRITE, AllowWrite(segment).pack()),
                (Kind.INTEND, Intend(random_.choice(paths)).pack()),
                (Kind.REMOVED, Removed(random_.choice(paths)).pack()),
            ]
        )
        if random_.random() < 0.05:
            kind = random_.choice(list(Kind))
        fds = [memory(4096)] if kind is Kind.REGISTER or random_.random() < 0.02 else []
        try:
            outgoing = server.receive(client, Frame(kind, 0, turn, mutated(random_, payload), fds))
        except ProtocolError:
            refused += 1
            outgoing = server.perform(server.ledger.client_gone(client))
            alive.discard(client)
        if server.ledger.unsettled:
            outgoing += server.perform(server.ledger.settle(server.ledger.mark()))
        for frame in outgoing:
            frame.close()
    for client in alive:
        for frame in server.perform(server.ledger.client_gone(client)):
            frame.close()
    assert server.perform(server.ledger.settle(server.ledger.mark())) == []
    assert server.ledger.entries == {}
    assert server.ledger.names == {}
    server.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert bystander.read_text() == "keep"
    assert count // 10 < refused < count
