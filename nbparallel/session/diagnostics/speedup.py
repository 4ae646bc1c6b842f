"""Scaling: the same work on ever more ranks, measured in turns, with Amdahl's law fitted to it."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.errors import ParallelError
from nbparallel.errors.text.table import Table, TableView
from nbparallel.session.processes.launch import cpu_count_text, usable_cpus
from nbparallel.session.results import CellResult
from nbparallel.session.session import Session
from nbparallel.session.tasks.dispatch import call_task
from nbparallel.session.tasks.item_map import ProgressBar
from nbparallel.wire.units import seconds_text

RUNS = 3
"""Of each number of ranks; the quickest counts, as whatever else the machine does makes the others longer."""
FRESH = (
    "it ran on fresh ranks, which hold nothing of earlier cells: define the name in the notebook, or in the "
    "work that is measured"
)


@dataclass(frozen=True, slots=True, repr=False)
class Scaling(TableView):
    """How long some work took on each number of ranks."""

    counts: tuple[int, ...]
    """Numbers of ranks, ascending."""
    seconds: tuple[float, ...]
    """The quickest run of each: until its slowest rank had ended."""
    cpus: int
    """CPUs that ranks may use here."""

    @property
    def speedup(self) -> tuple[float, ...]:
        """How many times as fast as one rank; without a measurement of one, the smallest number is ideal."""
        return tuple(self.counts[0] * self.seconds[0] / seconds for seconds in self.seconds)

    @property
    def efficiency(self) -> tuple[float, ...]:
        """Speed-up divided by the number of ranks."""
        return tuple(s / n for s, n in zip(self.speedup, self.counts, strict=True))

    @property
    def serial(self) -> float | None:
        """Share of the work that is not divided, by Amdahl's law (least squares of relative errors).

        Of numbers of ranks that are within the CPUs; None: fewer than two are.
        """
        within = [
            (n, seconds) for n, seconds in zip(self.counts, self.seconds, strict=True) if n <= self.cpus
        ]
        if len(within) < 2:
            return None
        parts = [(1 / seconds, 1 / (n * seconds)) for n, seconds in within]
        fixed, divided = np.linalg.lstsq(parts, np.ones(len(parts)), rcond=None)[0]
        return float(np.clip(fixed / (fixed + divided), 0, 1))

    def predicted(self, count: float) -> float:
        """Return the speed-up that Amdahl's law predicts for so many ranks."""
        serial = self.serial or 0.0
        return 1 / (serial + (1 - serial) / min(count, self.cpus))

    def sentences(self) -> list[str]:
        """Return what follows from the figures."""
        found = []
        if (serial := self.serial) is not None:
            text, most = (
                f"Amdahl's law: {serial:.0%} of the work is not divided".replace("%", " %"),
                max(self.speedup),
            )
            if serial >= 0.02:
                limit = f"stays below {1 / serial:.1f}"
                if 1 / serial < most + 0.05:  # times vary, and the law is fitted to all of them
                    limit = f"will hardly exceed the {most:.2f} that was measured"
                text += f", so the speed-up {limit}"
            found.append(text)
        if self.counts[-1] > self.cpus:
            found.append(f"{cpu_count_text(self.cpus)} here: more ranks than that take turns")
        return found

    def table(self) -> Table:
        """Return the figures."""
        rows = [
            (str(n), seconds_text(t), f"{s:.2f}", f"{e:.0%}".replace("%", " %"))
            for n, t, s, e in zip(self.counts, self.seconds, self.speedup, self.efficiency, strict=True)
        ]
        return Table(
            "",
            ("ranks", "time", "speed-up", "efficiency"),
            rows,
            "\n".join([*self.sentences(), f"the quickest of {RUNS} runs each, in turns"]),
        )


def scaling(
    function: Callable[..., Any], counts: Iterable[int], args: tuple[Any, ...] = (), *, progress: bool = True
) -> Scaling:
    """Measure how a function becomes faster on more ranks.

    Parameters
    ----------
    function : callable
        Called as ``function(*args)`` on every rank, as by `Session.call`: it divides its work by
        `nbparallel.distributed`, such as ``dist.shard``.
    counts : iterable of int
        Numbers of ranks.  Each gets ranks of its own; they take turns, three times each.
    progress : bool
        Show how many runs are done.

    Returns
    -------
    Scaling
        Its ``counts``, ``seconds``, ``speedup``, ``efficiency`` and ``serial``; shown as a picture or text.

    Raises
    ------
    ValueError
        There are no counts, or too many ranks for this machine.
    ParallelError, KeyboardInterrupt
        As `Session.call`.

    Examples
    --------
    >>> nbparallel.scaling(work, [1, 2, 4]).speedup  # doctest: +SKIP
    (1.0, 1.96, 3.7)
    """
    return measure(lambda session: session.perform(call_task(function, args)), counts, progress=progress)


def measure(
    work: Callable[[Session], CellResult], counts: Iterable[int], *, progress: bool = True
) -> Scaling:
    """Measure `work` in sessions of so many ranks."""
    sizes = sorted({operator.index(count) for count in counts})
    if not sizes:
        raise ValueError("scaling needs numbers of ranks, as in 1,2,4")
    best = dict.fromkeys(sizes, float("inf"))
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(Session(size)) for size in sizes]
        bar = ProgressBar(RUNS * len(sizes)) if progress else None
        stack.callback(bar.close if bar else lambda: None)
        for run in range(RUNS):
            for done, (size, session) in enumerate(zip(sizes, sessions, strict=True), 1 + run * len(sizes)):
                try:
                    result = work(session)
                except ParallelError as error:
                    if any(isinstance(each, NameError) for each in error.errors.values()):
                        error.add_note(FRESH)
                    raise
                best[size] = min(best[size], max(rank.seconds for rank in result.ranks.values()))
                if bar is not None:
                    bar.show(done)
    return Scaling(tuple(sizes), tuple(best.values()), usable_cpus())
