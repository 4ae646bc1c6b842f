"""Reports about an idle rank's namespace: its variables, and completions."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from types import ModuleType

from IPython.core.completer import provisionalcompleter

from nbparallel import sharing
from nbparallel.engine.rank_state import RankState
from nbparallel.errors.questions import class_name, text_of
from nbparallel.transfer.variable_info import describe_variable
from nbparallel.wire.inspection import Completion, CompletionRequest, Completions, NamespaceReport, Origin

LOOK_SECONDS = 0.3
"""For so long contents are compared; what is left is not known.  The asker waits for a second."""
MOST_NAMES = 1000
"""Variables that are reported, at most; arbitrary."""


def inspect_namespace(state: RankState, number: int) -> NamespaceReport:
    """Return the user's variables of this rank, described; never raises.

    Copies are pickled, to see whether they have changed: as long as a cell that sends them anew would do.
    """
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
        until = time.monotonic() + LOOK_SECONDS
        reported = [
            describe_variable(name, values[name], store, state.names.origin(name))
            for name in names[:MOST_NAMES]
        ]
        reported = [
            replace(info, as_delivered=state.names.is_as_delivered(info.name))
            if info.origin is Origin.COPIED and time.monotonic() < until
            else info
            for info in reported
        ]
        return NamespaceReport(number, tuple(reported), len(names) - len(reported))
    except BaseException as error:  # noqa: BLE001  a question must not end the rank
        return NamespaceReport(number, (), 0, f"{class_name(error)}: {text_of(error)}")


MOST_COMPLETIONS = 300
"""Completions that are returned, at most; arbitrary."""


def complete(state: RankState, request: CompletionRequest) -> Completions:
    """Return what this rank's own shell would offer; never raises, changes no variable."""
    try:
        completer = state.shell.Completer
        completer.use_jedi = False  # it takes seconds the first time, and analyses source, not values
        with provisionalcompleter():
            offered = completer.completions(request.text, request.cursor)
            found = tuple(
                Completion(c.start, c.text, "" if c.type == "<unknown>" else str(c.type or ""))
                for c in itertools.islice(offered, MOST_COMPLETIONS)
            )
    except BaseException:  # noqa: BLE001  it runs the user's __dir__; a key press must not end the rank
        found = ()
    return Completions(request.number, found)
