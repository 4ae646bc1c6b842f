"""Sizes and times as people read them: one spelling in every message, table and picture."""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def size_text(nbytes: float) -> str:
    """Return a number of bytes with the binary unit that fits it: KiB, MiB, GiB and so on.

    >>> size_text(1000), size_text(64 << 20), size_text(1.5 * 2**30)
    ('1000 B', '64.0 MiB', '1.5 GiB')
    """
    size, unit = float(nbytes), "B"
    for larger in _SIZES[1:]:
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{size:.0f} B"


def size_column(sizes: Sequence[float]) -> tuple[str, list[str]]:
    """Return the unit of a column of sizes, which is the largest one's, and each size in it.

    >>> size_column([24 << 20, 10, 0]), size_column([512])
    (('MiB', ['24.0', '<0.1', '0']), ('B', ['512']))
    """
    unit = size_text(max(sizes, default=0)).split()[1]
    scale = 1024 ** _SIZES.index(unit)
    digits = int(scale > 1)
    small = scale / 20 * digits
    return unit, [
        f"{size / scale:,.{digits}f}" if size >= small and size else "<0.1" if size else "0" for size in sizes
    ]


_TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def seconds_text(seconds: float) -> str:
    """Return a time with the unit that fits it, in three digits.

    >>> seconds_text(1.2345), seconds_text(0.0123), seconds_text(4.5e-6), seconds_text(0), seconds_text(71)
    ('1.23 s', '12.3 ms', '4.5 µs', '0 s', '71 s')
    """
    unit, size = time_unit(seconds)
    value = seconds / size
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit that fits a time, and the seconds it has."""
    return next((unit for unit in _TIMES if seconds >= unit[1]), _TIMES[2] if seconds else _TIMES[0])


def time_column(times: Sequence[float]) -> tuple[str, list[str]]:
    """Return the unit of a column of times, which is the largest one's, and each time in it.

    >>> time_column([1.5, 0.012]), time_column([0.0123, 0])
    (('s', ['1.50', '0.01']), ('ms', ['12.3', '0.0']))
    """
    unit, size = time_unit(max(times, default=0))
    digits = 2 if unit == "s" and max(times) < 10 else 1
    return unit, [f"{time / size:,.{digits}f}" for time in times]
