"""A leader's end of the door: streams of any sizes, which are read into their place."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import pytest

from nbparallel.cluster import host_door
from nbparallel.cluster.host_door import HostDoor, HostPlace
from nbparallel.wire.frames import DOOR_HEAD, DoorKind

CHUNK = 1000
A, B = 0, 1


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make frames short, so that short streams have many."""
    monkeypatch.setattr(host_door, "CHUNK", CHUNK)


@pytest.fixture
def ends() -> Iterator[tuple[HostDoor, socket.socket]]:
    """Make the door of host a, whose world has a host b as well, and what its node holds of it."""
    node, leader = socket.socketpair()
    door = HostDoor(leader.fileno(), HostPlace(2, ("a", "b"), (0, 1, 2), A))
    yield door, node
    for each in (door, leader, node):
        each.close()


def stream(buffers: Sequence[bytes]) -> bytes:
    """Return what a leader sends for buffers, without the heads of frames."""
    sizes = b"".join(len(each).to_bytes(8, "little") for each in buffers)
    return len(buffers).to_bytes(4, "little") + sizes + b"".join(buffers)


def frames(content: bytes, number: int, most: int = CHUNK) -> bytes:
    """Return the frames of host b that hold a stream."""
    parts = [content[start : start + most] for start in range(0, len(content), most)]
    return b"".join(DOOR_HEAD.pack(B, DoorKind.DATA, len(part), number) + part for part in parts)


@pytest.mark.parametrize("sizes", [(), (0,), (1, 0, 2), (CHUNK - 12,), (CHUNK - 11,), (5, 3 * CHUNK, 7)])
def test_streams_of_any_sizes(ends: tuple[HostDoor, socket.socket], sizes: tuple[int, ...]) -> None:
    """Buffers arrive as they were, in one exchange after the other, of which a host may be ahead by one."""
    door, node = ends
    sent = {number: [bytes([number + n]) * size for n, size in enumerate(sizes)] for number in (1, 2)}
    for number, buffers in sent.items():
        node.sendall(frames(stream(buffers), number))
    for buffers in sent.values():
        came = door.exchange({}, lambda missing: None)
        assert [bytes(each) for each in came[B]] == buffers
