"""Relays: large private arrays from member to member through scratch memory, a chunk at a time.

Whoever brings some copies a piece of each into his chunk while the others copy the last pieces out of it: all
cores work, chunks stay in the cache, and no memory is made.  After each round all members meet; how many
rounds there are stands in the letters.  Nobody writes into another rank's memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from nbparallel.distributed.collectives.staging import CHUNK, Scratch
from nbparallel.distributed.point_to_point.streaming import flat_octets
from nbparallel.distributed.runtime import fault_injection
from nbparallel.distributed.runtime.rank_context import Member
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.distributed.slots.slot_protocol import Meeting

_WHERE = struct.Struct("<QQ")
"""Where in a chunk the pieces of an array lie, and their size; the handle of the scratch memory follows."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """An array that comes piece by piece."""

    target: AnyArray
    """C-contiguous; filled."""
    where: bytes
    """What its source says of it."""


class Relay:
    """One rank's side of all relays in a group."""

    def __init__(self, member: Member, meeting: Meeting, scratch: Scratch) -> None:
        self._member, self._meeting, self._scratch = member, meeting, scratch
        self._leaving: list[AnyArray] = []
        self._share = CHUNK

    def offer(self, arrays: Sequence[AnyArray]) -> tuple[list[bytes], int]:
        """Copy the first pieces of C-contiguous arrays in; return where each lies, and how many rounds."""
        self._leaving = [flat_octets(x) for x in arrays]
        self._share = CHUNK // len(arrays) & ~63
        packed = self._scratch.window()[1]
        self._copy_in(0)
        rounds = max(-(-data.size // self._share) for data in self._leaving)
        return [_WHERE.pack(i * self._share, self._share) + packed for i in range(len(arrays))], rounds

    def forget(self) -> None:
        """Bring nothing."""
        self._leaving = []

    def _copy_in(self, index: int) -> None:
        memory, _ = self._scratch.window()
        begin = self._scratch.place(index)
        first, share = index * self._share, self._share
        for i, data in enumerate(self._leaving):
            piece = data[first : first + share]
            memory[begin + i * share : begin + i * share + piece.size] = piece
        if fault_injection.ARMED:
            fault_injection.hit("half_payload", self._member.rank)

    def run(self, rounds: int, arrivals: Sequence[Arrival]) -> None:
        """Take part in all rounds; every member has offered what it brings."""
        incoming = []
        for arrival in arrivals:
            place, share = _WHERE.unpack_from(arrival.where)
            memory = self._scratch.window_of(arrival.where[_WHERE.size :])
            incoming.append((memory, place, share, flat_octets(arrival.target)))
        for index in range(rounds):
            if index + 1 < rounds and self._leaving:
                self._copy_in(index + 1)
            begin = self._scratch.place(index)
            for memory, place, share, data in incoming:
                piece = data[index * share : (index + 1) * share]
                piece[...] = memory[begin + place : begin + place + piece.size]
            if fault_injection.ARMED:
                fault_injection.hit("half_payload", self._member.rank)
            if index + 1 < rounds:
                self._meeting.again()
        self._scratch.pass_by(rounds)
        self._leaving = []
