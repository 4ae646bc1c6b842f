"""``%share`` and ``%sharing_strategy``: the notebook's view of `nbparallel.sharing`."""

from __future__ import annotations

import inspect
import os
import resource
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.display import display

from nbparallel.errors import StrategyUnavailableError
from nbparallel.errors.text.table import Table
from nbparallel.wire.system import file_system_room
from nbparallel.wire.units import size_text
from nbparallel_magics.error_display import brief_errors
from nbparallel_magics.state import ExtensionState

if TYPE_CHECKING:
    from nbparallel.session import Session

_COSTS = {
    "file_descriptor": (
        "an anonymous memory file; its descriptor travels over a socket",
        "one or two open files for each large array; cleaned up by the system, always",
    ),
    "file_system": (
        "a named object in /dev/shm",
        "the same, and a name that has to be removed; size of /dev/shm",
    ),
    "file_region": (
        "a block inside one large region",
        "one or two open files for many; a region is freed as a whole",
    ),
    "mmap": (
        "a temporary file in a folder of your choice",
        "disk instead of memory; what is to survive a restart is opened with nbp.from_file",
    ),
    "copy": ("nothing: arrays are copied to every rank", "memory and time for every rank"),
}
"""What each strategy is and costs, in words; docs/explanation/memory.md has the reasons."""


def strategies_table() -> Table:
    """Return the sharing strategies as they are now: a row for each, the current one first."""
    from nbparallel.sharing import get_all_sharing_strategies, get_sharing_strategy
    from nbparallel.sharing.strategies import registry

    current, strategies = get_sharing_strategy(), get_all_sharing_strategies()
    own = {s.name: (inspect.getdoc(s) or "").partition("\n")[0] for s in registry.choice().own}
    names = [current, *(name for name in strategies if name != current), *strategies.missing]
    rows = [(name, _state(name), *_COSTS.get(name, (own.get(name, ""), ""))) for name in names]
    return Table(
        f"sharing strategy: {current}", ("name", "here", "a segment is", "it costs"), rows, _limits()
    )


def _state(name: str) -> str:
    """Return whether a strategy is the current one, with its options, or can be used."""
    from nbparallel.sharing import get_all_sharing_strategies, get_sharing_strategy
    from nbparallel.sharing.strategies import registry

    if name == get_sharing_strategy():
        options = registry.strategies()[name].options.items()
        return f"current {' '.join(f'{key}={value}' for key, value in options)}".rstrip()
    missing = get_all_sharing_strategies().missing
    return f"no: {missing[name]}" if name in missing else "yes"


def _limits() -> str:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = file_system_room("/dev/shm")
    shm = "" if room is None else f"; /dev/shm: {size_text(room[0])} of {size_text(room[1])} free"
    return f"open files: at most {files} a process{shm}"


def switch(line: str) -> str:
    """Choose the strategy of new arrays, ``NAME [option=value …]``, and return a line that says so.

    UsageError if that does not work here.
    """
    try:
        name, *words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%sharing_strategy: {line!r} cannot be read: {error}") from None
    options = {key: os.path.expanduser(value) for key, _, value in (word.partition("=") for word in words)}
    truths = {key: value == "True" for key, value in options.items() if value in ("True", "False")}
    if any(word.startswith("-") for word in words):
        raise UsageError("%sharing_strategy: flags come before the name")
    if "" in options.values():
        raise UsageError("%sharing_strategy: options are written name=value, as in mmap directory=/var/tmp")
    from nbparallel.sharing import set_sharing_strategy

    try:
        set_sharing_strategy(name, **options | truths)
    except (TypeError, ValueError, StrategyUnavailableError) as error:
        raise UsageError(str(error)) from None
    state = _state(name).removeprefix("current").strip()
    return (
        f"sharing strategy: {name}{f' ({state})' if state else ''} for new arrays; those that are shared "
        "already stay as they are"
    )


def share(state: ExtensionState, names: Sequence[str]) -> Sequence[str]:
    """Move arrays of the notebook into shared memory, writable by ranks; return notes for the user."""
    namespace = state.shell.user_ns
    if missing := [name for name in names if name not in namespace]:
        raise UsageError(f"%share: the notebook has no variable {' or '.join(map(repr, missing))}")
    return state.session_for(None).share_names(names, namespace)


def bench(session: Session | None, seconds: float | None) -> None:
    """Measure every strategy, on the ranks that run or on one that is started for this; show the times."""
    from nbparallel.session.diagnostics.measurement import SECONDS, strategy_bench

    limit = seconds or SECONDS
    print(f"measuring every strategy on a rank for about {limit:g} s; interrupt to stop")  # noqa: T201
    with brief_errors():
        found = strategy_bench(session, seconds=limit)
    display(found)
