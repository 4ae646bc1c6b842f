"""What an access to a traced array costs, beside a plain one.

python -m benchmarks.races_recording
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.report import Figure, Section
from nbparallel.distributed.races.access_recorder import AccessRecorder, UserLines
from nbparallel.distributed.races.checked_cell import doors
from nbparallel.distributed.races.traced_array import recording, trace
from nbparallel.distributed.runtime.call_site import label_function

LARGE = 16_000_000
TURN = 200
"""Accesses that are timed together."""
AIMS = {
    "element read": 3e-6,
    "element of a row read": 3e-6,
    "element write": 3e-6,
    "slice write": 5e-6,
    "view": 0.5e-6,
}
"""Seconds."""
AIM_RATIO = 1.05


def _reads(x: Any, n: int) -> None:
    for _ in range(n):
        x[3, 4]


def _writes(x: Any, n: int) -> None:
    for _ in range(n):
        x[3, 4] = 1.0


def _row_elements(x: Any, n: int) -> None:
    row = x[3]
    for _ in range(n):
        row[4]


def _slices(x: Any, n: int) -> None:
    for _ in range(n):
        x[3, 2:8] = 1.0


def _views(x: Any, n: int) -> None:
    for _ in range(n):
        x[2:8]


def _sums(x: Any, n: int) -> None:
    for _ in range(n):
        x[3].sum()


CODE: dict[str, Callable[[Any, int], None]] = {
    "element read": _reads,
    "element of a row read": _row_elements,
    "element write": _writes,
    "slice write": _slices,
    "view": _views,
    "sum of a row": _sums,
}


def _seconds(code: Callable[[Any, int], None], x: Any, n: int) -> float:
    """Return the least of many short runs, for one access: others use the processors as well."""
    least = float("inf")
    for _ in range(max(10, n // TURN)):
        started = time.perf_counter()
        code(x, TURN)
        least = min(least, time.perf_counter() - started)
    return least / TURN


def seconds_of_accesses(n: int) -> dict[str, tuple[float, float]]:
    """Return seconds of each access to a plain array, and to a traced one."""
    x = np.zeros((300, 300))
    address, traced = x.ctypes.data, trace(x)
    lines = UserLines(label_function(__file__))
    recorder = AccessRecorder(lambda array: (1, array.ctypes.data - address), lines)
    found = {}
    for name, code in CODE.items():
        plain = _seconds(code, x, n)
        with recording(recorder), doors(recorder, {}):
            found[name] = plain, _seconds(code, traced, n)
            recorder.take()
    return found


def ratio_in_place(turns: int) -> float:
    """Return how much longer an in-place ufunc on a large array takes if it is traced: median of pairs."""
    x = np.zeros(LARGE)
    traced, address = trace(x), x.ctypes.data
    lines = UserLines(label_function(__file__))
    recorder = AccessRecorder(lambda array: (1, array.ctypes.data - address), lines)
    ratios = []
    with recording(recorder), doors(recorder, {}):
        for turn in range(turns):
            took: dict[bool, float] = {}
            for is_traced in (turn % 2 == 0, turn % 2 == 1):
                y = traced if is_traced else x
                started = time.perf_counter()
                y += 1.0
                took[is_traced] = time.perf_counter() - started
            ratios.append(took[True] / took[False])
    return statistics.median(ratios)


def run(*, quick: bool) -> Section:
    """Measure in this process; nothing else is recorded."""
    found = seconds_of_accesses(2_000 if quick else 20_000)
    ratio = ratio_in_place(8 if quick else 40)
    figures = [
        Figure(
            name,
            f"{traced * 1e6:.2f} µs",
            f"plain: {plain * 1e6:.2f} µs",
            aim=f"≤ {AIMS[name] * 1e6:g} µs" if name in AIMS else "–",
            met=traced <= AIMS[name] if name in AIMS else None,
        )
        for name, (plain, traced) in found.items()
    ]
    figures.append(
        Figure(
            f"in-place addition, {LARGE:,} numbers: traced / plain",
            f"{ratio:.3f}",
            aim=f"≤ {AIM_RATIO}",
            met=ratio <= AIM_RATIO,
        )
    )
    return Section(
        "Recording accesses in a checked cell", figures, "One process; the least of many short runs."
    )


if __name__ == "__main__":
    for figure in run(quick=False).figures:
        print(figure)
