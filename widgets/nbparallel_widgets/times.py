"""Axes of time: one unit for a whole axis, round numbers at its ticks."""

from __future__ import annotations

import math

from nbparallel.wire.units import time_unit


def ticks(seconds: float, most: int) -> tuple[list[tuple[float, str]], str]:
    """Return where an axis from 0 to `seconds` has its ticks, with their labels, and its unit.

    >>> ticks(0.9, 5)
    ([(0.0, '0'), (0.2, '200'), (0.4, '400'), (0.6, '600'), (0.8, '800')], 'ms')
    """
    unit, size = time_unit(seconds)
    whole = seconds / size
    if whole <= 0:
        return [(0.0, "0")], unit
    rough = whole / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
    count = math.floor(whole / step + 1e-9)
    return [(round(i * step * size, 12), f"{round(i * step, 9):g}") for i in range(count + 1)], unit
