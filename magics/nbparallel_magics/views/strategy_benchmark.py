"""``%sharing_strategy --bench``: measure every strategy on this machine and show the tables."""

from __future__ import annotations

from IPython.display import display

from nbparallel_magics.error_display import brief_errors
from nbparallel_magics.state import ExtensionState

DEFAULT_SECONDS = 20.0
"""How long the measurement may take."""


def bench(state: ExtensionState, seconds: float) -> None:
    """Measure on the ranks that run, or on one that is started for this, and show the figures."""
    from nbparallel.session.diagnostics.strategy_benchmark import strategy_bench

    print(f"measuring every strategy on a rank for about {seconds:g} s; interrupt to stop")  # noqa: T201
    with brief_errors():
        figures = strategy_bench(state.running_session(), seconds=seconds)
    display(figures)
