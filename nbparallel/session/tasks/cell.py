"""One cell, from its source to a task on every rank that takes part."""

from __future__ import annotations

import ast
import numbers
import warnings
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nbparallel.errors import ChannelClosedError, SupervisorDiedError, UnknownNameError
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.names.delivery import NameDelivery, Preparation
from nbparallel.session.output import OutputSink
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.tasks.dispatch import RunningTask, TaskDispatcher
from nbparallel.wire.messages import CellTask, Task
from nbparallel.wire.names import NameUpdate
from nbparallel.wire.units import size_text

MOST_GOOD = 64
"""Cells that are remembered to compile: a script's loop runs the same one again and again."""
_good: set[str] = set()


@lru_cache(maxsize=1)
def _transformer() -> Any:
    from IPython.core.inputtransformer2 import TransformerManager

    manager: Any = TransformerManager  # IPython's class has no annotations
    return manager()


def check_source(source: str, *, line_offset: int = 0, execution_count: int | None = None) -> None:
    """Raise `SyntaxError` if `source` is no cell that IPython could run.

    Parameters
    ----------
    line_offset : int
        Lines of the cell above `source`: the error's line counts as the notebook's gutter does.
    execution_count : int, optional
        The notebook's ``In[n]``, for the error's file name.
    """
    if source.lstrip().startswith("%%"):
        return  # the cell magic decides what its body means
    filename = "<cell>" if execution_count is None else f"In[{execution_count}]"
    text = "# %%parallel\n" * line_offset + source
    if not text.endswith("\n"):
        text += "\n"
    if text in _good:
        return
    try:
        transformed = _transformer().transform_cell(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks warn
            # as a whole: `return` outside of a function is no mistake of the grammar
            compile(transformed, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        if len(_good) >= MOST_GOOD:
            _good.clear()
        _good.add(text)
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:  # a null byte, too deep …
        raise SyntaxError(f"the cell cannot be compiled: {error}", (filename, None, None, None)) from None
    except SyntaxError as error:
        if error.filename in (None, "<string>"):
            error.filename = filename
        raise error.with_traceback(None) from None


ON_ERROR = ("stop", "continue")
NOTED_NBYTES = 1 << 20
"""Copying more than this is worth a line under the cell."""
DEATH_MILLISECONDS = 1000
"""A process that is killed closes its sockets a moment before its end can be seen."""


@dataclass(frozen=True, slots=True)
class CellOptions:
    """How a cell is to be run: the keyword arguments of `Session.run`, which says what they mean."""

    namespace: MutableMapping[str, Any] | None = None
    share: str | Iterable[str] = ()
    timeout: float | None = None
    sink: OutputSink | None = None
    execution_count: int | None = None
    line_offset: int = 0
    want_values: bool = True
    show_values: bool = True
    seed: int | None = None
    on_error: str = "stop"

    def __post_init__(self) -> None:
        """Take the names of `share` apart: they may stand in one string, as behind the magic's flag."""
        names = self.share.replace(",", " ").split() if isinstance(self.share, str) else self.share
        object.__setattr__(self, "share", tuple(names))

    @property
    def go_on(self) -> bool:
        """Whether the others run to their end when a rank fails."""
        return self.on_error == "continue"


def check_cell(cell: str, options: CellOptions) -> None:
    """Raise what is wrong with a cell before anything is started; errors as `Session.run`."""
    if not isinstance(cell, str):
        raise TypeError(f"a cell is its source, a string, not {type(cell).__name__}; `call` takes functions")
    if options.on_error not in ON_ERROR:
        raise ValueError(f"on_error must be one of {', '.join(ON_ERROR)}, not {options.on_error!r}")
    _check_numbers(options.timeout, options.seed)
    if not all(isinstance(name, str) for name in options.share):
        raise TypeError(f"share holds the names of arrays, as in ['a', 'b'], not {options.share!r}")
    if options.namespace is None and options.share:
        raise UnknownNameError(
            f"share={options.share!r} names arrays of namespace, and none was passed: add "
            "namespace=globals(), or a dict of those names"
        )
    check_source(cell, line_offset=options.line_offset, execution_count=options.execution_count)


def _check_numbers(timeout: Any, seed: Any) -> None:
    if timeout is not None:
        if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
            raise TypeError(f"timeout is a number of seconds, not {timeout!r}")
        if not float(timeout) >= 0:  # NaN is not either
            raise ValueError(f"timeout is in seconds and must not be negative, not {timeout!r}")
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
            raise TypeError(f"seed is a whole number, not {seed!r}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, not {seed!r}")


def launch(
    cell: str,
    options: CellOptions,
    pool: RankPool,
    names: NameDelivery,
    tasks: TaskDispatcher,
    who: tuple[int, ...],
    presses: InterruptCounter,
    notes: list[str],
    started: float,
) -> RunningTask:
    """Bring the names that the cell uses on their way, then the cell."""
    prepared = None
    updates: Mapping[int, tuple[NameUpdate, ...]] = {}
    if options.namespace is not None:
        try:
            prepared = names.prepare(cell, options.namespace, who, tuple(options.share))
        except ChannelClosedError as error:
            if not pool.supervisor.ended(DEATH_MILLISECONDS):
                raise
            raise SupervisorDiedError(
                "the supervisor process died while the cell's arrays were on their way: the next cell starts "
                "new ranks"
            ) from error
        updates = prepared.updates
        notes += [*prepared.notes, *_accounted(prepared)]
    number = tasks.next_number()
    count = number if options.execution_count is None else options.execution_count

    def make(rank: int) -> Task:
        return CellTask(
            number, who, tuple(updates.get(rank, ())), options.want_values, options.seed, cell,
            options.line_offset, count, options.show_values, options.go_on,
        )  # fmt: skip

    return tasks.launch(
        pool, number, who, make, presses, kept=prepared, notes=notes, sink=options.sink,
        timeout=options.timeout, started=started, go_on=options.go_on,
        copied=prepared.copied_nbytes if prepared is not None else None,
        shared=prepared.shared_nbytes if prepared is not None else None,
    )  # fmt: skip


def _accounted(prepared: Preparation) -> list[str]:
    """Return the line that says what was copied for this cell, if it was much."""
    moved = prepared.moved_nbytes
    copied = {name: nbytes - moved.get(name, 0) for name, nbytes in prepared.copied_nbytes.items()}
    if sum(prepared.copied_nbytes.values()) <= NOTED_NBYTES:
        return []
    parts = []
    if moved:
        parts.append(f"moved into shared memory, once: {_sizes(moved)}; ranks see it without a copy")
    if any(copied.values()):
        parts.append(f"copied for the ranks: {_sizes(copied)}")
    return ["; ".join(parts)]


def _sizes(nbytes: Mapping[str, int]) -> str:
    """Return the largest names with their sizes."""
    most = sorted((name for name in nbytes if nbytes[name]), key=lambda name: -nbytes[name])
    return ", ".join(f"{name} {size_text(nbytes[name])}" for name in most[:5]) + " …" * (len(most) > 5)
