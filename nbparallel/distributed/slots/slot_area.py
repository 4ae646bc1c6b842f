"""Area: where the members of a group meet: their arrival and done words, and their slots.

The world's area is part of the control segment.  Every other group has memory of its own, laid out alike::

    head: magic, number of members, payload of a slot, the members' ranks …
    per member: arrive | done                                   (a line each)
    per member and generation: a slot (header, description, payload)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.wire.control import GENERATIONS, SLOT_HEADER, ControlView

MAGIC = 0x3152414741504E42
"""Reads ``BNPAGAR1``."""
_LINE = 128
_HEAD = 3
"""Words before the members' ranks."""


@dataclass(frozen=True, slots=True)
class SlotArea:
    """Where one group meets, as one of its members sees it."""

    ranks: tuple[int, ...]
    """The members' numbers in the world, in the order of the group."""
    index: int
    """This rank's place among them; -1 for one who only looks."""
    words: memoryview
    octets: memoryview
    buffer: Any
    """The same memory, to make arrays in."""
    arrive: tuple[int, ...]
    """Index in `words` for each member: how many synchronisations it has reached."""
    done: tuple[int, ...]
    """Index in `words` for each member: the last collective whose slots it reads no more."""
    slots: tuple[tuple[int, ...], ...]
    """First byte of the slot of each member and generation."""
    payload_nbytes: int
    packed: bytes = b""
    """The memory's handle, by which who is no member finds it; empty for the world."""

    @property
    def others(self) -> tuple[int, ...]:
        """The members' indices without this rank's."""
        return tuple(i for i in range(len(self.ranks)) if i != self.index)

    @property
    def is_world(self) -> bool:
        """Whether it is the control segment's."""
        return not self.packed

    def missing(self, target: int) -> list[int]:
        """Return the ranks that have not reached synchronisation `target`."""
        words = self.words
        return [rank for rank, word in zip(self.ranks, self.arrive, strict=True) if words[word] < target]

    def close(self) -> None:
        """Let go of the memory; who still has an array in it keeps it."""
        object.__setattr__(self, "buffer", None)  # frozen for everybody else
        if self.packed:
            self.words.release()
            self.octets.release()


def world_area(view: ControlView, rank: int) -> SlotArea:
    """Return the area of all ranks."""
    layout, ranks = view.layout, range(view.world_size)
    return SlotArea(
        tuple(ranks),
        rank,
        view.words,
        view.octets,
        np.frombuffer(view.map, np.uint8),  # an array on the mmap itself would not keep it mapped
        tuple(view.word_arrive(r) for r in ranks),
        tuple(view.word_done(r) for r in ranks),
        tuple(tuple(layout.slot_byte(r, g) for g in range(GENERATIONS)) for r in ranks),
        layout.slot_payload,
    )


def _payload(members: int) -> int:
    return 16 << 10 if members <= 8 else 4 << 10


def _lines_start(members: int) -> int:
    return -(-(_HEAD + members) * 8 // _LINE) * _LINE


def _slots_start(members: int) -> int:
    return _lines_start(members) + members * 2 * _LINE


def group_nbytes(members: int) -> int:
    """Return the size of the memory of a group."""
    return _slots_start(members) + members * GENERATIONS * (SLOT_HEADER + _payload(members))


def prepare(memory: AnyArray, ranks: Sequence[int]) -> None:
    """Write the head of a new group's memory, and zero its words; nobody else sees it yet."""
    memory[: _slots_start(len(ranks))] = 0
    size = SLOT_HEADER + _payload(len(ranks))
    memory[_slots_start(len(ranks)) :].reshape(-1, size)[:, :SLOT_HEADER] = 0
    with memory.data as octets, octets.cast("Q") as words:
        words[0], words[1], words[2] = MAGIC, len(ranks), _payload(len(ranks))
        for i, rank in enumerate(ranks):
            words[_HEAD + i] = rank


def group_area(memory: AnyArray, packed: bytes, rank: int) -> SlotArea | None:
    """Return the area that lies in `memory`, as `rank` sees it; None if none does."""
    octets = memory.data
    if len(octets) % 8 or len(octets) < _LINE:
        return None
    words = octets.cast("Q")
    count = words[1]
    if not count or words[0] != MAGIC or group_nbytes(count) != len(octets) or words[2] != _payload(count):
        return None
    ranks = tuple(words[_HEAD : _HEAD + count].tolist())
    lines, slots, size = _lines_start(count), _slots_start(count), SLOT_HEADER + _payload(count)
    return SlotArea(
        ranks,
        ranks.index(rank) if rank in ranks else -1,
        words,
        octets,
        memory,
        tuple((lines + 2 * i * _LINE) // 8 for i in range(count)),
        tuple((lines + (2 * i + 1) * _LINE) // 8 for i in range(count)),
        tuple(tuple(slots + (i * GENERATIONS + g) * size for g in range(GENERATIONS)) for i in range(count)),
        _payload(count),
        packed,
    )
