"""Handles: what travels so that another process can find an array's bytes."""

from __future__ import annotations

from typing import NamedTuple


class ArrayHandle(NamedTuple):
    """Where an array lies.  Never trusted: the receiver validates every field.

    A tuple, because it is made and taken apart on every hand over, and marshal writes one as it is.
    """

    segment: int
    """The segment's id in its session: creator's client number << 40 | serial."""
    segment_nbytes: int
    """Size of the whole segment in bytes."""
    offset: int
    """Byte offset of the element with all indices 0."""
    shape: tuple[int, ...]
    """As ``ndarray.shape``."""
    strides: tuple[int, ...]
    """As ``ndarray.strides``, in bytes; may be zero or negative."""
    dtype: str | bytes
    """As `array_layout.describe_dtype` gives it: a name, or bytes."""
    writable: bool
    """Whether the receiver is meant to write (the supervisor decides whether it may)."""
    strategy: str = "file_descriptor"
    """Name of the sharing strategy that made the segment, and knows how to check and map it."""
    memory: int = 0
    """The memory's id, which stays when it is used again as another segment; 0: it is used once."""
