"""``%%parallel --scaling`` and ``%parallel_scaling``: how much faster a cell is on more ranks."""

from __future__ import annotations

import argparse
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from nbparallel_magics import flags
from nbparallel_magics.error_display import brief_errors
from nbparallel_magics.state import ExtensionState

_WITH = {"scaling", "share", "timeout", "seed", "quiet"}


def run(state: ExtensionState, source: str, options: argparse.Namespace, **cell: Any) -> None:
    """Run a cell on ranks of its own, some at a time, and show how much faster it became."""
    from nbparallel.session.diagnostics.speedup import measure

    if any(vars(options)[name] != flags.CELL.get_default(name) for name in vars(options).keys() - _WITH):
        flags.CELL.error(
            "--scaling has ranks of its own; only --share, --timeout, --seed and --quiet go with it"
        )
    try:
        state.check_size(max(options.scaling), 0)
    except ValueError as error:
        raise UsageError(str(error)) from None
    with brief_errors():
        state.scaling = measure(
            lambda session: session.run(source, want_values=False, show_values=False, **cell),
            options.scaling,
            progress=not options.quiet,
        )
    display(state.scaling)
