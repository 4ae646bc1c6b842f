"""Spans of time as people read them: one unit for a whole axis, three digits."""

from __future__ import annotations

import math

_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def seconds_text(seconds: float) -> str:
    """Return a span with the unit that fits it.

    >>> seconds_text(1.2345), seconds_text(0.0123), seconds_text(4.5e-6), seconds_text(0), seconds_text(71)
    ('1.23 s', '12.3 ms', '4.5 µs', '0 s', '71 s')
    """
    unit, size = unit_of(seconds)
    value = seconds / size
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit for a span, and how many seconds it has."""
    return next((unit for unit in _UNITS if seconds >= unit[1]), _UNITS[2] if seconds else _UNITS[0])


def ticks(seconds: float, most: int) -> tuple[list[tuple[float, str]], str]:
    """Return where an axis from 0 to `seconds` has its ticks, with their labels, and its unit.

    >>> ticks(0.9, 5)
    ([(0.0, '0'), (0.2, '200'), (0.4, '400'), (0.6, '600'), (0.8, '800')], 'ms')
    """
    unit, size = unit_of(seconds)
    whole = seconds / size
    if whole <= 0:
        return [(0.0, "0")], unit
    rough = whole / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
    count = math.floor(whole / step + 1e-9)
    return [(round(i * step * size, 12), f"{round(i * step, 9):g}") for i in range(count + 1)], unit
