"""``%sharing_strategy --bench``: measure the strategies here, and show tables and a picture."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from IPython.display import display

from nbparallel_magics.error_display import brief_errors
from nbparallel_magics.state import ExtensionState

if TYPE_CHECKING:
    from nbparallel.session.diagnostics.strategy_report import StrategyFigures

DEFAULT_SECONDS = 20.0
"""How long the measurement may take."""


@dataclass(frozen=True, slots=True)
class StrategyBenchmarkView:
    """The tables of a measurement."""

    figures: StrategyFigures
    """All of it."""

    def __repr__(self) -> str:
        return self.figures.tables_text()

    def _repr_html_(self) -> str:
        return self.figures.tables_html()


def bench(state: ExtensionState, seconds: float) -> None:
    """Measure on the ranks that run, or on one that is started for this, and show what came of it."""
    from nbparallel.session.diagnostics.strategy_benchmark import strategy_bench

    print(f"measuring every strategy on a rank for about {seconds:g} s; interrupt to stop")  # noqa: T201
    with brief_errors():
        figures = strategy_bench(state.running_session(), seconds=seconds)
    display(StrategyBenchmarkView(figures))
    chart = figures.chart()
    if chart:
        picture = draw(figures)
        bundle: dict[str, str | bytes] = {"text/plain": chart}
        display(bundle if picture is None else {**bundle, "image/png": picture}, raw=True)


def draw(figures: StrategyFigures) -> bytes | None:
    """Return a PNG: the whole time over the size, and the steps of the largest; None without matplotlib."""
    try:
        from matplotlib.figure import Figure  # not pyplot: the user's figures are left alone
    except ImportError:
        return None
    from nbparallel.session.diagnostics.strategy_report import STEPS
    from nbparallel.wire.units import size_text

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    lines, bars = figure.subplots(1, 2)
    sizes = sorted({time.nbytes for time in figures.times})
    names = [time.strategy for time in figures.times if time.nbytes == sizes[0]]
    for number, name in enumerate(sorted(names)):
        times = [time for time in figures.times if time.strategy == name]
        lines.plot(
            [time.nbytes for time in times],
            [time.seconds.total for time in times],
            marker="osv^D"[number % 5],
            linestyle=("-", "--", "-.", ":")[number % 4],
            label=name,
        )
    lines.set(xscale="log", yscale="log", ylabel="seconds, all steps", title="one array")
    lines.set_xticks(sizes, [size_text(nbytes) for nbytes in sizes])
    lines.minorticks_off()
    lines.legend()
    largest = [time for time in figures.times if time.nbytes == sizes[-1]]
    begin = [0.0] * len(largest)
    for number, step in enumerate(STEPS):
        lengths = [tuple(time.seconds)[number] for time in largest]
        bars.barh([time.strategy for time in largest], lengths, left=begin, label=step)
        begin = [a + b for a, b in zip(begin, lengths, strict=True)]
    bars.invert_yaxis()
    bars.set(xlabel="seconds", title=f"the steps of {size_text(sizes[-1])}")
    bars.legend(loc="upper left", bbox_to_anchor=(1, 1))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()
