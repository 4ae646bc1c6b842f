"""How processor time grows with the number of ranks and with bytes, and whether that is as the model says.

The model (docs/dev/large-groups.md): with more ranks an operation takes at most as many times longer,
since a rank looks at a word or two of every other one; with more bytes at most as many times longer, since
every byte is copied or combined a fixed number of times.  What makes a copy of as many bytes slower, memory
that is farther away than a cache, counts for the copy and not for the operation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

LIMIT = 1.3
"""Greatest exponent that counts as linear: 1, and what the noise of two medians adds over a factor of 4."""
FAR = 4
"""Growth is looked at between so many times fewer and the most ranks: constants hide it among few."""
SHORT = 4 << 10
"""Bytes up to which an array counts as small: of larger ones the bytes take longer than the meetings."""
COPY = "copy"
"""Stands among the operations: what each rank copies by itself, while all do."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operation on arrays of one size that all are shared, or all private."""

    operation: str
    nbytes: int
    shared: bool

    def __str__(self) -> str:
        """Return what tables call it.

        >>> print(Row("gather", 65536, True), Row("barrier", 0, False), sep="; ")
        gather, 64 KB, shared; barrier
        """
        if not self.nbytes:
            return self.operation
        units = (("MB", 20), ("KB", 10), ("B", 0))
        unit, bits = next((unit, bits) for unit, bits in units if self.nbytes >> bits)
        return f"{self.operation}, {self.nbytes >> bits} {unit}, {'shared' if self.shared else 'private'}"


Times = Mapping[Row, Mapping[int, float]]
"""Row -> number of ranks -> seconds of processor time of a rank for one call."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How the time of one row grows; None: too little was measured."""

    in_ranks: float | None
    """The exponent: 1 is linear, 2 quadratic."""
    in_bytes: float | None
    """The same from the size below to this one, without what a copy takes more than linearly."""

    @property
    def as_modelled(self) -> bool:
        """Whether both are at most linear."""
        return max(self.in_ranks or 0.0, self.in_bytes or 0.0) <= LIMIT


def exponent(points: Mapping[int, float]) -> float:
    """Return the slope of the logarithms by least squares.

    >>> round(exponent({4: 16.0, 8: 64.0, 16: 256.0}), 3)
    2.0
    """
    xs, ys = [math.log(x) for x in points], [math.log(y) for y in points.values()]
    x, y = statistics.fmean(xs), statistics.fmean(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def line(points: Mapping[int, float]) -> tuple[float, float]:
    """Return (a, b) of the line a + b·x that is nearest, errors being relative; b without a line is 0.

    >>> [round(value, 3) for value in line({2: 7.0, 8: 25.0, 64: 193.0})]
    [1.0, 3.0]
    """
    weights = {x: y**-2 for x, y in points.items()}
    total = sum(weights.values())
    x = sum(w * at for at, w in weights.items()) / total
    y = sum(w * points[at] for at, w in weights.items()) / total
    spread = sum(w * (at - x) ** 2 for at, w in weights.items())
    slope = sum(w * (at - x) * (points[at] - y) for at, w in weights.items()) / spread if spread else 0.0
    return y - slope * x, slope


def alike(ranks: Sequence[int], cores: int) -> list[int]:
    """Return the larger numbers of ranks that can be compared: all have a core each, or all have not.

    A rank that waits for one without a core yields its own; between the two ways there is a step.
    """
    crowded = [n for n in ranks if n > cores]
    return crowded if len(crowded) > 1 else [n for n in ranks if n <= cores]


def in_ranks(by_ranks: Mapping[int, float], cores: int) -> float | None:
    """Return the exponent of growth with the number of ranks, for the largest ones."""
    compared = alike(sorted(by_ranks), cores)
    far = {n: by_ranks[n] for n in compared if n * FAR >= compared[-1]}
    return exponent(far) if len(far) > 1 else None


def in_bytes(
    few: Mapping[int, float], many: Mapping[int, float], copies: Sequence[Mapping[int, float]], factor: float
) -> float | None:
    """Return the exponent of growth between two sizes, `factor` apart: the median over numbers of ranks.

    Parameters
    ----------
    few, many : mapping
        Seconds of the smaller and of the larger size, by the number of ranks.
    copies : sequence of mapping
        Those of copies of the same sizes.
    """
    found = []
    for n in few.keys() & many.keys():
        copied = math.log(copies[1][n] / copies[0][n]) / math.log(factor)
        found.append(math.log(many[n] / few[n]) / math.log(factor) - max(0.0, copied - 1))
    return statistics.median(found) if found else None


def growths(times: Times, cores: int) -> dict[Row, Growth]:
    """Return how every operation grows: small arrays with ranks, and all with bytes."""
    found = {}
    for row, by_ranks in times.items():
        if row.operation != COPY:
            ranks = in_ranks(by_ranks, cores) if row.nbytes <= SHORT else None
            found[row] = Growth(ranks, _from_the_size_below(times, row))
    return found


def _from_the_size_below(times: Times, row: Row) -> float | None:
    sizes = [r.nbytes for r in times if (r.operation, r.shared) == (row.operation, row.shared)]
    below = max((size for size in sizes if size < row.nbytes), default=0)
    before, after = (times.get(Row(COPY, nbytes, row.shared)) for nbytes in (below, row.nbytes))
    if not below or before is None or after is None:
        return None
    few = times[Row(row.operation, below, row.shared)]
    return in_bytes(few, times[row], (before, after), row.nbytes / below)


def offences(found: Mapping[Row, Growth]) -> Iterator[str]:
    """Yield a sentence for each row that grows worse than the model says."""
    for row, growth in found.items():
        if growth.as_modelled:
            continue
        ways = (("ranks", growth.in_ranks), ("bytes", growth.in_bytes))
        worse = [f"{what} to the power of {power:.1f}" for what, power in ways if (power or 0.0) > LIMIT]
        yield f"{row}: grows with {' and '.join(worse)}"
