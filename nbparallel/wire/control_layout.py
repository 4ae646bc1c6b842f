"""Where everything lies in a control segment, by the number of ranks alone (the picture is in `control`)."""

from __future__ import annotations

from dataclasses import dataclass

WORD = 8
LINE = 16
"""Words in 128 bytes."""
SLOT_AREA = (2 * LINE - 12) * WORD
"""Bytes of a state slot that say where a group meets."""
GENERATIONS = 4
"""Collective slots of a rank: how many operations a slow reader may be behind before it is waited for."""
SLOT_HEADER = 512
"""Bytes of a collective slot before its payload: one line of words, then the description as text."""
SLOT_TEXT = SLOT_HEADER - LINE * WORD
FAILED_LINES = 16
FAILED_TEXT = FAILED_LINES * LINE * WORD - 6 * WORD
"""Bytes of the message that a failed rank leaves."""
MAX_WORLD_SIZE = 1024
"""Rings grow with the square of the ranks: beyond this one segment would be gigabytes."""

# Lines of one rank, in order.
INTERRUPT, DEATH, LEFT, SLOT, WRITING, BELL, PARKED, TIMING, ARRIVE, DONE, FAILED = (
    0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11,
)  # fmt: skip
RANK_LINES = FAILED + FAILED_LINES


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies, from the number of ranks alone."""

    world_size: int
    ring_capacity: int
    slot_payload: int

    @classmethod
    def of(cls, world_size: int) -> Layout:
        """Return the layout for `world_size` ranks: 64 KiB a ring and a slot, less when there are many."""
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size must be between 1 and {MAX_WORLD_SIZE}, not {world_size}")
        ring = 64 << 10
        while ring > 2048 and ring * world_size**2 > 16 << 20:
            ring >>= 1
        slot = 64 << 10 if world_size <= 8 else 16 << 10 if world_size <= 32 else 4 << 10
        return cls(world_size, ring, slot)

    def rank_word(self, rank: int, line: int) -> int:
        """Return the index of the first word of a rank's line."""
        return (2 + rank * RANK_LINES + line) * LINE

    @property
    def _pairs(self) -> int:
        return (2 + self.world_size * RANK_LINES) * LINE

    def tail_word(self, source: int, destination: int) -> int:
        """Return the word in which `source` counts the bytes it put into the pair's ring.

        The next two: how many chunks it has streamed, and from which on they lie elsewhere (`streaming`).
        """
        return self._pairs + (source * self.world_size + destination) * 2 * LINE

    def head_word(self, source: int, destination: int) -> int:
        """Return the word in which `destination` counts the bytes it took.

        The next two: up to which message its user has taken all, and the newest that he has taken.  Then: how
        many chunks it has taken out of the stream, and whether it fills buffers (`streaming`).
        """
        return self.tail_word(source, destination) + LINE

    def slot_byte(self, rank: int, generation: int) -> int:
        """Return the first byte of a collective slot."""
        slots = (self._pairs + self.world_size**2 * 2 * LINE) * WORD
        slots = (slots + 4095) & ~4095
        return slots + (rank * GENERATIONS + generation) * (SLOT_HEADER + self.slot_payload)

    def ring_byte(self, source: int, destination: int) -> int:
        """Return the first byte of the pair's ring."""
        start = (self.slot_byte(self.world_size, 0) + 4095) & ~4095
        return start + (source * self.world_size + destination) * self.ring_capacity

    @property
    def nbytes(self) -> int:
        """Size of the whole segment."""
        return (self.ring_byte(self.world_size, 0) + 4095) & ~4095
