"""Overlaps between the shared arrays that the members of a group pass to one collective."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from nbparallel.distributed.runtime.shared_arrays import SharedSpan
from nbparallel.distributed.slots.fingerprint import SHARED
from nbparallel.distributed.slots.slot_area import SEGMENT, STOP, WRITTEN, SlotArea

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
        return overlapping(spans)

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


def overlapping(spans: list[Span]) -> tuple[int, int] | None:
    """Return two indices whose (segment, start, stop) overlap; segment 0 is private memory."""
    order = sorted((span, i) for i, span in enumerate(spans) if span[0] and span[1] < span[2])
    for (left, i), (right, j) in pairwise(order):
        if left[0] == right[0] and right[1] < left[2]:
            return min(i, j), max(i, j)
    return None


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
