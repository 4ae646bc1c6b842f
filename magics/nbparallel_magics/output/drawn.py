"""``--draw`` and ``%parallel_draw``: what ranks hold, as a picture below the cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython.display import display

from nbparallel_magics.output.publisher import Publisher

if TYPE_CHECKING:
    from nbparallel.session import PendingCell, Session
    from nbparallel.session.results import DrawnValues


def show(drawn: DrawnValues | None) -> None:
    """Show a picture below the cell that runs; nothing if no rank has reported."""
    if drawn is not None:
        from nbparallel_widgets.draw import DrawnView

        display(DrawnView(drawn))


def show_of_error(error: BaseException) -> None:
    """Show the picture of a cell that failed: of what is there."""
    show(getattr(getattr(error, "result", None), "drawn", None))


def when_ended(publisher: Publisher) -> Callable[[PendingCell], None]:
    """Return what shows the picture of an ``--async`` cell below it, once that has ended."""

    def ended(pending: PendingCell) -> None:
        error = pending.exception()
        result: Any = pending.result() if error is None else getattr(error, "result", None)
        if (drawn := getattr(result, "drawn", None)) is not None:
            from nbparallel_widgets.draw import DrawnView

            view = DrawnView(drawn)
            publisher.display({"text/plain": repr(view), "text/html": view._repr_html_()}, {}, {})

    return ended


def show_now(
    session: Session, names: Sequence[str], ranks: Sequence[int] | None, namespace: Mapping[str, Any]
) -> None:
    """Show what names hold now on some ranks, None: on all; say what of `namespace` has not reached them."""
    found = session.draw(names)
    show(found if ranks is None else found.only(ranks))
    missing = [name for name in names if found.is_missing(name) and name in namespace]
    if missing:
        reach, them = ("reach", "them") if len(missing) > 1 else ("reaches", "it")
        print(  # noqa: T201
            f"{', '.join(missing)} of the notebook {reach} the ranks with the first cell that uses {them}"
        )
