"""Results of a task, by rank and as a whole, and the records from which views of it are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from nbparallel.distributed.races.report import Race, RaceReport
    from nbparallel.distributed.tracing.profiling.profile import Profile
    from nbparallel.errors import NbParallelError
    from nbparallel.wire.inspection import DrawnNames
    from nbparallel.wire.messages import RankTimeline

RACES = "nbparallel.distributed.races"
"""The observer of ``check_races=True``."""
PROFILE = "nbparallel.distributed.tracing.profiling"
"""The observer of ``profile=True``."""


@dataclass(frozen=True, slots=True)
class RemoteValue:
    """Stands for a value that stayed on its rank because it cannot be pickled."""

    rank: int
    """The rank that has the value."""
    text: str
    """The value as text."""
    reason: str
    """Why it could not travel."""
    error: NbParallelError | None = field(default=None, compare=False)
    """What this process lacked to rebuild it, without a traceback: its frames would keep arrays alive."""

    def __repr__(self) -> str:
        return f"on rank {self.rank}: {self.text or f'a value that stayed there ({self.reason})'}"


class RankValues:
    """The values of one name or expression, one of each rank; a snapshot.

    Indexed by rank (`KeyError` for a rank that took no part); iterates, compares, adds and prints as a list
    in rank order; a slice, of ranks, is one.  `gather()` joins the parts; a notebook shows long ones by class
    and shape.  ``list(parts)`` is for functions that take no other kind, such as `json.dumps` and
    `torch.stack`.

    >>> parts = RankValues({0: 10, 2: 12})
    >>> parts[2], list(parts), parts == [10, 12], parts
    (12, [10, 12], True, [10, 12])
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[int, Any]) -> None:
        self._values = dict(sorted(values.items()))

    def __getitem__(self, rank: int | slice) -> Any:
        if isinstance(rank, slice):
            last = max(self._values, default=-1)
            return [self._values[each] for each in range(last + 1)[rank] if each in self._values]
        try:
            return self._values[rank]
        except KeyError:
            has = ", ".join(map(str, self._values)) or "none"
            raise KeyError(f"rank {rank} has no value here; these have: {has}") from None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.values())

    def __len__(self) -> int:
        return len(self._values)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a value, ascending."""
        return tuple(self._values)

    def items(self) -> Iterator[tuple[int, Any]]:
        """Iterate over (rank, value)."""
        return iter(self._values.items())

    def gather(self) -> Any:
        """Return the parts as one: arrays joined along their first axis, lists one after the other.

        Numbers and 0-d arrays become an array with one element a rank.  The result is a new array (or
        list): later changes of it do not touch the parts, nor the ranks.

        Raises
        ------
        TypeError
            A part is neither an array, a number nor a list, or they are of different kinds.
        ValueError
            The arrays do not fit together, or no rank has a value.
        """
        parts = list(self)
        if not parts:
            raise ValueError("there is nothing to gather: no rank has a value")
        if all(isinstance(part, list) for part in parts):
            return [element for part in parts for element in part]
        if all(isinstance(part, (np.generic, int, float, complex)) or _ndim(part) == 0 for part in parts):
            return np.array(parts)
        if all(_ndim(part) for part in parts):
            try:
                return np.concatenate(parts)
            except ValueError as error:
                shapes = ", ".join(f"rank {rank}: {np.shape(part)}" for rank, part in self.items())
                raise ValueError(f"these parts do not fit together ({shapes}): {error}") from None
        kinds = ", ".join(f"rank {rank}: {type(part).__name__}" for rank, part in self.items())
        pandas = all(type(part).__module__.partition(".")[0] == "pandas" for part in parts)
        raise TypeError(
            f"arrays, numbers or lists can be gathered, all of one kind, not {kinds}"
            + "; `pandas.concat(list(…))` joins them" * pandas
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RankValues):
            return self._values == other._values
        if isinstance(other, (list, tuple)):
            return list(self) == list(other)
        return NotImplemented

    def __add__(self, other: object) -> list[Any]:
        return [*self, *other] if isinstance(other, list | RankValues) else NotImplemented

    def __radd__(self, other: object) -> list[Any]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Have a notebook show a list, or what each rank has where that would take many lines."""
        text = repr(self)
        if "\n" in text and not cycle:
            text = "\n".join(f"rank {rank}: {_form(value)}" for rank, value in self.items())
        printer.text(text)


Sequence.register(RankValues)  # so that ``match`` takes it for one


def _form(value: Any) -> str:
    """Return a value in a line: itself if it is short, else its class and shape."""
    text = repr(value)
    if "\n" not in text:
        return text
    shape, dtype = getattr(value, "shape", ""), getattr(value, "dtype", "")
    return " ".join(str(part) for part in (type(value).__name__, shape, dtype) if str(part))


def _ndim(value: Any) -> int | None:
    return value.ndim if isinstance(value, np.ndarray) else None


@dataclass(frozen=True, slots=True)
class RankResult:
    """How a task ended on one rank, and what it printed and showed."""

    rank: int
    """Number of the rank."""
    value: Any
    """The last expression's value, or None."""
    text: str
    """The value as text, empty without one."""
    stdout: str
    """What it printed."""
    stderr: str
    """What it wrote to stderr."""
    displays: tuple[Mapping[str, Any], ...]
    """Mime bundles of its rich outputs, in order."""
    seconds: float
    """Wall time of the task on this rank."""
    wait_seconds: float
    """Of it, time spent waiting for other ranks in operations."""
    error: Exception | None
    """What it raised, or None."""
    cpu_seconds: float = 0.0
    """Processor time of its process, that of its threads too."""


