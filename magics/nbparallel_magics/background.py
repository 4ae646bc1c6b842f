"""``--async`` and ``%parallel_result``: a cell that runs while the notebook goes on, and its result later."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from nbparallel.errors import rank_list
from nbparallel_magics.error_display import brief_errors
from nbparallel_magics.output.cell_output import CellOutput

if TYPE_CHECKING:
    from nbparallel.session import CellResult, PendingCell

WAIT_SECONDS = 1.0
"""Length of one wait for a cell; a signal ends Python's waits immediately."""


class BackgroundCell:
    """The last ``--async`` cell of a notebook, as the notebook's user holds it.

    Attributes and methods that are not here are those of `nbparallel.session.PendingCell`: ``state``,
    ``done()``, ``wait(timeout)``, ``result(timeout)``, ``cancel()``, ``stdout(rank)``.

    Parameters
    ----------
    pending : PendingCell
        The cell in its session.
    number : int
        The notebook's ``In[n]``.
    out : str or None
        Name for the values, if there was a ``-o``.
    """

    def __init__(self, pending: PendingCell, number: int, out: str | None) -> None:
        self.pending, self.number, self.out = pending, number, out

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.pending, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in dir(self.pending) if not name.startswith("_"))]

    def __repr__(self) -> str:
        advice = {
            "running": "%parallel_result waits for it",
            "failed": "%parallel_result raises its error",
        }.get(self.pending.state, "%parallel_result shows what it printed")
        if self.out and self.pending.state in ("running", "done"):
            advice += f" and puts its values into {self.out}"
        return f"<cell In[{self.number}] on the ranks: {self.pending.state}; {advice}>"


def note_failure(cell: BackgroundCell, sink: CellOutput | None) -> None:
    """Add a line to the cell's own output when it ends with an error."""

    def ended(pending: PendingCell) -> None:
        error = pending.exception()
        if sink is not None and error is not None:
            text = "was interrupted" if pending.state == "cancelled" else f"failed: {_first_line(error)}"
            sink.note(f"the cell {text}; %parallel_result raises it")

    cell.pending.add_done_callback(ended)


def show(
    cell: BackgroundCell,
    sink: CellOutput,
    variables: MutableMapping[str, Any],
    remember: Callable[[BaseException], None],
) -> None:
    """Wait for a cell, show what it printed, assign its values, or raise what it raised.

    An interrupt during the wait interrupts the cell, as if it ran in the foreground.

    Parameters
    ----------
    sink : CellOutput
        Where the cell's output is shown.
    variables : mapping
        The notebook's, for the values.
    remember : callable
        Keeps the error for ``%parallel_tb``.
    """
    _wait(cell.pending)
    error = cell.pending.exception()
    result = cell.pending.result() if error is None else getattr(error, "result", None)
    if result is not None:
        ending = "nothing was printed" if cell.out is None else f"its values are in {cell.out}"
        _show(sink, result, ending if error is None else "")
    if error is not None:
        remember(error)
        with brief_errors():
            raise error
    if cell.out is not None:
        variables[cell.out] = cell.pending.result().values


def _wait(pending: PendingCell) -> None:
    while not pending.done():
        try:
            pending.wait(WAIT_SECONDS)
        except KeyboardInterrupt:
            pending.cancel()


def _show(sink: CellOutput, result: CellResult, ending: str) -> None:
    """Show what a cell printed and its values; if there is nothing, that it is done, and `ending`."""
    for rank, part in result.ranks.items():
        sink.stream(rank, "stdout", part.stdout)
        sink.stream(rank, "stderr", part.stderr)
        for data in part.displays[: len(part.displays) - bool(part.text)]:
            sink.display(rank, dict(data), {}, {}, False)
        if part.text and part.displays:
            sink.result(rank, dict(part.displays[-1]), {})
    printed = any(part.stdout or part.stderr or part.displays for part in result.ranks.values())
    if not printed and ending:
        sink.note(f"done on {rank_list(result.ranks)}, in {result.seconds:.3g} s; {ending}")
    sink.finish()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
