"""Views of a cell: what stands below its output because a flag asked for it, as ``--draw``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython.display import display

from nbparallel_magics.output.publisher import Publisher

if TYPE_CHECKING:
    from nbparallel.distributed.tracing.profiling.profile import Profile
    from nbparallel.session import PendingCell, Session
    from nbparallel.session.diagnostics.measurement import Scaling
    from nbparallel_magics.output.cell_output import CellOutput
    from nbparallel_widgets.measured_view import ProfileView


class CellView:
    """Shows what a flag asked for of each cell, and keeps it until the next cell begins.

    Attributes
    ----------
    option : str
        Of the flag, and of `Session.run`.
    found : str
        Of the cell's result: what is shown.
    last : object
        Of the last cell; None if the flag was not given.
    """

    def __init__(self, option: str, found: str, view_of: Callable[[Any], Any] = lambda found: found) -> None:
        self.option, self.found, self._view_of = option, found, view_of
        self.last: Any = None

    def wanted(self, options: argparse.Namespace) -> dict[str, Any]:
        """Return what `Session.run` is passed; empty if the flag was not given."""
        self.last = None
        value = getattr(options, self.option, None)
        return {self.option: value} if value else {}

    def show(self, result: Any) -> None:
        """Show what was found below the cell that runs; nothing if no rank has reported."""
        if (found := getattr(result, self.found, None)) is not None:
            self.last = found
            display(self._view_of(found))

    def show_of_error(self, error: BaseException, sink: CellOutput | None) -> None:
        """Show what was found of a cell that failed: of what its ranks have done until then."""
        if sink is not None:
            sink.finish()  # the view stands below it
        self.show(getattr(error, "result", None))

    def when_ended(self, publisher: Publisher) -> Callable[[PendingCell], None]:
        """Return what shows the view of an ``--async`` cell below it, once that has ended."""

        def ended(pending: PendingCell) -> None:
            error = pending.exception()
            result: Any = pending.result() if error is None else getattr(error, "result", None)
            if (found := getattr(result, self.found, None)) is not None:
                self.last, view = found, self._view_of(found)
                publisher.display({"text/plain": repr(view), "text/html": view._repr_html_()}, {}, {})

        return ended


def picture(drawn: Any) -> Any:
    """Return the picture of what ranks hold."""
    from nbparallel_widgets.draw import DrawnView

    return DrawnView(drawn)


def chart(scaling: Scaling) -> str:
    """Return the picture of what `nbparallel.scaling` returned, which a notebook shows."""
    from nbparallel_widgets.measured_view import scaling_html

    return scaling_html(scaling)


def profile_picture(profile: Profile) -> ProfileView:
    """Return the picture of where the time has gone."""
    from nbparallel_widgets.measured_view import ProfileView

    return ProfileView(profile)


def show_now(
    session: Session, names: Sequence[str], ranks: Sequence[int] | None, namespace: Mapping[str, Any]
) -> None:
    """Show what names hold now on some ranks, None: on all; say what of `namespace` has not reached them."""
    found = session.draw(names)
    display(picture(found if ranks is None else found.only(ranks)))
    missing = [name for name in names if found.is_missing(name) and name in namespace]
    if missing:
        reach, them = ("reach", "them") if len(missing) > 1 else ("reaches", "it")
        print(  # noqa: T201
            f"{', '.join(missing)} of the notebook {reach} the ranks with the first cell that uses {them}"
        )
