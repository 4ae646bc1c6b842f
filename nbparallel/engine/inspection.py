"""An idle rank says which names it has."""

from __future__ import annotations

import itertools
from types import ModuleType

from IPython.core.completer import provisionalcompleter

from nbparallel import sharing
from nbparallel.engine.rank_state import RankState
from nbparallel.transfer.variable_info import seen
from nbparallel.wire.inspection import Completion, CompletionRequest, Completions, NamespaceReport

MOST_NAMES = 1000
"""Names that are told; a table of more helps nobody."""


def look(state: RankState, number: int) -> NamespaceReport:
    """Return the names of this rank and how they look; never raises."""
    try:
        store, values = (
            sharing.current_store(),
            state.variables.copy(),
        )  # a thread may assign at the same time
        names = [
            name
            for name in state.defaults.user_names()
            if name in values and not issubclass(type(values[name]), ModuleType)
        ]
        told = tuple(seen(name, values[name], store, state.names.origin(name)) for name in names[:MOST_NAMES])
        return NamespaceReport(number, told, len(names) - len(told))
    except Exception as error:  # noqa: BLE001  a question must not end the rank
        return NamespaceReport(number, (), 0, f"{type(error).__name__}: {error}")


MOST = 300
"""Completions that are told; nobody reads more."""


def complete(state: RankState, unfinished: CompletionRequest) -> Completions:
    """Return what this rank's own shell would offer; never raises, changes no variable."""
    try:
        completer = state.shell.Completer
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
