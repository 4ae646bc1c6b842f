"""The shared memory in which a group synchronises: arrival and done counters, and slots for payloads.

The world's area is part of the control segment.  Every other group has an area with the same layout in a
segment of the rank that opened it, with its other groups::

    head: magic, number of members, payload of a slot, the members' ranks …
    per member: arrive | done                                   (a cache line each)
    per member and generation: a slot (header, description, payload)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from nbparallel.distributed.runtime.shared_arrays import AnyArray, SharedSpan
from nbparallel.wire.control import GENERATIONS, SLOT_HEADER, SLOT_TEXT, ControlView
from nbparallel.wire.control_layout import ARRIVE, DONE, SLOT_OF_A_MEMBER

# Fingerprint of a collective call: one word to compare between ranks, and a text for error messages.
#
# Every collective writes both into the rank's slot before it counts up the arrival word.  Equal words mean
# equal calls; the text is read only when they differ.

SHARED, DIRECT, READABLE = 1, 2, 4
"""Low bits of the word: the array lies in shared memory; other ranks can work on it in place; or it is
private, and others can read it in place."""
BITS = SHARED | DIRECT | READABLE
COLUMNS = ("operation", "dtype", "shape", "root", "operator")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One call."""

    word: int
    """Equal for calls that match (61 bits: a difference is missed once in 2**60)."""
    call: int
    """The same without the content."""
    content: int
    """Only dtype and shape of what is moved; 0: left open, "whatever the root has"."""
    text: bytes
    """The columns of the table in an error message, separated by tabs, cut to fit a slot."""


def _word(*parts: Any) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") | 8) & ~BITS


def fingerprint(
    operation: str,
    dtype: str = "-",
    shape: str = "-",
    *,
    root: int | None = None,
    operator: str = "-",
    content: Any = None,
) -> Fingerprint:
    """Return the fingerprint of a call.

    Parameters
    ----------
    content : object, optional
        What is moved, by its `repr`; None: left open.
    """
    root_text = "-" if root is None else str(root)
    text = "\t".join((operation, dtype, shape, root_text, operator)).encode("utf-8", "backslashreplace")
    return Fingerprint(
        _word(operation, root_text, operator, content),
        _word(operation, root_text, operator),
        0 if content is None else _word(content),
        text[:SLOT_TEXT],
    )


# Offers: by the low bits of all members' words they decide alike which way the bytes of a large collective
# take: between the arrays themselves, which all lie in shared memory; out of the arrays themselves, which
# are all private, and which others read; else through the slots, or between copies in shared memory.


def all_offer(bits: Sequence[int], way: int) -> bool:
    """Return whether all members offer a way: `DIRECT` or `READABLE`."""
    return all(offer & way for offer in bits)


def offers_differ(bits: Sequence[int]) -> bool:
    """Return whether members offer different ways: some slots then hold what is not used."""
    ways = {offer & (DIRECT | READABLE) for offer in bits}
    return len(ways) > 1


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
        tuple(view.word(r, ARRIVE) for r in ranks),
        tuple(view.word(r, DONE) for r in ranks),
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


# Overlaps between the shared arrays that the members of a group pass to one collective.

Span: TypeAlias = tuple[int, int, int]
"""Segment, first byte, byte behind the last."""


class SpanTable:
    """Where the arrays of all members of a group lie, as their slots say.

    Parameters
    ----------
    area : SlotArea
        The group's slots.
    """

    def __init__(self, area: SlotArea) -> None:
        self._words, self._index = area.words, area.index
        self._slots = slots = [[start // 8 for start in starts] for starts in area.slots]
        stride = slots[1][0] - slots[0][0] if len(slots) > 1 else 1
        stop = len(slots) * stride
        self._segments = [area.words[first + SEGMENT : first + SEGMENT + stop : stride] for first in slots[0]]
        """For each generation: the word of every member that names the segment of its array."""
        self._apart: list[int] = []
        """Such words that are known to be all different."""

    def disjoint(self, generation: int) -> bool:
        """Whether every member's array lies in another segment; if False, they may overlap or not."""
        segments = self._segments[generation].tolist()
        if segments == self._apart:
            return True
        if len(set(segments)) < len(segments):
            return False
        self._apart = segments
        return True

    def declare_write(self, generation: int, span: SharedSpan | None) -> None:
        """Publish which shared memory this rank will write, before it arrives."""
        words, first = self._words, self._slots[self._index][generation] + WRITTEN
        words[first] = 0 if span is None else span.segment
        if span is not None:
            words[first + 1], words[first + 2] = span.start, span.stop

    def same(self, generation: int, one: int, other: int) -> bool:
        """Whether two members, both with shared arrays, passed the very same memory."""
        return self._passed(generation, one) == self._passed(generation, other)

    def overlap(self, generation: int, bits: Sequence[int], root: int | None) -> tuple[int, int] | None:
        """Return two members whose shared arrays overlap; `bits` says which arrays are shared.

        The memory of `root`, if given, is not written to, so that other members may pass it too.
        """
        spans = [self._passed(generation, i) if bits[i] & SHARED else (0, 0, 0) for i in range(len(bits))]
        if root is not None and spans[root][0]:
            spans = [(0, 0, 0) if s == spans[root] and i != root else s for i, s in enumerate(spans)]
        return conflict([[(span, True)] for span in spans])

    def conflict(self, generation: int, bits: Sequence[int]) -> tuple[int, int] | None:
        """Return two members of which one writes (`declare_write`) what the other passed or writes."""
        words = self._words
        spans: list[list[tuple[Span, bool]]] = []
        for i, slots in enumerate(self._slots):
            written = slots[generation] + WRITTEN
            mine: list[tuple[Span, bool]] = []
            if bits[i] & SHARED:
                mine.append((self._passed(generation, i), False))
            if words[written]:
                mine.append(((words[written], words[written + 1], words[written + 2]), True))
            spans.append(mine)
        return conflict(spans)

    def _passed(self, generation: int, index: int) -> Span:
        first = self._slots[index][generation] + SEGMENT
        segment, start, stop = self._words[first : first + STOP - SEGMENT + 1].tolist()
        return segment, start, stop

    def close(self) -> None:
        """Release the memory views."""
        for words in self._segments:
            words.release()
        self._segments.clear()


def joined(spans: Sequence[Span]) -> list[Span]:
    """Return spans of one member, each that begins where the one before ends joined with it.

    The parts of one array, one for each member, are one span: all members compare those of all others.

    >>> joined([(1, 0, 8), (1, 8, 16), (1, 24, 32), (2, 32, 40)])
    [(1, 0, 16), (1, 24, 32), (2, 32, 40)]
    """
    found: list[Span] = []
    for segment, start, stop in spans:
        if found and found[-1][0] == segment and found[-1][2] == start:
            found[-1] = segment, found[-1][1], stop
        else:
            found.append((segment, start, stop))
    return found


def conflict(spans: Sequence[Sequence[tuple[Span, bool]]]) -> tuple[int, int] | None:
    """Return two members of which one writes shared memory that the other reads or writes; None if none do.

    Parameters
    ----------
    spans : sequence
        For each member its spans, and whether it writes them.
    """
    order = sorted(
        (span, i, writes) for i, mine in enumerate(spans) for span, writes in mine if span[1] < span[2]
    )
    active: list[tuple[Span, int, bool]] = []
    for span, i, writes in order:
        active = [entry for entry in active if entry[0][0] == span[0] and entry[0][2] > span[1]]
        for _, j, also_writes in active:
            if i != j and (writes or also_writes):
                return i, j
        active.append((span, i, writes))
    return None
