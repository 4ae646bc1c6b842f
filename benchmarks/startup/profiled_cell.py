"""What ``profile=True`` costs a cell, and how far each line is from the truth.

``python -m benchmarks.startup.profiled_cell [RUNS]`` runs three cells on one rank, in turns without and with
a profile.  It prints the overhead in processor time, the median of neighbouring runs, and the share of each
line beside that of timers, which stand in the code of another run: no two runs here take the same time, so
both look at that one.  Heads of loops are left out.
Goals: at most 5 per cent, and 3 points.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections import Counter

from nbparallel.session import Session

CELLS = {
    "four lines": """total = sum(range(12_000_000))
b = np.sort(a)
for step in range(4):
    c = m @ m
for step in range(3_000):
    words = str(step) * 400
    letters = sorted(words)[:9]
    text = "".join(letters)""",
    "pure Python, short lines": """words = []
for i in range(300_000):
    text = str(i) * 3
    number = sum(map(ord, text))
    words.append(text[::-1])
    table = {letter: 0 for letter in text}
total = sorted(words)
squares = sum(i * i for i in range(3_000_000))""",
    "numpy": """a = np.random.default_rng(0).random(3_000_000)
b = np.sort(a)
for step in range(20):
    c = a * 2 + b
    d = np.sqrt(c).sum()
    e = m @ m
f = np.cumsum(b)""",
}
SETUP = """import numpy as np
from time import perf_counter_ns as _now
m = np.random.default_rng(1).random((500, 500))
a = np.random.default_rng(0).random(3_000_000)"""
START = """_took, _line = dict.fromkeys(range(99), 0), 0
_clock = min(-(_now() - _now()) for _ in range(1000))
_a = _now()"""


def timed(cell: str) -> tuple[str, dict[int, int]]:
    """Return a cell with timers on lines between its own, and which line of it is which of the given.

    Its value has the nanoseconds of each line, less what reading the clock takes.
    """
    found: list[str] = []
    lines, numbers = cell.split("\n"), {}
    timer = "_b = _now(); _took[_line] += _b - _a - _clock; _line = {}; _a = _now()"
    for number, line in enumerate(lines, start=1):
        indent, text = re.match(r"( *)(.*)", line).groups()
        block = text.endswith(":")
        found += [line] if block else [indent + timer.format(number), line]
        numbers[len(found)] = number
        if not block and not "".join(lines[number : number + 1]).startswith(indent or "end"):
            found.append(indent + timer.format(0))
    return "\n".join([*found, "_took"]), numbers


def compare(session: Session, name: str, cell: str, runs: int) -> None:
    """Print one cell's overhead and errors."""
    plain, profiled = [], []
    truth: Counter[int] = Counter()
    found: Counter[int] = Counter()
    for _ in range(runs):
        plain.append(session.run(cell, ranks=[0])[0].cpu_seconds)
        result = session.run(cell, ranks=[0], profile=True)
        profiled.append(result[0].cpu_seconds)
        session.run(START, ranks=[0])
        text, numbers = timed(cell)
        result = session.run(text, ranks=[0], profile=True)
        truth.update({line: ns for line, ns in result.values[0].items() if line})
        assert result.profile is not None
        for line in result.profile.lines:
            if (number := numbers.get(line.line)) in result.values[0]:
                found[number] += round(1e9 * line.mean.seconds)
    found = Counter({line: found[line] for line in sorted(truth) if truth[line]})
    overhead = statistics.median(b / a for a, b in zip(plain, profiled, strict=True)) - 1
    sys.stdout.write(f"{name}: {min(plain):.2f} s, overhead {overhead:.1%}\n   true  profile  error\n")
    for line, ns in found.items():
        true, seen = truth[line] / truth.total(), ns / found.total()
        code = cell.split("\n")[line - 1]
        sys.stdout.write(f" {true:6.1%}   {seen:6.1%} {100 * (seen - true):+6.1f}  {code}\n")


def main(runs: int = 7) -> None:
    """Measure all cells."""
    with Session(2) as session:  # BLAS has one thread for each CPU of a rank
        session.run(SETUP, ranks=[0])
        for name, cell in CELLS.items():
            compare(session, name, cell, runs)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