@dataclass(frozen=True, slots=True)
class DrawnValues:
    """The beginnings of some variables of all ranks: of a cell before and after it, or as they are now.

    `nbparallel_widgets.draw.DrawnView` shows them.
    """

    names: tuple[str, ...]
    """The variables."""
    ranks: Mapping[int, DrawnNames]
    """By rank what it reported."""
    died: Mapping[int, str] = field(default_factory=dict)
    """How each rank that died ended: it could not report."""
    number: int = 0
    """The notebook's ``In[n]``; 0 if they are of now."""

    def only(self, ranks: Sequence[int]) -> DrawnValues:
        """Return those of some ranks."""
        reports = {rank: report for rank, report in self.ranks.items() if rank in ranks}
        return replace(self, ranks=reports, died={r: how for r, how in self.died.items() if r in ranks})

    def is_missing(self, name: str) -> bool:
        """Whether no rank has a variable of this name now."""
        index = self.names.index(name)
        return all(report.after[index] is None for report in self.ranks.values())


@dataclass(frozen=True, slots=True)
class CellResult:
    """What a cell left on all ranks that took part."""

    values: RankValues
    """The last expression's value of each rank that had one."""
    ranks: Mapping[int, RankResult]
    """Everything, by rank."""
    seconds: float
    """Wall time in the notebook, from start to end."""
    notes: tuple[str, ...]
    """Lines of nbparallel's own: a rank came back, a name was replaced."""
    copied_nbytes: Mapping[str, int]
    """Bytes copied on the way to the ranks, by name."""
    shared_nbytes: Mapping[str, int]
    """Bytes that ranks see without a copy, by name."""
    drawn: DrawnValues | None = None
    """The beginnings of the names that were asked for with `draw`, before and after it."""
    findings: Mapping[str, Any] = field(default_factory=dict)
    """What the cell's observers have found, by their modules."""

    @property
    def race_report(self) -> RaceReport | None:
        """What ``check_races=True`` has found, and what it could not look at: what a notebook shows."""
        return self.findings.get(RACES)

    @property
    def races(self) -> tuple[Race, ...]:
        """The data races that ``check_races=True`` has found: ``assert not result.races``.

        AttributeError if the cell was not checked.
        """
        if self.race_report is None:
            raise AttributeError("this cell was not checked for data races: run it with check_races=True")
        return self.race_report.races

    @property
    def profile(self) -> Profile | None:
        """Where the time has gone, by line and rank, if that was asked for with ``profile=True``."""
        return self.findings.get(PROFILE)

    def __getitem__(self, rank: int) -> RankResult:
        """Return everything about one rank; KeyError if it took no part."""
        return self.ranks[rank]

    def __iter__(self) -> Iterator[RankResult]:
        return iter(self.ranks.values())

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        parts = ", ".join(f"{rank}: {result.text or '-'}" for rank, result in self.ranks.items())
        return f"<CellResult of {len(self.ranks)} ranks in {self.seconds:.3f} s: {parts}>"


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Where one rank's time in a cell has gone.

    The parts are its whole time: from the beginning of the cell to the end of the rank's part, or until now.
    """

    computing_ns: int
    """Neither waiting nor moving."""
    waiting_ns: int
    """In operations, until other ranks came."""
    moving_ns: int
    """The rest of operations."""
    finished_ns: int
    """From the beginning of the cell to the end of the rank's part; 0: it has not ended."""
    operations: int | None
    """How many operations have ended; None: not known now."""


@dataclass(frozen=True, slots=True)
class CellClock:
    """When the last cell or call began and ended, on which ranks, and how."""

    number: int = 0
    """The notebook's ``In[n]``; 0 if it was no cell."""
    task: int = 0
    """Its number among the session's tasks; 0: none yet."""
    ranks: tuple[int, ...] = ()
    """The ranks that take part."""
    began_ns: int = 0
    """When it was sent, by `time.monotonic_ns`."""
    ended_ns: int = 0
    """Likewise; 0 while it runs."""
    phase: str = "none"
    """``none``, ``running``, ``finished``, ``failed`` or ``interrupted``."""
    failed_rank: int = -1
    """The rank that failed first; -1: none."""
    failed_line: int = 0
    """The line of the cell on which it did; 0 unknown."""
    failed_between: str = ""
    """What went wrong between ranks, in a line; empty if it failed on that rank alone."""
    items: int = 0
    """How many items a function is mapped over; 0: it is no map."""

    @property
    def running(self) -> bool:
        """Whether it has begun and not ended."""
        return self.phase == "running"


@dataclass(frozen=True, slots=True)
class CellRecord:
    """The ranks' notes on the last cell or call, from which its timeline is built on request."""

    number: int
    """The notebook's ``In[n]``; 0 if it was no cell."""
    source: tuple[str, ...]
    """Its lines."""
    ranks: Mapping[int, RankTimeline]
    """Notes by rank."""
    died: Mapping[int, str]
    """How each rank that died in it ended."""
    task: int = 0
    """Its number among the session's tasks."""
    began_ns: int = 0
    """When it was sent, by `time.monotonic_ns`; 0: unknown."""
    ends: Mapping[int, str] = field(default_factory=dict)
    """How it ended on ranks where it did not succeed: ``failed``, ``interrupted`` or ``released``."""
    times: Mapping[int, RankTimes] = field(default_factory=dict)
    """Of ranks that died: what they had published."""
    copied: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes of large objects that were copied for the cell, by name, and for how many cells in a row."""
    cpu_ns: int = 0
    """Processor time of all ranks."""
