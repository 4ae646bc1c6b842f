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


def fixed_text(seconds: float, whole: float) -> str:
    """Return a time in the unit and with the decimals that all times of a table have, which go up to `whole`.

    >>> fixed_text(0.3, 5.0), fixed_text(0, 5.0), fixed_text(12.3456, 50), fixed_text(0.0123, 0.05)
    ('0.30 s', '0.00 s', '12.3 s', '12.3 ms')
    """
    if whole >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.2f} s" if whole >= 1 else f"{1000 * seconds:.1f} ms"


def next_round(seconds: float) -> float:
    """Return the next round number: the end of an axis of something that grows.

    >>> next_round(1.2), next_round(4.9), next_round(5), next_round(41)
    (1.5, 5.0, 5.0, 50.0)
    """
    power = 10.0 ** math.floor(math.log10(seconds))
    steps = (step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10))
    return next(step for step in steps if step >= seconds * (1 - 1e-9))
