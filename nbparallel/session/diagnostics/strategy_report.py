"""What sharing strategies cost on this machine, as numbers and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from nbparallel.errors.text.escaping import escape_html
from nbparallel.errors.text.table import Table
from nbparallel.wire.units import seconds_text, size_text


@dataclass(frozen=True, slots=True)
class Steps:
    """What happens to an array, in order: seconds each."""

    allocate: float
    """Making it, its memory reserved."""
    touch: float
    """Writing every byte for the first time."""
    hand_over: float
    """Making the message for a rank; with `copy`, the copy."""
    attach: float
    """On the rank: from the message to the array."""
    read: float
    """On the rank: reading every byte for the first time."""
    free: float
    """In the notebook: until the memory is the system's again."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)

    def __iter__(self) -> Iterator[float]:
        return (getattr(self, field.name) for field in fields(self))


STEPS = ("allocate", "first touch", "hand over", "attach", "first read", "free")
"""Names of the steps, in the order of `Steps`."""


@dataclass(frozen=True, slots=True)
class StrategyTime:
    """Times of one strategy and size: medians."""

    strategy: str
    """Its name."""
    nbytes: int
    """Size of the array."""
    seconds: Steps
    """For one array."""
    runs: int
    """How many runs the medians are of."""


@dataclass(frozen=True, slots=True)
class StrategyCost:
    """What some arrays cost besides time, while the notebook and one rank have them."""

    strategy: str
    """Its name."""
    notebook_descriptors: int
    """Open files in the notebook."""
    rank_descriptors: int
    """On the rank."""
    supervisor_descriptors: int
    """In the process that hands them out."""
    names: int
    """Names in the file system."""
    nbytes: int
    """Memory of all processes together."""


@dataclass(frozen=True, slots=True)
class StrategyFigures:
    """All figures of one measurement."""

    times: tuple[StrategyTime, ...]
    """By size, then by strategy."""
    costs: tuple[StrategyCost, ...]
    """By strategy."""
    cost_arrays: int
    """How many arrays the costs are for."""
    cost_nbytes: int
    """Size of each."""
    left_out: tuple[str, ...]
    """Sentences: what was not measured, and why."""
    load: float
    """Processes that wanted a CPU in the last minute, when it began; 0: not known."""
    cpus: int
    """CPUs that may be used."""

    def times_table(self) -> Table:
        """Return a row for each size and strategy, the quickest of a size first."""
        rows = []
        for nbytes, times in self._by_size():
            for time in times:
                cells = [seconds_text(value) for value in (*time.seconds, time.seconds.total)]
                rows.append((time.strategy, size_text(nbytes), *cells))
        return Table(
            "one array, from the notebook to a rank and back to the system (the quickest first)",
            ("strategy", "size", *STEPS, "in all"),
            rows,
            "\n".join([*self.left_out, self._warning()]),
        )

    def costs_table(self) -> Table:
        """Return a row for each strategy: descriptors, names and memory."""
        rows = [
            (
                cost.strategy,
                *map(str, (cost.notebook_descriptors, cost.rank_descriptors, cost.supervisor_descriptors)),
                str(cost.names),
                size_text(cost.nbytes),
            )
            for cost in self.costs
        ]
        return Table(
            f"what {self.cost_arrays} arrays of {size_text(self.cost_nbytes)} cost while a rank has them",
            ("strategy", "open files: notebook", "rank", "supervisor", "names", "memory"),
            rows,
        )

    def advice(self) -> str:
        """Return the quickest strategies in a sentence; near ones count as equal."""
        lines = []
        for nbytes, times in self._by_size():
            best = times[0].seconds.total
            near = [time.strategy for time in times if time.seconds.total <= 1.2 * best]
            lines.append(f"{size_text(nbytes)}: {', '.join(near)}")
        return f"quickest, or within 20 % of it: {'; '.join(lines)}" if lines else ""

    def _by_size(self) -> Iterator[tuple[int, Sequence[StrategyTime]]]:
        for nbytes in sorted({time.nbytes for time in self.times}):
            times = [time for time in self.times if time.nbytes == nbytes]
            yield nbytes, sorted(times, key=lambda time: time.seconds.total)

    def _warning(self) -> str:
        runs = sorted({time.runs for time in self.times})
        many = f"{runs[0]} to {runs[-1]}" if len(runs) > 1 else str(runs[0] if runs else 0)
        text = f"medians of {many} runs; other work on the machine makes every time longer"
        if self.load > self.cpus:
            text += f": it is busy now (load {self.load:.1f} on {self.cpus} CPUs), so measure again later"
        return text

    def __repr__(self) -> str:
        return "\n\n".join([self.times_table().text(), self.costs_table().text(), self.advice()]).rstrip()

    def _repr_html_(self) -> str:
        return f"{self.times_table().html()}{self.costs_table().html()}<p>{escape_html(self.advice())}</p>"
