"""Sizes as people read them: one spelling in every message, table and picture."""

from __future__ import annotations


def size_text(nbytes: float) -> str:
    """Return a number of bytes with the binary unit that fits it: KiB, MiB, GiB and so on.

    >>> size_text(1000), size_text(64 << 20), size_text(1.5 * 2**30)
    ('1000 B', '64.0 MiB', '1.5 GiB')
    """
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{size:.0f} B"
