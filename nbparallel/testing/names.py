"""Names of segments that one notebook's session has made, told by their owner records."""

from __future__ import annotations

from collections.abc import Iterable

from nbparallel.supervisor.sweep import look


def names_of(notebook: int, places: Iterable[str] | None = None) -> list[str]:
    """Return the paths of all names of a notebook (or script) and its ranks, sorted.

    Parameters
    ----------
    notebook : int
        Its process id.
    places : iterable of path, optional
        Where to look; by default where a sweep does.
    """
    found = look(places).left
    return sorted(name.path for name in found if name.session.partition(":")[0] == str(notebook))
