"""Names of a session: the notebook's variables and those of all ranks, compared."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbparallel.session.names.delivery import PREDEFINED_NAMES
from nbparallel.session.names.free_names import is_ipythons
from nbparallel.session.processes.rank_handle import RankHandle
from nbparallel.sharing import Store
from nbparallel.transfer.variable_info import describe_variable
from nbparallel.wire.inspection import NamespaceReport, Origin, VariableInfo


@dataclass(frozen=True, slots=True)
class NameStatistics:
    """One name, wherever it is."""

    name: str
    """The name."""
    how: str
    """``shared``, ``copied``, ``own`` (assigned by the ranks), ``differs``, or ``notebook only``."""
    notebook: VariableInfo | None
    """In the notebook; None: it has no such name."""
    ranks: Mapping[int, VariableInfo]
    """On the ranks that answered and have it."""
    view_of: str
    """The notebook's name for shared memory that the ranks' own arrays are parts of; or empty."""
    outdated: bool
    """Whether the notebook's name is bound to other memory by now; the next cell that uses it sends that."""
    hides: str
    """What the name of ranks hides: ``the predefined``, ``the notebook's``, or nothing."""


@dataclass(frozen=True, slots=True)
class SessionNames:
    """All names of a session at one moment."""

    names: tuple[NameStatistics, ...]
    """In alphabetical order."""
    answered: tuple[int, ...]
    """Ranks that replied."""
    busy: tuple[int, ...]
    """Ranks that were running a task, and were not asked."""
    dead: tuple[int, ...]
    """Ranks whose process has ended."""
    silent: Mapping[int, str]
    """Ranks without a reply -> the reason, if known."""
    left_out: int
    """Number of names of ranks that were left out, because there are too many."""


def compare(
    namespace: Mapping[str, Any],
    hidden: Mapping[str, Any],
    store: Store,
    handles: Sequence[RankHandle],
    reports: Mapping[int, NamespaceReport],
) -> SessionNames:
    """Compare the notebook's names with the reports of the ranks.

    Parameters
    ----------
    namespace : mapping
        The notebook's.
    hidden : mapping
        Names in it that are not the user's, with their values, as ``shell.user_ns_hidden``.
    reports : mapping
        Rank -> its reply.
    """
    known = {
        rank: {s.name: s for s in answer.names} for rank, answer in reports.items() if not answer.problem
    }
    dead = tuple(handle.rank for handle in handles if not handle.alive)
    busy = tuple(h.rank for h in handles if h.busy and h.rank not in (*reports, *dead))
    silent = {
        handle.rank: reports[handle.rank].problem if handle.rank in reports else ""
        for handle in handles
        if handle.rank not in (*known, *busy, *dead)
    }
    return SessionNames(
        names=compare_names(namespace, hidden, store, known),
        answered=tuple(sorted(known)),
        busy=busy,
        dead=dead,
        silent=silent,
        left_out=sum(answer.left_out for answer in reports.values()),
    )


def compare_names(
    namespace: Mapping[str, Any],
    hidden: Mapping[str, Any],
    store: Store,
    known: Mapping[int, Mapping[str, VariableInfo]],
) -> tuple[NameStatistics, ...]:
    """Compare the notebook's names with what each rank has by each name, as far as that is known."""
    here = {
        name: describe_variable(name, value, store)
        for name, value in list(namespace.items())
        if _is_users(name, value, hidden)
    }
    everything = sorted({*here, *(name for names in known.values() for name in names)})
    return tuple(
        _compared(name, here, {rank: names[name] for rank, names in known.items() if name in names})
        for name in everything
    )


def _is_users(name: str, value: Any, hidden: Mapping[str, Any]) -> bool:
    return not (
        name.startswith("_")
        or is_ipythons(name)
        or issubclass(type(value), types.ModuleType)
        or (name in hidden and hidden[name] is value)
    )


def _compared(
    name: str, here: Mapping[str, VariableInfo], ranks: Mapping[int, VariableInfo]
) -> NameStatistics:
    mine, theirs = here.get(name), list(ranks.values())
    outdated = any(s.origin is Origin.SHARED and not _same_memory(s, mine) for s in theirs)
    if not theirs:
        how = "notebook only"
    elif len({(s.looks, s.origin) for s in theirs}) > 1:
        how = "differs"
    else:
        how = theirs[0].origin.value
    views = {_owner_of(s, here) for s in theirs if s.origin is Origin.OWN}
    view_of = views.pop() if len(views) == 1 else ""
    own = any(s.origin is Origin.OWN for s in theirs)
    hides = "the predefined" if theirs and name in PREDEFINED_NAMES else ""
    hides = hides or ("the notebook's" if own and mine is not None else "")
    return NameStatistics(name, how, mine, dict(sorted(ranks.items())), view_of, outdated, hides)


def _same_memory(one: VariableInfo, other: VariableInfo | None) -> bool:
    return other is not None and (one.segment, one.start, one.stop, one.form) == (
        other.segment,
        other.start,
        other.stop,
        other.form,
    )


def _owner_of(part: VariableInfo, here: Mapping[str, VariableInfo]) -> str:
    """Return the notebook's largest array that holds all bytes of a rank's own one, or an empty string."""
    owners = [
        (whole.stop - whole.start, whole.name)
        for whole in here.values()
        if part.segment
        and whole.segment == part.segment
        and whole.start <= part.start
        and part.stop <= whole.stop
    ]
    return max(owners)[1] if owners else ""
