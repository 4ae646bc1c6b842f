"""``--async`` and ``%parallel_result``: a cell that runs while the notebook goes on, and its result later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError

from nbparallel.errors import BusyError
from nbparallel_magics.error_display import brief_errors, briefly
from nbparallel_magics.output.cell_output import CellOutput
from nbparallel_magics.output.cell_views import CellView

if TYPE_CHECKING:
    from nbparallel.session import CellResult, PendingCell, RankValues

WAIT_SECONDS = 1.0
"""Length of one wait for a cell; a signal ends Python's waits immediately."""


class BackgroundCell:
    """An ``--async`` cell of a notebook, as the notebook's user holds it: its handle.

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
        # A saved notebook shows what this was when the cell began: it has to stay true.
        state = "started" if self.pending.state == "running" else self.pending.state
        advice = {
            "queued": "it runs when those before it have ended, and %parallel_result waits for it",
            "started": "%parallel_result waits for it",
            "failed": "%parallel_result raises its error",
        }.get(state, "%parallel_result shows what it printed")
        if self.out and state in ("queued", "started", "done"):
            advice += f" and puts its values into {self.out}"
        return f"<cell In[{self.number}] on the ranks: {state}; {advice}>"


def find(name: str, variables: Mapping[str, Any]) -> BackgroundCell:
    """Return the cell whose handle is bound to a name of the notebook; UsageError if there is none."""
    cell = variables.get(name)
    if not isinstance(cell, BackgroundCell):
        raise UsageError(
            f"%parallel_result: {name} is no handle of an --async cell, which `cell = _` keeps after it has "
            "been shown, and `cell = %parallel --async CODE` directly"
        )
    return cell


def wait_for_turn(cell: BackgroundCell | None) -> None:
    """Wait until the last ``--async`` cell has ended; an interrupt raises, and the cell goes on."""
    with brief_errors():
        while cell is not None and not cell.pending.done():
            cell.pending.wait(WAIT_SECONDS)


def note_failure(cell: BackgroundCell, sink: CellOutput | None) -> None:
    """Add a line to the cell's own output when it ends with an error."""

    def ended(pending: PendingCell) -> None:
        error = pending.exception()
        if sink is not None and error is not None:
            first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
            text = "was interrupted" if pending.state == "cancelled" else f"failed: {first_line}"
            sink.note(f"the cell {text}; %parallel_result raises it")

    cell.pending.add_done_callback(ended)


def fetch(
    cell: BackgroundCell,
    new_output: Callable[[], CellOutput],
    variables: MutableMapping[str, Any],
    remember: Callable[[BaseException], None],
    views: Sequence[CellView],
) -> CellResult:
    """Wait for a cell, assign its values, return its result; or show what it printed, and raise its error.

    An interrupt during the wait interrupts the cell, as if it ran in the foreground.

    Parameters
    ----------
    new_output : callable
        Returns where the cell's output is shown: by the result, when it is displayed.
    variables : mapping
        The notebook's, for the values.
    remember : callable
        Keeps the error for ``%parallel_tb``.
    views : sequence of CellView
        What flags may have asked for: a profile, a report of races …
    """
    from nbparallel.session.tasks.cell_queue import wait_for_end
    from nbparallel_magics import result_display  # brings numpy, which loading must not

    wait_for_end(cell.pending)
    _assign_ended(variables)
    error = cell.pending.exception()
    if error is not None:
        if (partial := getattr(error, "result", None)) is not None:
            result_display.show(new_output(), partial, views)
        remember(error)
        with brief_errors():
            raise error
    found = cell.pending.result()
    if cell.out is not None:
        variables[cell.out] = found.values
    ending = "nothing was printed" if cell.out is None else f"its values are in {cell.out}"
    return result_display.DisplayedResult.of(
        found, new_output=new_output, views=views, cell=f"In[{cell.number}]", ending=ending
    )


def _assign_ended(variables: MutableMapping[str, Any]) -> None:
    """Bind the names of ``-o`` of all other cells that have ended to their values, too."""
    for name, value in list(variables.items()):
        if name in _LAST_OUTPUTS:
            continue
        if isinstance(value, PendingValues) and (values := value.ended_values()) is not None:
            variables[name] = values


_LAST_OUTPUTS = {"_", "__", "___"}
"""IPython's own: it stops setting them when one is bound to another value than it has shown."""


class PendingValues:
    """What the name of ``-o`` is bound to until the values are there: every use raises, and says so."""

    __slots__ = ("_cell",)

    def __init__(self, cell: BackgroundCell) -> None:
        self._cell = cell

    def __repr__(self) -> str:
        return f"<{_advice(self._cell)}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what front ends and copies look for
            raise AttributeError(name)
        return self._refuse()

    def ended_values(self) -> RankValues | None:
        """Return the values if the cell has ended without an error."""
        pending = self._cell.pending
        return pending.result().values if pending.done() and pending.exception() is None else None

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise briefly(BusyError(_advice(self._cell)))


def _advice(cell: BackgroundCell) -> str:
    if cell.pending.done() and cell.pending.exception() is not None:
        return f"In[{cell.number}] has failed on the ranks: %parallel_result _{cell.number} raises its error"
    if cell.pending.done():
        return f"In[{cell.number}] has ended on the ranks: %parallel_result puts its values into {cell.out}"
    what = "has not begun" if cell.pending.state == "queued" else "still runs"
    return (
        f"{cell.out} has no values yet, because In[{cell.number}] {what} on the ranks: %parallel_result "
        "waits for it"
    )


_USES = """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul
and or xor neg pos abs lt le gt ge eq ne getitem setitem iter len contains bool int float complex index
call array str format reduce_ex copy deepcopy"""
for _use in _USES.split():
    setattr(PendingValues, f"__{_use}__", PendingValues._refuse)
