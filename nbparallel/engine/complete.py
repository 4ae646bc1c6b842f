"""An idle rank says how code that is being typed may go on."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from IPython.core.completer import provisionalcompleter

from nbparallel.wire.inspection import Completion, Completions, Unfinished

if TYPE_CHECKING:
    from nbparallel.engine.shell import RankShell

MOST = 300
"""Completions that are told; nobody reads more."""


def complete(shell: RankShell, unfinished: Unfinished) -> Completions:
    """Return what this rank's own shell would offer; never raises, changes no variable."""
    try:
        completer = shell.Completer
        completer.use_jedi = False  # it takes seconds the first time, and looks at source, not at values
        with provisionalcompleter():
            offered = completer.completions(unfinished.text, unfinished.cursor)
            found = tuple(
                Completion(c.start, c.text, "" if c.type == "<unknown>" else str(c.type or ""))
                for c in itertools.islice(offered, MOST)
            )
    except Exception:  # noqa: BLE001  it runs the user's __dir__; a key press must not end the rank
        found = ()
    return Completions(unfinished.number, found)
