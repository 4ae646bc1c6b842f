"""The shared memory in which a group synchronises: arrival and done counters, and slots for payloads.

The world's area is part of the control segment.  Every other group has an area with the same layout in a
segment of the rank that opened it, with its other groups::

    head: magic, number of members, payload of a slot, the members' ranks …
    per member: arrive | done                                   (a cache line each)
    per member and generation: a slot (header, description, payload)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.wire.control import GENERATIONS, SLOT_HEADER, ControlView
from nbparallel.wire.control_layout import SLOT_OF_A_MEMBER

# Words of a slot's first line.
WORD, CALL, CONTENT, LINE, SEGMENT, START, STOP, NBYTES, TEXT, WRITTEN = range(10)
"""`WRITTEN` and the two behind it: the shared memory that a reduction will write on this rank, if it is not
that of all."""
TEXT_OFFSET = 128
"""Bytes from the start of a slot to its description."""
MAGIC = 0x3152414741504E42
"""Reads ``BNPAGAR1``."""
_LINE = 128
_HEAD = 3
"""Words before the members' ranks."""


@dataclass(frozen=True, slots=True)
class SlotArea:
    """One group's counters and slots, as one rank sees them."""

    ranks: tuple[int, ...]
    """The members' ranks in the world, in the order of the group."""
    index: int
    """This rank's group rank; -1 for a rank that is no member and only inspects."""
    words: memoryview
    octets: memoryview
    buffer: Any
    """The same memory, as the base of arrays."""
    arrive: tuple[int, ...]
    """Index in `words` for each member: how many synchronisations it has reached."""
    done: tuple[int, ...]
    """Index in `words` for each member: the last collective whose slots it has released."""
    slots: tuple[tuple[int, ...], ...]
    """Offset in bytes of the slot of each member and generation."""
    payload_nbytes: int
    packed: bytes = b""
    """The memory's handle, by which a rank outside the group attaches it; empty for the world."""

    @property
    def others(self) -> tuple[int, ...]:
        """The group ranks of the other members."""
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
        """Release the memory; arrays in it keep it mapped."""
        object.__setattr__(self, "buffer", None)  # frozen otherwise
        if self.packed:
            self.words.release()
            self.octets.release()


def world_area(view: ControlView, rank: int, here: range | None = None) -> SlotArea:
    """Return the area of all ranks, or of those that are `here` if other hosts have some."""
    layout, ranks = view.layout, range(view.world_size) if here is None else here
    return SlotArea(
        tuple(ranks),
        ranks.index(rank),
        view.words,
        view.octets,
        np.frombuffer(view.map, np.uint8),  # an array on the mmap itself would not keep it mapped
        tuple(view.word_arrive(r) for r in ranks),
        tuple(view.word_done(r) for r in ranks),
        tuple(tuple(layout.slot_byte(r, g) for g in range(GENERATIONS)) for r in ranks),
        layout.slot_payload,
    )


def group_payload(members: int) -> int:
    """Return the bytes of payload in a slot of a group."""
    return 16 << 10 if members <= 8 else max(4 << 10, SLOT_OF_A_MEMBER * members)


def _lines_start(members: int) -> int:
    return -(-(_HEAD + members) * 8 // _LINE) * _LINE


def _slots_start(members: int) -> int:
    return _lines_start(members) + members * 2 * _LINE


def group_nbytes(members: int) -> int:
    """Return the size of the area of a group."""
    return _slots_start(members) + members * GENERATIONS * (SLOT_HEADER + group_payload(members))


def prepare(memory: AnyArray, ranks: Sequence[int]) -> None:
    """Write the head of a new group's area, and zero its words; no other rank has attached it yet."""
    memory[: _slots_start(len(ranks))] = 0
    size = SLOT_HEADER + group_payload(len(ranks))
    memory[_slots_start(len(ranks)) :].reshape(-1, size)[:, :SLOT_HEADER] = 0
    with memory.data as octets, octets.cast("Q") as words:
        words[0], words[1], words[2] = MAGIC, len(ranks), group_payload(len(ranks))
        for i, rank in enumerate(ranks):
            words[_HEAD + i] = rank


def group_area(memory: AnyArray, packed: bytes, rank: int) -> SlotArea | None:
    """Return the area that lies in `memory`, as `rank` sees it; None if none does."""
    octets = memory.data
    if len(octets) % 8 or len(octets) < _LINE:
        return None
    words = octets.cast("Q")
    count = words[1]
    if (
        not count
        or words[0] != MAGIC
        or group_nbytes(count) != len(octets)
        or words[2] != group_payload(count)
    ):
        return None
    ranks = tuple(words[_HEAD : _HEAD + count].tolist())
    lines, slots, size = _lines_start(count), _slots_start(count), SLOT_HEADER + group_payload(count)
    return SlotArea(
        ranks,
        ranks.index(rank) if rank in ranks else -1,
        words,
        octets,
        memory,
        tuple((lines + 2 * i * _LINE) // 8 for i in range(count)),
        tuple((lines + (2 * i + 1) * _LINE) // 8 for i in range(count)),
        tuple(tuple(slots + (i * GENERATIONS + g) * size for g in range(GENERATIONS)) for i in range(count)),
        group_payload(count),
        packed,
    )
